"""Run a command by its name: ``lightning-zero train|plan|submit|replay|report|env|checkpoint ...``."""

from __future__ import annotations

import importlib
import os
import re
import sys

COMMANDS = {
    "train": "train, validate, test or predict",
    "plan": "show what each stage needs of memory, and how long a step takes",
    "submit": "submit a run to SLURM",
    "replay": "run steps of a run again, and say what differs",
    "report": "compare two runs, or list the runs of a folder",
    "env": "report on this machine; --check tests it",
    "checkpoint": "verify checkpoints, or convert them",
}


def main() -> None:
    """Run the command that the first argument names, or ``train`` if this argument is a setting or a flag. Without
    arguments print the commands, or run ``train`` if ``LOCAL_RANK`` is set (a run has started this process)."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]) and "LOCAL_RANK" not in os.environ:
        print(
            "usage: lightning-zero COMMAND ...", *(f"  {name:<12}{does}" for name, does in COMMANDS.items()), sep="\n"
        )
        sys.exit(0 if sys.argv[1:] else 2)
    if sys.argv[1:] and not re.search("=|^[-~]", word := sys.argv[1]) and word not in COMMANDS:
        from lightning_zero.settings import nearest

        close = nearest(word, COMMANDS)
        change = f"Did you mean {close}?" if close else "A setting is written key=value."
        print(f"error: {word}: expected one of {', '.join(COMMANDS)}. {change}", file=sys.stderr)
        sys.exit(2)
    name = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in COMMANDS else "train"
    if name in (own := {"checkpoint": "__main__", "report": "compare"}):
        sys.exit(importlib.import_module(f"lightning_zero.{name}.{own[name]}").main(sys.argv[1:]))
    importlib.import_module(f"lightning_zero.{name}").main()


if __name__ == "__main__":
    main()
