r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> around --> after_step --> worker (offloaded buckets)

    interception      how step() of the user's object leads here
    optimizer         one step, from top to bottom
    around            what it waits for before, and what follows from it
    runs              the slices of a bucket that an optimizer steps, and their state
    torch_optimizers  what is known of torch's optimizers: which are element-wise, what state they keep
    mixed_dtypes      steps where a slice and its gradient differ in dtype
    narrow_states     steps whose state rests in bf16 or in 8 bits
    worker            a thread that steps what rests off the device
    after_step        offloaded steps, and the gathers that follow a step: the next forward waits for them
    early_steps       steps inside of the backward
    loss_scale        fp16
"""
