"""Whole values: those of all shards together.

::

    gather           parameters show whole masters for a while
    host_copy        the module whole between runs, in memory that the ranks of a host share
    module_state     the module's state dict, out of shards and into them
    optimizer_state  an optimizer's, likewise
    sharded_state    both, with the parts of tensors that each rank holds
    owned_state      state of optimizers that step whole tensors, saved, loaded and moved
    ranges           whole values of which each rank gives its ranges
    snapshot         what shards are now, for a thread that writes them later
    restage          another stage or offload row, from shard to shard
"""
