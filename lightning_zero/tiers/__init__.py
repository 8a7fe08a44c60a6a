"""Hold values off the device, in a tier: host memory or files. A tier copies values; callers decide which and when.

::

    extents  describes the space of one tensor on a tier (an extent)
    host     pinned slabs          pages    aligned and pinned memory, staging buffers
                                   pinned   pinned memory of a fixed size, for transfers
    nvme     files                 aio      O_DIRECT reads and writes
                                   claims   locks the file of each rank
    limits   reads how much memory and how many cores this process may still take
    remote   files and folders in object stores, for checkpoints and pretrained models
"""
