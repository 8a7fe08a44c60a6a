"""Messages between ranks. Below the trainer, only this folder calls collectives; all else asks its communicator.

::

    communicator --asks--> a transport --on--> a group --gives--> a pending gather, or a reduction

    communicator    logical operations on whole buckets, their order and their counts
    small_messages  ... and what the host waits for: agreements, sums of a few numbers, values of one rank
    transports      how an operation becomes messages
    groups          process groups, which are used again
    reduction       operations in flight
    agreements      small messages by which ranks agree, also before there is a communicator
    sequence        messages among the ranks that share a sequence
    streams         CUDA streams of one engine, one for each kind of transfer
    profiling       ranges for profilers
    share           what a rank shares with the others of its machine: memory, disks, cores
"""
