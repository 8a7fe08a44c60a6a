"""Long sequences: the ranks of a group have parts of one sequence, and attention sees all of it.

::

    part          a rank's part of a sequence: positions, means over all tokens
    split         batches as they come from a loader, cut along the sequence
    exchange      heads for positions, and back: differentiable
    attention     attention over the whole sequence, of a part of the heads
    losses        means of torch's losses, over the tokens of all parts
    watch         finds attention and losses while a step runs
    check         a short step in parts beside the same whole: what differs
    hugging_face  masks, attention and losses of transformers, inside of a step
    model         heads that do not divide, found before a run
    step          all of it around one step

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509): each rank computes everything but attention for its
positions; around attention an all-to-all gives each rank all positions of its heads, and another one gives them back.
"""
