"""Checkpoints that are folders in the format of torch.distributed.checkpoint (DCP); all ranks write and read them.

::

    items  finds the boxes of tensors and other values that a rank writes; copies shards for a thread that writes them
    save   saves a folder: every rank writes one file
    index  makes, reads (without running code) and checks .metadata, which says where each value is
    read   opens a folder, from which each rank reads only its own ranges of tensors

::

    last.ckpt/
        .metadata        DCP's index: keys, shapes, and where each box of a tensor lies
        meta.pt          the rest of a Lightning checkpoint: all but modules and optimizers
        __0_0.distcp     boxes of tensors that rank 0 has written, each as torch.save writes it
        __1_0.distcp
"""
