"""Knowledge of optimizers, without ranks, units and buckets.

::

    known        torch's optimizers: which are element-wise, what state they keep
    refused      refuses optimizers before they are tried
    trial        steps small tensors with a copy of an optimizer
    probe        tries whether it steps each tensor by itself
    slices       tries whether it steps each element by itself
    windowed     makes one step by several calls of the class's step
    state_trees  tensors inside a parameter's state
    chunks       steps where a slice and its gradient differ in dtype
    low_bits     state in bf16 or in 8 bits
    loss_scale   fp16
"""
