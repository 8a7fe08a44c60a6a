"""A forward and its backward: which unit is gathered when, and where gradients go.

::

    hooks ---------+             +--> gather_order --> units
    saved_weights -+--> passes --+--> gradients -----> comm/reduction
    recompute -----+             +--> sharded_grad

    hooks               all hooks on modules and tensors; events: what they tell a pass
    passes              begins and ends a pass; open_pass: its phases, and why a unit is still gathered
    gather_order        the order of gathers, learned and then run ahead of
    saved_weights       weights that autograd has saved, and that go in between
    gradients           gradients over the ranks, into shards; bucket_grads: those of one bucket before that
    sharded_grad        what ``param.grad`` is: reads, norms, changes in place; and clipping
    grad_norms          norms of gradients
    access              reads by users' code, outside of a unit's call: they gather the unit; and writes, which get
                        into masters, equally on all ranks
    recompute           activation checkpointing by unit
    compiled            torch.compile, of what units compute
    output_dtypes       modules that give back the dtype that they were given
    containers          tensors in any container that a module returns
    errors              torch's errors about dtypes and weights, with the setting that they come from
"""
