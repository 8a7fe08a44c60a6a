"""Write the results of runs as numbers, pictures and pages.

::

    record   keeps the metrics that a run logs       figure    pictures, by matplotlib
    results  reads metrics; the numbers of a run     compare   two runs side by side, an index of runs
    page     pages of HTML
"""
