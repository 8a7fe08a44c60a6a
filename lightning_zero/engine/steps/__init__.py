r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> after_step --> a thread (offloaded buckets)
                                           \--> whole_optimizer --> windows --> the class's own step, on whole tensors

    interception      how step() of the user's object leads here, what it waits for before, and what follows from it
    optimizer         one step, from top to bottom
    runs              the slices of a bucket that an optimizer steps, and their state
    whole_optimizer   one step of tensors that are stepped whole, each on the rank that owns it
    windows           ... what of them is stepped at a time, and its way from shards and back
    owned             ... those of this rank, and their state
"""
