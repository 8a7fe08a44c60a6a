"""What is seen of all shards together.

::

    values      state dicts, gather(), loading
    norms       norms and clipping
    held_bytes  bytes that are held, beside those that were planned
"""
