"""Messages between ranks. One file calls collectives; everything else asks it.

::

    communicator  process groups, transports, the order of messages, agreements between ranks
    streams       CUDA streams of one engine, one for each kind of transfer
    profiling     ranges for profilers
    share         what a rank shares with the others of its machine: memory, disks, cores
"""
