"""Parameters as users' code meets them.

::

    fence         refuses operations on a module that would see placeholders
    access        reads outside of a unit's call: they gather the unit
    writes        what is written to a parameter gets into its master, equally on all ranks
"""
