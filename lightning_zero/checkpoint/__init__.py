"""The parts of a checkpoint, without Lightning.

::

    durable   files and folders that are complete or absent, even if a process is killed
    archive   torch's one-file checkpoints, whose bytes several processes write
    verify    compares checkpoints with their checksums
    hugging_face  exports folders for Hugging Face
    sharded   folders in the format of torch.distributed.checkpoint
    rng       states of all ranks' random number generators
    __main__  python -m lightning_zero.checkpoint
"""
