"""Runs forwards and backwards: decides when each unit is gathered, and reduces gradients.

::

    hooks ---------+             +--> gather_order --> units
    saved_weights -+--> passes --+--> gradients -----> comm/reduction
    recompute -----+             +--> sharded_grad

    hooks          registers all hooks on modules and tensors
    passes         begins and ends passes
    gather_order   gathers and drops units, in one order on all ranks
    saved_weights  weights that autograd saves and that are dropped in between
    gradients      reduces gradients into shards; bucket_grads: collects those of a bucket before
    sharded_grad   ``param.grad`` and clipping; grad_norms: norms of gradients
    access         reads and writes of parameters by users' code outside of a unit's call
    recompute      replaces forwards of units, for activation checkpointing
    compiled       torch.compile of what units compute
    containers     tensors inside of nested containers
"""
