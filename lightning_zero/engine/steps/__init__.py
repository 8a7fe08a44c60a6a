r"""Steps of optimizers, from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> after_step --> a thread (offloaded buckets)

    interception      replaces step() of the user's optimizer; waits before a step, gathers after it
    optimizer         makes a user's optimizer step shards
    runs              the slices of a bucket that an optimizer steps, and their state
"""
