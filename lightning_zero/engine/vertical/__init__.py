"""Vertical accumulation: all micro-batches of a step go through a unit before the next unit (``zero.vertical_chunks``).

::

    split        a call's inputs in chunks, and what the chunks give put together
    tables       parameters and buffers, which are of no batch
    trial        which tensors of a call are of its batch, found by trying
    chunked      the autograd function: chunks without a graph, and each computed again in the backward
    units        units whose forwards are divided so; sums of their gradients
    coupled      units that are not to be divided, found by class
"""
