"""Checkpoints of a Trainer.

::

    checkpointing        the strategy's hooks for checkpoints
    checkpoint_files     what the strategies of the Trainer and of Fabric do alike
    checkpoint_io        files, written whole or not at all
    range_saves          saves of one file by all ranks
    sharded_checkpoints  folders, written by all ranks
    background_saves     saves of folders that go on behind training
    kept_files           last.ckpt, and what a dead run has left
    checkpoint_fits      whether one is of this model, and what it overrules
    random_numbers       generators of all ranks
"""
