"""Messages between ranks. Below the trainer, only this folder calls collectives; other code calls its communicator.

::

    communicator  --asks--> a transport --on--> a group --gives--> a pending gather, or a reduction

    communicator  logical operations on whole buckets, their order and their counts; small messages for which hosts wait
    transports    how an operation becomes messages
    groups        process groups, for reuse
    reduction     operations in flight
    agreements    small messages by which ranks agree, also before a communicator exists
    one_sided     uses of parameters by some ranks alone, which read the other ranks' shards
    sequence      messages among the ranks that share a sequence
    share         what a rank shares with the other ranks of its machine: memory, disks, cores
"""
