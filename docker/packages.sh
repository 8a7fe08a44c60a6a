#!/bin/sh
# In a build: installs what pyproject.toml asks for, at the versions of constraints.txt, into /opt/venv.
#
#   packages.sh cpu|cuda
#
# pip reads PIP_INDEX_URL, PIP_CERT and the like from the arguments of the build; TORCH_INDEX_URL is one more index.
set -eu

kind=$1
here=$(dirname "$(readlink -f "$0")")
export PIP_CONSTRAINT="$here/constraints.txt" PIP_BUILD_CONSTRAINT="$here/constraints.txt"
export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} ${TORCH_INDEX_URL:-}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

if ! python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: BASE: expected an image with python3 of at least 3.11 and its venv, got $(python3 -VV 2>&1 || true)." \
        "Give another: --build-arg BASE=..." >&2
    exit 2
fi

# pip stays outside of the environment that is shipped.
python3 -m venv "$here/tools"
"$here/tools/bin/pip" install --quiet pip
python3 -m venv --without-pip /opt/venv
pip() { "$here/tools/bin/pip" --python /opt/venv/bin/python "$@"; }

# Which build of torch it will be, before gigabytes are fetched.
pip install --quiet --dry-run --no-deps --report "$here/torch.json" torch
found=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["install"][0]["metadata"]["version"])' \
    "$here/torch.json")
case "$kind $found" in
cpu*+cpu) ;;
cpu*)
    echo "error: TORCH_INDEX_URL: expected an index with CPU builds of torch, got none: torch $found, a CUDA build of" \
        "several gigabytes, would be installed. Give the index that PyTorch's installation guide names for CPU:" \
        "make image KIND=cpu TORCH_INDEX_URL=... (docker build --build-arg TORCH_INDEX_URL=...)." >&2
    exit 2
    ;;
cuda*+cpu)
    echo "error: TORCH_INDEX_URL: expected a CUDA build of torch, got torch $found. Drop TORCH_INDEX_URL, or give the" \
        "index that PyTorch's installation guide names for CUDA." >&2
    exit 2
    ;;
esac

python3 - "$here/pyproject.toml" > "$here/requirements.txt" <<'EOF'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], sep="\n")
EOF
# Compiled to bytecode here (pip does): the user of the image cannot write it, and each start would compile torch anew.
pip install --quiet --requirement "$here/requirements.txt"
pip check

# The project itself lies beside: another layer, small where the packages are large.
site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /opt/lightning_zero > "$site/lightning_zero.pth"

# Programs that test torch itself: an eighth of it, and nothing looks for them.
rm -rf "$site/torch/test"
find "$site/torch/bin" -type f \( -name 'test_*' -o -name '*Test' -o -name 'protoc*' \) -delete
