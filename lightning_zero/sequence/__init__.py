"""Long sequences: each rank of a group has a part of one sequence, and attention sees the whole.

::

    part       describes a rank's part of a sequence, and computes means over all tokens
    attention  computes attention over the whole sequence, for some of the heads
    check      compares a short step in parts with the same step on whole sequences
    step       runs a step on a rank's part of a batch: cuts the batch, and replaces torch's losses and transformers'
               masks and losses

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509): each rank computes everything but attention for its
positions. An all-to-all before attention gives each rank all positions of its heads; a second one returns them."""
