"""The strategy, as Lightning sees it.

::

    strategy        every method of a Lightning strategy, in the order in which they are called
    saves/          checkpoints: what they hold, who writes them, behind training too, and what a run goes on from
    memory/         what a run will need of memory, what it takes, and the row that is chosen by it
    callbacks/      ZeroMonitor, and Lightning's callbacks that need to know of shards

    processes       how they meet, wait and end; launchers: how they are started, in a notebook too
    precision       its precision plugin; precision_row, settings: what Fabric's strategy has in common with this one
    registration    names for Trainer(strategy=) and Fabric(strategy=), without importing it
    interruptions   SIGTERM and the requeue signal: all ranks leave at one step
    replaced        methods of Lightning that are replaced where it has no hook
    last_batches    batches of an epoch that will not divide under zero.vertical_chunks
    long_sequences  steps on parts of sequences; sequence_check: the first ones are tried whole and in parts before
    compiled        LightningModules that torch.compile has made
    summary         what is shown at the start and at the end
"""
