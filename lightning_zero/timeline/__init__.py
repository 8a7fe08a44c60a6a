"""What each rank did in some steps, as pictures (``zero.debug.timeline``).

::

    compute_lane  what is computed when
    record    records the steps, brings the clocks of all ranks together, and collects what they have recorded
    lanes     bars beside and below each other; what compute stood still for
    trace     a file for Perfetto            page  one page of HTML            picture  a PNG, by matplotlib
"""
