r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> after_step --> a thread (offloaded buckets)

    interception      how step() of the user's object leads here, what it waits for before, and what follows from it
    optimizer         one step, from top to bottom
    runs              the slices of a bucket that an optimizer steps, and their state
"""
