"""Write the results of a run as numbers, a picture and a page.

::

    record   keeps what a run logs      results  its numbers
    figure   its picture, by matplotlib page     a page of HTML
"""
