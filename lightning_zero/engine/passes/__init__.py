"""A forward and its backward: which unit is gathered when, and where gradients go.

::

    hooks ---------+             +--> gather_order --> units
    saved_weights -+--> passes --+--> gradients -----> comm/reduction
    recompute -----+             +--> gradient_sentinels

    hooks               all hooks on modules and tensors
    events              what hooks tell a pass
    passes              the open pass, what begins and ends it; open_pass: its phases; graph_task: backwards untold
    stays               units that are gathered for a use, and dropped
    progress            what each unit still waits for in it
    gather_order        the order of gathers, learned and then run ahead of
    saved_weights       weights that autograd has saved, and that go in between
    gradients           gradients over the ranks, into shards; bucket_grads: those of one bucket before that
    issued              how many reductions all ranks have issued, as far as is known
    gradient_sentinels  what stands in ``param.grad``
    grad_norms          norms of gradients; total_norm: as torch's clipping asks for that of many
    grad_changes        what may be done to gradients in place
    recompute           activation checkpointing by unit; buffers_again: what its second forwards are not to change
    compiled            torch.compile, of what units compute
    output_dtypes       modules that give back the dtype that they were given
    containers          tensors in any container that a module returns
    explain_dtypes      torch's errors about dtypes, with the setting that they come from
    explain_weights     torch's errors about weights that come and go
"""
