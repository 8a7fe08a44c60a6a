"""What a checkpoint is made of, without Lightning.

::

    durable   files and folders, written whole or not at all, whatever the moment at which a process is killed
    archive   torch's one-file checkpoints, whose bytes several processes write
    crc       the checksum of a record, put together from those of pieces
    verify    compares checkpoints with their checksums
    hugging_face  folders of Hugging Face, out
    sharded   folders in the format of torch.distributed.checkpoint
    rng       random number generators of all ranks
    __main__  python -m lightning_zero.checkpoint
"""
