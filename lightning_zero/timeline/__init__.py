"""Draw what each rank did in some steps (``zero.debug.timeline``).

::

    record        records the steps, aligns the clocks of ranks, and collects the spans
    compute_lane  which unit is computed when     lanes    rows of bars, and why compute waited
    trace         a file for Perfetto             page     a page of HTML        picture  a PNG, by matplotlib
"""
