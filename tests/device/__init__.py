"""The order of streams, without a GPU: the engine on a device that is on paper only, where every access is judged.

::

    order.py        who comes after whom: streams, threads of the host, the disk
    machine.py      memory of the device and pinned memory: accesses, blocks that are used again, copies, host waits
    virtual.py      the machine in the place of a GPU: accelerator, kernels, collectives, threads
    simulate.py     training on it, and what was found
    test_machine.py the judge itself, by small programs with a race and without
    test_races.py   every stage, tier row and precision: no race
    test_waits.py   each wait of the engine is needed: without it there is a race
    test_budgets.py host waits, copies, kernels and memory of a step
    timed.py        how long a step would take on it: a timeline of what was recorded (timeline.py)
"""
