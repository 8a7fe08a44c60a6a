"""The Trainer's strategy.

::

    strategy        the methods of a Lightning strategy, in the order of a run
    run             its base class: what other parts ask of the strategy; steps: the steps of a run
    saves/          checkpoints          memory/    how much memory a run needs; stage=auto
    callbacks/      ZeroMonitor, and Lightning's callbacks on shards
    processes       start, connect and end processes; launchers: start them by script or fork
    allocation      compares what was started with what the run expects; mpirun without mpi4py
    precision       precision plugin; precision_row and settings are shared with Fabric
    registration    names for Trainer(strategy=) and Fabric(strategy=)
    interruptions   SIGTERM and the requeue signal: all ranks end the run at the same step
    not_finite      names the step at which a loss or norm is NaN or infinite first
    adapted         gives objects of Lightning our methods where it has no hook; loops: the Trainer's loops
    uneven          ranks with different numbers of batches
    long_sequences  steps on parts of sequences; sequence_check: compares first steps on parts and on whole sequences
    shared_batches  checks what ranks that share a batch must have in common
    step_tokens     means over all tokens of a step; fingerprints: checksums of weights
    summary         tables at the start and the end
"""
