"""Draw what each rank did in some steps (``zero.timeline``).

::

    record        records the steps, aligns the clocks of ranks, and writes the files
    compute_lane  which unit is computed when
    page          rows of bars, and why compute waited, as a page of HTML
"""
