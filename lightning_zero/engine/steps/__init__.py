r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> after_step --> a thread (offloaded buckets)

    interception      replace step() of the user's object; wait before a step, gather after it
    optimizer         one step, from top to bottom
    runs              the slices of a bucket that an optimizer steps, and their state
"""
