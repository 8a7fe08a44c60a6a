r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> around --> after_step --> worker (offloaded buckets)
                                           \--> whole_optimizer --> windows --> the class's own step, on whole tensors

    interception      how step() of the user's object leads here
    optimizer         one step, from top to bottom
    around            what it waits for before, and what follows from it
    runs              the slices of a bucket that an optimizer steps, and their state
    torch_optimizers  what is known of torch's optimizers: which are element-wise, what state they keep
    refused           what is refused of an optimizer before it is tried
    whole_optimizer   one step of tensors that are stepped whole, each on the rank that owns it
    windows           ... what of them is stepped at a time, and its way from shards and back
    owned             ... those of this rank, and their state
    in_parts          ... by several calls of the class's step
    evaluations       ... by a step that calls its closure itself
    probe             ... tried before training
    probe_slices      whether what is declared element-wise is so
    trial             a copy of an optimizer that steps other tensors
    state_leaves      tensors inside of a parameter's state
    planned_states    the state that is to come, for a plan
    mixed_dtypes      steps where a slice and its gradient differ in dtype
    narrow_states     steps whose state rests in bf16 or in 8 bits
    random_bits       ... by which these round it
    piece_threads     ... that step pieces of a slice
    worker            a thread that steps what rests off the device
    after_step        offloaded steps, and the gathers that follow a step: the next forward waits for them
    early_steps       steps inside of the backward
    loss_scale        fp16
"""
