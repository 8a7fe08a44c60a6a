"""What is known of optimizers, without ranks, units and buckets.

::

    known        torch's optimizers: which step each element by itself, what state they keep
    refused      what is refused of an optimizer before it is tried
    trial        a copy of an optimizer steps small tensors: probe, whether it steps each tensor by itself;
                 slices, whether it steps each element by itself
    windowed     one step of an optimizer by several calls of its class's step
    state_trees  tensors inside of a parameter's state
    chunks       steps where a slice and its gradient differ in dtype
    low_bits     state in bf16 or in 8 bits
    loss_scale   fp16
"""
