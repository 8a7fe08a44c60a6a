"""Write the results of a run as numbers, a picture and a page.

::

    results  the numbers of a run       figure  its picture, by matplotlib       page  a page of HTML
"""
