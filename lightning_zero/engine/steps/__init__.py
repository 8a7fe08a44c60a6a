r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> after_step --> a thread (offloaded buckets)

    interception      how step() of the user's object leads here
    stepper           what comes before and after a step; what the engine asks of whatever steps its shards
    optimizer         one step, from top to bottom: what it waits for before, and what follows from it
    runs              the slices of a bucket that an optimizer steps, and their state
"""
