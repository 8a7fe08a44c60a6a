"""Runs vertical accumulation: all micro-batches of a step pass a unit before the next unit (``zero.vertical_chunks``).

::

    chunked      the autograd function: runs chunks of the batch without a graph, and again in the backward
    trial        finds by trying which tensors of a call are divided into chunks
    units        runs forwards of units in chunks; finds units that must not be divided
"""
