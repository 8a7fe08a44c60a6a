"""What stands on the engine, and works layer by layer: a loss in chunks.

::

    loss             a head and its loss in chunks of tokens, for the user's step
"""
