"""Long sequences: each rank of a group has a part of one sequence, and attention sees the whole.

::

    part          a rank's part of a sequence: positions, means over all tokens
    split         cuts a loader's batches along the sequence
    attention     attention over the whole sequence, for a part of the heads
    losses        means of torch's losses, over the tokens of all parts
    check         compares a short step in parts with the same step on whole sequences
    hugging_face  masks and losses of transformers inside a step
    step          puts all of this around one step

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509): each rank computes everything but attention for its
positions. An all-to-all before attention gives each rank all positions of its heads; another one returns them.
"""
