"""Whole values: those of all shards together.

::

    shown            whole parameters, inside of gather() and between runs
    values           which rank holds which part of what, for all forms in which it is saved
    state_dicts      of the module and of optimizers, out of shards and into them
    snapshot         what shards are now, copied for a thread that writes them later
    restage          another stage or offload row, from shard to shard
"""
