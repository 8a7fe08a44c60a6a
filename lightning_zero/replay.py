"""Run steps of a run again: ``lightning-zero replay``; see :mod:`lightning_zero.app.replay`."""

from lightning_zero.app.replay import main as main

if __name__ == "__main__":
    main()
