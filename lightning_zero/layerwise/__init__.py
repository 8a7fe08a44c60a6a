"""On top of the engine: optimizers that step whole tensors, a loss that is computed in chunks, and float8.

::

    whole_optimizer  steps whole tensors, each on the rank that owns it
    messages         sends tensors to the ranks that step them, and back
    owned            holds the tensors that this rank steps, and their state
    loss             computes a head and its loss in chunks of tokens
    float8           lets linear layers compute in float8, by torchao
"""
