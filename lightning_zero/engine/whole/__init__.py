"""Gather whole values from all shards, and write whole values into shards.

::

    whole_params     whole parameters inside of gather() and between Trainer runs
    values           which rank saves which elements
    state_dicts      state dicts of the module and optimizers, saved from shards and loaded into them
    restage          changes the stage or the offload setting
"""
