"""Tensor parallelism: adjacent ranks share one batch, and each has a part of every large matrix.

::

    split         which part of a tensor a rank has, in the coordinates of both
    local_leaves  the engine's view of a split parameter: a plain tensor, which is a DTensor in its module's forward
    plans         splits a module: by transformers' plan, by zero.tensor_plan, or as its configure_model has done it

::

    rank = data * n + t     ranks with the same t share the shards of split parameters; all ranks share the shards of
                            the others; ranks with the same data have one batch

After Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053).
"""
