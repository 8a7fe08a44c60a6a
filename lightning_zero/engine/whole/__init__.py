"""Whole values, put together from all shards.

::

    whole_params     whole parameters inside of gather() and between runs
    values           which rank saves which part
    state_dicts      state dicts of the module and optimizers, saved from shards and loaded into them
    snapshot         a host copy of shards for a thread that writes it
    restage          changes the stage or offload row
"""
