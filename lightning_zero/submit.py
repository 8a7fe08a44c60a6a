"""Submit a run as a SLURM job: ``python -m lightning_zero.submit``; see :mod:`lightning_zero.app.submit`."""

from lightning_zero.app.submit import main as main

if __name__ == "__main__":
    main()
