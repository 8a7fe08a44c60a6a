"""``make gpu-check``: what one GPU tells, in less than nine minutes, without a network and without Hydra.

::

    __main__   the command: parts in the order of their worth, within a budget of time
    plan       sizes of models, rows, and what each part takes
    gpu_tests  the tests marked ``gpu``, and the main job, limited in time
    worker     a process for each row, and what is asked of it
    side       what that process does: trains, and measures itself
    model      a GPT of torch alone
    trace      what a timeline says: waits of the host, copies and messages that nothing hides
    exact      whether stages and rows end with the same bits, also while streams are late; torch's sanitizer
    fit        the Trainer with ZeRO beside the Trainer alone
    fits       which rows a device holds, and with how large a batch
    bounds     the least time that a step can take, by resource
    output     lines of JSON, a table and timelines, written as it goes

Only ``side``, ``model``, ``exact`` and ``fit`` import torch, so that the command itself starts at once and holds no
memory of a device.
"""
