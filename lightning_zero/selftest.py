"""Stages and tiers on this machine: ``python -m lightning_zero.selftest``; see :mod:`lightning_zero.app.selftest`."""

from lightning_zero.app.selftest import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
