"""Long sequences: the ranks of a group have parts of one sequence, and attention sees all of it.

::

    part          a rank's part of a sequence: positions, means over all tokens
    split         batches as they come from a loader, cut along the sequence
    attention     attention over the whole sequence, of a part of the heads
    losses        means of torch's losses, over the tokens of all parts
    check         a short step in parts beside the same whole: what differs
    hugging_face  masks and losses of transformers, inside of a step
    step          all of it around one step

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509): each rank computes everything but attention for its
positions; around attention an all-to-all gives each rank all positions of its heads, and another one gives them back.
"""
