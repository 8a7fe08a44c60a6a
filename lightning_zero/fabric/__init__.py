"""Fabric's strategy, on the same engine as the Trainer's.

::

    strategy        what Fabric asks of a strategy      module         what fabric.setup returns inside its wrapper
    precision       backward, and the loss scale        checkpoints    fabric.save and fabric.load

Code that both strategies share is in ``trainer``.
"""
