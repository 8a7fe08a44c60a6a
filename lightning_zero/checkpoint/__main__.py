"""The commands of ``python -m lightning_zero.checkpoint``: ``convert`` and ``verify``."""

from __future__ import annotations

import importlib
import sys

# name -> (module with ``main(arguments) -> exit code``, imported when needed; help)
COMMANDS = {
    "convert": ("lightning_zero.app.convert", "write a checkpoint in another form: convert IN OUT to=..."),
    "verify": ("lightning_zero.checkpoint.verify", "compare checkpoints with their checksums: verify PATH ..."),
}


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        module, _ = COMMANDS[arguments[0]]
        code: int = importlib.import_module(module).main(arguments[1:])
        return code
    print("usage: python -m lightning_zero.checkpoint COMMAND ...\n")
    for name, (_, help_text) in COMMANDS.items():
        print(f"  {name:10} {help_text}")
    if arguments and arguments[0] not in ("-h", "--help", "help"):
        print(f"\nerror: there is no command {arguments[0]!r}", file=sys.stderr)
        return 2
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
