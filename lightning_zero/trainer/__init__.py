"""The Trainer's strategy.

::

    strategy        the methods of a Lightning strategy, in the order of a run
    run             the strategy's base class, which the other files use
    steps           the steps of a run, also on parts of sequences and on batches that ranks share; checksums of weights
    saves/          checkpoints          memory/    how much memory a run needs; stage=auto
    callbacks/      ZeroMonitor, and Lightning's callbacks on shards
    processes       starts, connects and ends processes; launchers: starts them by script or fork
    precision       precision plugin; the base class, processes and settings are shared with Fabric
    registration    names for Trainer(strategy=) and Fabric(strategy=)
    interruptions   SIGTERM and the requeue signal: all ranks end the run at the same step; NaN and inf in losses
    adapted         overrides methods of Lightning's objects where Lightning has no hook; loops: methods of its loops
    uneven          ends epochs on all ranks together if ranks have different numbers of batches
    sequence_check  compares the first steps on parts of sequences with steps on whole sequences
    step_tokens     means over all tokens of a step
    summary         tables at the start and the end
"""
