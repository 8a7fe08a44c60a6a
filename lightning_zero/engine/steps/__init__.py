r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> around --> pending (what is under way) --> worker (offloaded buckets)

    interception      how step() of the user's object leads here
    optimizer         one step, from top to bottom
    around            what it waits for before, and what follows from it
    runs              the slices of a bucket that an optimizer steps, and their state
    torch_optimizers  what is known of torch's optimizers: which are element-wise, what state they keep
    mixed_dtypes      steps where a slice and its gradient differ in dtype
    worker            a thread that steps what rests off the device
    pending           steps and gathers under way, which a forward waits for
    early_steps       steps inside of the backward
    loss_scale        fp16
"""
