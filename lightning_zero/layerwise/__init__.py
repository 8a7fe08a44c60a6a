"""Optimizers that step whole tensors, a loss that is computed in chunks, and float8, on top of the engine.

::

    whole_optimizer  steps whole tensors, each on the rank that owns it
    owned            holds the tensors that this rank steps, and their state
    loss             a head and its loss in chunks of tokens
    float8           linear layers of torchao
"""
