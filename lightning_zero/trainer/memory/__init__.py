"""Measure and plan the memory that a run needs.

::

    activations     memory that a micro-batch needs, measured on fake tensors
    fake_module     copies of the module with fake tensors, and the state that its optimizers will have
    auto_row        stage=auto: chooses stage and offload; raises if hosts without GPUs lack memory for parameters
    held_bytes      bytes that an engine holds now, by role and tier
"""
