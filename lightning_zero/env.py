"""Print facts for a bug report: ``python -m lightning_zero.env``; see :mod:`lightning_zero.app.env`."""

from lightning_zero.app.env import main as main

if __name__ == "__main__":
    main()
