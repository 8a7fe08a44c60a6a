"""Pure decisions: integers in, frozen data out. No process group, no device, no memory.

::

    units       which modules are units
    layout      where parameters and shards lie in a bucket
    boxes       what a range of a flattened tensor is in the tensor's own coordinates
    placement   a stage is a row of placements, an offload choice a row of tiers
    state_dtype how wide optimizer state rests
    topology    which ranks share shards
    schedule    the order of gathers, and what comes ahead
    buckets     what rests where: the plan of one bucket
    owners      which rank steps which tensor whole, and what travels for it
    memory      bytes by role, tier and moment
    tensor_states  state of each tensor, of a rank's own in a plan
    activations bytes along a forward and a backward, and the peaks of all bytes together
    speed       the least time of a step
    step_time   bytes that are sent, the expected time of a step, and what binds it
    peaks       what GPUs can do at most        clocks    how the clocks of ranks differ
    fit         whether a plan fits a machine, and what would make it fit
    whole       the copy of the module that a host holds between runs
    choose      the row of auto: the fastest that fits, and the largest micro-batch
"""
