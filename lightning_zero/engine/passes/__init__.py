"""Decides when each unit is gathered in forwards and backwards, and reduces gradients.

::

    hooks ---------+             +--> gather_order --> units
    saved_weights -+--> passes --+--> gradients -----> comm/reduction
    recompute -----+             +--> sharded_grads

    hooks          registers all hooks on modules and tensors
    passes         begins and ends passes; phases: the phases of a pass
    gather_order   gathers and reshards units, in one order on all ranks
    saved_weights  gathers weights that autograd has saved, when a backward reads them
    gradients      collects gradients, and reduces gradients into shards
    sharded_grads  clipping and values of gradients; sharded_grad: ``param.grad``; grad_norms: norms
    access         reads and writes of parameters by users' code outside of their units' calls
    writes         copies users' writes to parameters into the masters, and shares writes to buffers
    between        shows masters to users' code between steps
    masters        the memory of these masters; reads of other ranks' shards, for code that only some ranks run
    recompute      replaces forwards of units, for activation checkpointing
    compiled       torch.compile of units' forwards
    containers     tensors inside of nested containers
"""
