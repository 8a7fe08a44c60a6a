"""Checkpoints of the Trainer.

::

    checkpointing        the strategy's hooks for checkpoints; positions of all ranks' loaders in an epoch
    checkpoint_files     reading and writing, shared with Fabric
    checkpoint_io        files, written atomically
    range_saves          one file, written by all ranks
    sharded_checkpoints  folders, written by all ranks
    background_saves     folders, written while training goes on
    held                 parameters inside of other entries of a checkpoint
    kept_files           last.ckpt, files that a killed run has left, the checkpoint from which a restarted job resumes
    checkpoint_fits      whether a checkpoint fits this model, and settings it overrides
    random_numbers       states of all ranks' random number generators
"""
