"""What a checkpoint is made of, without Lightning.

::

    durable  files and folders, written whole or not at all, whatever the moment at which a process is killed
    rng      random number generators of all ranks
    sharded  folders in the format of torch.distributed.checkpoint
"""
