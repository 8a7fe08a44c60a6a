"""Tensor parallelism: adjacent ranks share one batch, and each has a part of every large matrix.

::

    split         describes which part of a tensor a rank has
    local_leaves  turns split parameters into plain tensors, which are DTensors in their module's forward
    plans         splits a module by transformers' plan, by zero.tensor_plan, or as configure_model has split it

::

    rank = data * n + t     ranks with the same t share the shards of split parameters; all ranks share the shards of
                            other parameters; ranks with the same value of data have one batch

After Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053)."""
