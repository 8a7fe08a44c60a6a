"""Optimizers that step whole tensors, and a loss that is computed in chunks, on top of the engine.

::

    whole_optimizer  steps whole tensors, each on the rank that owns it
    owned            holds the tensors that this rank steps, and their state
    loss             a head and its loss in chunks of tokens
"""
