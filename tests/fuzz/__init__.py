"""Random programs: models, settings and actions, run by the engine and by a plain twin.

::

    programs     what a program is: plain data, printed as Python source
    models       real modules, built from that data
    strategies   draws programs (hypothesis)
    sides        the engine and the twin behind one interface
    run          runs a program on every rank on both sides and compares; the verdict
    refusals     what the engine may refuse, and why
    __main__     for as long as one likes: ``python -m tests.fuzz --minutes 60``
    fits         the same for hooks and uneven data under the Trainer: programs of their own
    test_fuzz    a minute of it, always the same

A program ends in equality or in a refusal that is on the list, the same on all ranks. Actions that have nothing to work
on (a backward without a loss) do nothing, so that every part of a program can be left out, and so be made small.
"""
