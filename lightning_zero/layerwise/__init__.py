"""What stands on the engine, and works layer by layer: optimizers of whole tensors, and a loss in chunks.

::

    whole_optimizer  one step of tensors that are stepped whole, each on the rank that owns it
    owned            ... those of this rank, and their state
    loss             a head and its loss in chunks of tokens, for the user's step
"""
