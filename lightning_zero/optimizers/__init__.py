"""Find out how an optimizer steps and what state it keeps, and step in pieces or in low precision.

::

    known        torch's optimizers: which are element-wise, what state they keep
    refused      raises errors for optimizers that cannot work, before they are tried
    trial        steps small tensors with a copy of an optimizer
    probe        tries whether an optimizer steps each tensor, or each element, by itself
    side_effects finds what a step changes besides tensors
    inner        handles the state of optimizers inside of others, and state dicts of classes' own
    state_trees  handles the tensors inside a parameter's state
    chunks       steps a flat slice in pieces, in a wider dtype than that of masters or gradients
    low_bits     state in bf16
    loss_scale   the dynamic loss scale for fp16
"""
