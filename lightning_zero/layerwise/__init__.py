"""Optimizers of whole tensors, and a loss in chunks, on top of the engine.

::

    whole_optimizer  steps whole tensors, each on the rank that owns it
    owned            keeps the tensors of this rank, and their state
    loss             a head and its loss in chunks of tokens
"""
