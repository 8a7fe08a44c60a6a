"""Hold values off the device. A tier moves bytes and decides nothing.

::

    extents  an extent is a place for one tensor
    host     pinned slabs          pages    aligned and pinned memory, staging buffers
                                   pinned   pinned memory of a fixed size, for transfers
    nvme     files                 aio      O_DIRECT reads and writes
                                   claims   which rank uses which file
    limits   what this process may still take of its machine
"""
