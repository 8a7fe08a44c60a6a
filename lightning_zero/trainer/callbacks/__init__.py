"""Callbacks.

::

    monitor    ZeroMonitor    flops  floating-point operations of a batch
    averaging, stochastic_averaging, finetuning, pruning  Lightning's, where they need to know of shards
"""
