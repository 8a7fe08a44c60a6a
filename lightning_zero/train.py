"""The main job: ``python -m lightning_zero.train``; see :mod:`lightning_zero.app.train`."""

from lightning_zero.app.train import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
