"""Write the results of runs as numbers, pictures and pages.

::

    record   keeps what a run logs          series    reads it again
    results  the numbers of a run           figure    pictures, by matplotlib
    page     pages of HTML                  compare   two runs side by side, an index of runs
"""
