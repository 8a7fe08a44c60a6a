"""Runs a command by its name: ``lightning-zero train|plan|submit|env|checkpoint ...``."""

from __future__ import annotations

import importlib
import sys

COMMANDS = ("train", "plan", "submit", "env", "checkpoint")


def main() -> None:
    """Run the command that is named first. Without a name it is ``train``, as in the processes that a run starts."""
    name = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in COMMANDS else "train"
    if name == "checkpoint":
        sys.exit(importlib.import_module("lightning_zero.checkpoint.__main__").main(sys.argv[1:]))
    importlib.import_module(f"lightning_zero.{name}").main()


if __name__ == "__main__":
    main()
