"""Functions that plan a run from integers and return frozen data. They use no process group, device or tensor values.

::

    units         which modules are units
    layout        where parameters and shards lie in a bucket
    boxes         ranges of a flattened tensor in the tensor's own coordinates
    placement     each stage's placement of roles, each offload setting's tier of roles
    buckets       the plan of one bucket: where each role's memory is between steps
    state_dtype   pieces in which optimizer state in bf16 is stepped
    topology      which ranks share what: groups of ranks, and this rank's index in each
    schedule      the order of gathers, and prefetching
    owners        which rank steps which tensor whole, and the messages for that
    tensor_states optimizer state of tensors that are stepped whole
    memory        bytes by role, tier and phase, without activations
    activations   peak bytes with activations
    speed         the least and the expected time of a step, and bytes sent
    peaks         peak FLOP/s of GPUs
    fit           whether a plan fits a machine
    choose        the stage and offload setting that auto takes, and the largest micro-batch
"""
