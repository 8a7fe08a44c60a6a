"""Write, read and verify checkpoints. This package does not import Lightning.

::

    durable   writes files and folders that are complete or absent, even if a process is killed
    archive   writes torch's one-file checkpoints from several processes
    verify    compares checkpoints with their checksums
    hugging_face  exports folders for Hugging Face
    sharded   saves and reads folders in the format of torch.distributed.checkpoint
    rng       saves and restores the states of all ranks' random number generators
    __main__  the commands of python -m lightning_zero.checkpoint
"""
