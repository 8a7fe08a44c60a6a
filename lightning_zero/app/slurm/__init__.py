"""SLURM.

::

    cluster  group ``cluster``: what a run asks for
    script   the script of a job
"""
