"""Measure and plan the memory that a run needs.

::

    activations     memory that a micro-batch needs, measured on fake tensors
    fake_module     the module's copy with fake tensors
    auto_row        stage=auto: chooses stage and offload
    host_room       refuses what hosts without GPUs have no room for
    held_bytes      bytes that an engine holds now, by role and tier
    planned_states  the state that optimizers will have
"""
