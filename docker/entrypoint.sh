#!/bin/sh
# Entry point of the images, there as `lightning-zero`:
#
#   lightning-zero experiment=tiny trainer.max_steps=50     the main job with overrides of Hydra
#   lightning-zero --help                                   all groups and values
#   lightning-zero plan|submit|env|checkpoint ...           the other commands
#   lightning-zero torchrun -m lightning_zero.train ...     another program of the image, in place of the main job
#
# Outputs go below $LIGHTNING_ZERO_RUNS (/runs). It checks that something can be written there before anything starts.
set -eu

export PATH="/opt/venv/bin:$PATH"
export LIGHTNING_ZERO_RUNS="${LIGHTNING_ZERO_RUNS:-/runs}"

# A user that the image does not know (docker run --user, enroot) has no home folder to write in, and no name. TMPDIR may
# be that of a host, whose folder is not here.
if ! [ -d "${HOME:-}" ] || ! [ -w "$HOME" ]; then
    [ -d "${TMPDIR:-}" ] && [ -w "$TMPDIR" ] || TMPDIR=/tmp
    HOME=$TMPDIR/lightning_zero-$(id -u)
    mkdir -m 700 "$HOME" 2> /dev/null || true # whoever needs it says what is wrong
    export HOME
fi
id -un > /dev/null 2>&1 || export USER="${USER:-user$(id -u)}"

case "${1-}" in
'' | -* | +* | '~'* | *=*) ;; # overrides and flags of Hydra
*) if command -v "$1" > /dev/null; then exec "$@"; fi ;;
esac

writes_there=yes
for argument in "$@"; do
    case "$argument" in
    -h | --help | --hydra-help | --version | -c | --cfg | --cfg=* | -i | --info | --info=* | -sc | --shell-completion)
        writes_there=no # shows something and ends
        ;;
    hydra.run.dir=* | hydra.sweep.dir=*) writes_there=no ;; # elsewhere; or below, and then the main job sees to it
    esac
done

if [ "$writes_there" = yes ]; then
    # access(2) is not always right about network file systems: try.
    if probe=$(mktemp "$LIGHTNING_ZERO_RUNS/.probe-XXXXXX" 2>&1); then
        rm -f "$probe"
    else
        owner=$(stat -L -c ', folder of user %u:%g with mode %a' "$LIGHTNING_ZERO_RUNS" 2> /dev/null || true)
        user=$(id -u):$(id -g)
        cat >&2 << EOF
error: $LIGHTNING_ZERO_RUNS: expected a folder that user $user can write in, got: ${probe##*: }$owner. Mount one that is yours:
  mkdir -p runs    # Docker makes a missing folder as root
  docker run --user "\$(id -u):\$(id -g)" -v "\$PWD/runs:/runs" ...    # or without --user, after: sudo chown $user runs
  apptainer run --bind "\$PWD/runs:/runs" ...
  srun --container-mounts="\$PWD/runs:/runs" ...
EOF
        exit 2
    fi
fi

exec python -m lightning_zero "$@"
