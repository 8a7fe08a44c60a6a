"""Measure and plan the memory that a run needs.

::

    activations     what a micro-batch needs, measured on fake tensors without memory
    fake_module     the module's copy with fake tensors
    auto_row        stage=auto: the chosen row, and why
    held_bytes      bytes that an engine holds now, by role and tier
    planned_states  the state that optimizers will have
"""
