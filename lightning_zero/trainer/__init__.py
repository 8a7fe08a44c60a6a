"""The strategy, as Lightning sees it.

::

    strategy        every hook of a Lightning strategy; checkpointing: those for checkpoints; steps: those of steps
    processes       how they meet, wait and end; launchers: how they are started, in a notebook too
    precision       its precision plugin; precision_row, settings: what Fabric's strategy has in common with this one
    registration    names for Trainer(strategy=) and Fabric(strategy=), without importing it
    checkpoint_io   files, written whole or not at all      random_numbers  generators of all ranks, in checkpoints
    sharded_checkpoints  the same as folders, written by all ranks
    background_saves     saves of either kind that go on behind training
    range_saves     saves of one file by all ranks          verified_loads  checksums, before a checkpoint is loaded
    kept_files      last.ckpt, and what a dead run has left     checkpoint_fits  whether one is of this model
    overruled       settings of optimizers that a checkpoint overrules
    last_batches    batches of an epoch that will not divide under zero.micro_batches
    validations     where a resume inside a validation goes on
    interruptions   SIGTERM and the requeue signal: all ranks leave at one step
    restaging       another stage or offload row for a run that goes on
    auto_row        stage=auto: the row that a run takes, and why
    step_peak       the most bytes of a step on the CPU
    activations     what a micro-batch needs, found on tensors without memory; fake_module: the copy that has such
    compiled        LightningModules that torch.compile has made
    long_sequences  steps on parts of sequences
    averaging, stochastic_averaging, finetuning, pruning  Lightning's callbacks that need to know of shards
    monitor         ZeroMonitor                  flops          floating-point operations of a batch
    summary         what is shown at the start and at the end     bars  whether the Trainer has a progress bar
"""
