"""Fabric's strategy, on the same engine as the Trainer's.

::

    strategy     the strategy, with fabric.save and fabric.load, and the module inside the wrapper of fabric.setup
    precision    backward, and the loss scale

Code that both strategies share is in ``trainer``.
"""
