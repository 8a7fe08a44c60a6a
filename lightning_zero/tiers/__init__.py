"""Where values rest off the device. A tier moves bytes and decides nothing.

::

    extents  an extent is a place for one tensor
    host     pinned slabs          pages    aligned and pinned memory, staging buffers
                                   pinned   of a fixed size, for what passes through
    nvme     files                 aio      O_DIRECT reads and writes      regions  places in a file
                                   claims   whose file it is              write_behind  lets a write go on
    limits   what this process may still take of its machine
"""
