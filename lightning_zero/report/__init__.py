"""Write what a run leaves to look at.

::

    results  the numbers of a run       figure  its picture, and a sweep's, by matplotlib       page  a page of HTML
"""
