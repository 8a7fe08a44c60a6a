"""Published packages that are built on Lightning, trained by these strategies and by DDP: ``make test-field``.

- ``__main__.py`` makes the environment (``.venv-field``), runs the programs, compares losses and prints a table.
- ``support.py``: what the programs share.
- Each other file is a program that uses one package as its documentation does, on synthetic data, with nothing changed
  but the arguments of the Trainer. One program, one strategy:
  ``.venv-field/bin/python -m tests.field.gluonts FOLDER zero3``.

A new package gets a program, and a line in ``PACKAGES``. Choose a kind of training that is not there yet, and what
downloads nothing as it runs. One that needs torchvision needs a build of it for
CPUs: beside torch for CPUs, the CUDA build breaks the import of other programs too. pytest collects nothing here.
"""
