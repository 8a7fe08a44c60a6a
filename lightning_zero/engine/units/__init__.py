"""The sharded state of a module: units, their flat buffers, and the tiers that keep the buffers between uses.

::

    module --describe, build--> unit --has--> bucket --is kept in--> master_storage, param_store --use--> a tier

    describe        which unit owns which parameter, and which parameters share a bucket; checks that all ranks agree
    build           makes units and fills their buckets, also of meta modules; replicates buffers of modules
    capacity        chooses the tiers of each unit, and checks that they have enough free bytes
    unit            buckets that are gathered at once, and the states of a unit
    bucket          parameters of a unit with equal dtypes and requires_grad, split by size: one flat buffer
    param           the record of one parameter, and classes that call the engine when users' code uses a parameter
    packed          4-bit parameters: bytes that are never cast, and the tensors that decode these bytes
    master_storage  holds a bucket's masters and optimizer state: on the device, on the host or in files
    param_store     memory of compute parameters: flat buffers, slices kept for the node, shards between uses
    grad_store      holds a bucket's reduced gradient: on the device or on the host
    after_step      runs offloaded steps in a thread, and issues the gathers that follow a step
"""
