"""Fabric's strategy: a second front on the engine that the Trainer's strategy drives.

::

    strategy        what Fabric asks of a strategy      module         what fabric.setup returns inside of its wrapper
    precision       backward, and the loss scale        checkpoints    fabric.save and fabric.load

What both fronts share is in ``trainer``: processes, launchers, settings, precision_row, and how checkpoints are
written and read.
"""
