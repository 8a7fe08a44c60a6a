"""Ranks as processes: who started them, how they meet, and what happens when one goes.

::

    start      started_by    which launcher started this process, and its place among the others
               environments  processes that mpirun has started, for Lightning
               allocation    what was started against what the run expects
               rendezvous    all ranks join in a store with equal settings, or a sentence says which did not; then
                             they make the process group
    run        waits         waits for other ranks, with a bound and with names
               watchdog      a thread that ends a rank which waits for one that is gone
               peers         which rank is gone, and who found out
               messages      what ranks send each other, as JSON
               mailbox       messages to rank 0 that nobody waits for
               progress      how far long work is, for who waits for it
    again      verdict       what an end means to the script of a job
               resume        a job's name, which stays, and the checkpoint to go on from
"""
