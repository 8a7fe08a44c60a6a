"""Device primitives, which move bytes and decide nothing. Each is testable alone.

::

    between ranks    collectives  process groups, transports, agreements
                     waits        waiting with a bound, and saying for whom
                     watchdog     a thread that tells where ranks are, and ends one that waits for one that is gone
                     peers        which rank is gone, and who found out
    between streams  streams, buffers (memory that comes and goes under views)
    between tiers    tiers        the interface of host (slabs) and nvme (files)
                     copies, pages (aligned, pinned), regions (places in a file), aio (O_DIRECT), claims (whose file)
    what there is    limits       of this process
                     machine      shared with other ranks
"""
