"""What the engine must know about optimizers. Nothing in this package knows ranks, units or buckets.

::

    known        torch's optimizers: which are element-wise, what state they keep
    refused      refuses optimizers before they are tried
    trial        steps small tensors with a copy of an optimizer
    probe        tries whether an optimizer steps each tensor, or each element, by itself
    side_effects what a step changes besides tensors
    state_trees  tensors inside a parameter's state
    chunks       steps a flat slice in pieces, in a wider dtype than the slice's or its gradient's
    low_bits     state in bf16
    loss_scale   the dynamic loss scale for fp16
"""
