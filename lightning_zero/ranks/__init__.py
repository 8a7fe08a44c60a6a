"""Ranks as processes: who started them, how they meet, and what happens when one ends.

::

    start      started_by    which launcher started this process, and its place in the job
               rendezvous    all ranks join in a store with equal settings, or a message says which did not; then
                             they make the process group
    run        waits         bounded waits for other ranks, with errors that name ranks
               watchdog      a thread that ends a rank which waits for a dead one
               peers         which rank is gone, and who found out
               messages      what ranks send each other, as JSON
               mailbox       messages to rank 0 for which nobody waits; a text of all ranks, printed once
               progress      shows the progress of long work
    again      resume        names a job across restarts, finds its last checkpoint, tells its script how it ended
"""
