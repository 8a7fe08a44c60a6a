"""Print the memory plan of a model: ``python -m lightning_zero.plan``; see :mod:`lightning_zero.app.plan`."""

from lightning_zero.app.plan import main as main

if __name__ == "__main__":
    main()
