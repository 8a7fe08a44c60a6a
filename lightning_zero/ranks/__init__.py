"""Ranks as processes: who started them, how they meet, and what happens when one ends.

::

    start      started_by    which launcher started this process, and its place in the job
               rendezvous    all ranks join in a store with equal settings, or a message says which did not; then
                             they make the process group
    run        waits         bounded waits for other ranks, with errors that name ranks
               watchdog      threads that post what a rank does, and end a rank which waits for a dead one
               posts         what each rank posts for the others
               verdict       judges from the posts whether ranks are gone or stuck
               messages      what ranks send each other, as JSON
               mailbox       sends messages to rank 0 without waiting; prints a text of all ranks once
               progress      shows the progress of long work
    again      resume        names a job across restarts, finds its last checkpoint, tells its script how it ended
"""
