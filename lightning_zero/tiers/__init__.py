"""Hold values off the device, in tiers: host memory or files. A tier moves bytes; its callers decide which and when.

::

    extents  an extent is the space of one tensor on a tier
    host     pinned slabs          pages    aligned and pinned memory, staging buffers
                                   pinned   pinned memory of a fixed size, for transfers
    nvme     files                 aio      O_DIRECT reads and writes
                                   claims   which rank uses which file
    limits   memory and cores that this process may still take
    remote   files and folders in object stores, of checkpoints and first values
"""
