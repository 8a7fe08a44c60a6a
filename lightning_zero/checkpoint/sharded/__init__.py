"""Checkpoints that are folders in the format of torch.distributed.checkpoint (DCP); all ranks write and read them.

::

    items  what a rank writes: boxes of tensors, and small values; copies of shards for a thread that writes them
    save   saves a folder: every rank writes one file
    index  .metadata, which says where each value is: made, read without running code, checked
    read   opens a folder: a rank reads only its parts of tensors

::

    last.ckpt/
        .metadata        DCP's index: keys, shapes, and where each box of a tensor lies
        meta.pt          the rest of a Lightning checkpoint
        __0_0.distcp     boxes of tensors that rank 0 has written, each as torch.save writes it
        __1_0.distcp
"""
