"""The Trainer's strategy.

::

    strategy        the methods of a Lightning strategy, in the order of a run
    saves/          checkpoints          memory/    what a run needs of memory; stage=auto
    callbacks/      ZeroMonitor, and Lightning's callbacks on shards
    processes       start, connect and end processes; launchers: start them by script or fork
    precision       precision plugin; precision_row and settings are shared with Fabric
    registration    names for Trainer(strategy=) and Fabric(strategy=)
    interruptions   SIGTERM and the requeue signal: all ranks leave at one step
    adapted         gives objects of Lightning our methods where it has no hook; loops: the Trainer's loops
    last_batches    refuses batches that zero.vertical_chunks does not divide
    long_sequences  steps on parts of sequences; sequence_check: tries the first ones whole and in parts
    summary         tables at the start and the end
"""
