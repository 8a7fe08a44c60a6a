"""Vertical accumulation: all micro-batches of a step go through a unit before the next unit (``zero.vertical_chunks``).

::

    chunked      the autograd function: chunks without a graph, and each computed again in the backward
    trial        which tensors of a call are of its batch, found by trying
    units        units whose forwards are divided so, and those that are not to be
"""
