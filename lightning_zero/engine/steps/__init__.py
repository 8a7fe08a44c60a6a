r"""A step: from reduced gradients to new parameters.

::

    optimizer.step() --interception--> optimizer --> runs --> torch's kernels, on slices
                                           \--> around --> after_step --> worker (offloaded buckets)

    interception      how step() of the user's object leads here
    optimizer         one step, from top to bottom
    around            what it waits for before, and what follows from it
    runs              the slices of a bucket that an optimizer steps, and their state
"""
