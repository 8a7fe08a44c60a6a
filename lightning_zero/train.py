"""Train, validate, test or predict: ``python -m lightning_zero.train``; see :mod:`lightning_zero.app.train`."""

from lightning_zero.app.train import main as main

if __name__ == "__main__":
    main()
