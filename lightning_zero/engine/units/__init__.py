"""What is sharded: units, their flat buffers, and where these rest.

::

    module --describe, build--> unit --holds--> bucket --rests in--> master_storage, param_store --ask--> a tier

    describe        which unit owns which parameter, and which share a bucket; checked to be the same on all ranks
    build           units with filled buckets, from meta too; buffers of modules, which stay replicated
    capacity        which tiers a unit rests on, and whether it fits
    unit            buckets that are gathered at once, and the states of a unit
    bucket          parameters of a unit with equal dtypes and requires_grad, split by size: one flat buffer
    param           what is known of one parameter, and the classes that say what touching it means
    master_storage  where a bucket's masters and optimizer state rest
    param_store     memory of compute parameters: flat buffers, what a rank keeps for its node, stores between uses
    grad_store      where the reduced gradient is, and how it gets to the host
    after_step      offloaded steps and their thread, and the gathers that follow a step
"""
