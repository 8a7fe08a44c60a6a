"""Checkpoints that are folders in the format of torch.distributed.checkpoint (DCP), written and read by all ranks.

::

    items     what of a checkpoint a rank writes: boxes of tensors, and small values
    write     one file of a rank
    save      all ranks together
    index     .metadata, which says where everything is: made, read without running code, and checked
    read      tensors of such a folder, of which a rank reads its parts only

::

    last.ckpt/
        .metadata        DCP's index: keys, shapes, and where each box of a tensor lies
        meta.pt          what else is in a checkpoint of Lightning
        __0_0.distcp     boxes of tensors that rank 0 has written, each as torch.save writes it
        __1_0.distcp
"""
