"""What a run needs of memory.

::

    activations  what a micro-batch needs, found on tensors without memory
    fake_module  the copy of a module that has such
    auto_row     stage=auto: the row that a run takes, and why
    held_bytes   bytes that an engine holds now, by role and tier
    planned_states  the state that optimizers will have
"""
