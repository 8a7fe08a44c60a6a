"""What is sharded: units, their flat buffers, and where these rest.

::

    module --describe, build--> unit --holds--> bucket --rests in--> home, param_store --ask--> a tier

    describe        which unit owns which parameter, and which share a bucket, before anything is sharded
    agreement       that this is the same on all ranks
    build           units and filled buckets from it; materialise: from meta
    capacity        which tiers a unit rests on, and whether it fits
    change_tiers    likewise, for a module that is sharded and is to rest elsewhere
    unit            a group of parameters that is gathered at once, and its states
    bucket          the parameters of one unit with equal dtypes and equal requires_grad, split by size: one flat buffer
    node_shard      what a rank keeps of gathered values for its node, from the forward to the backward
    param_info      what is known of one parameter
    classes         the classes that a sharded parameter goes through: they say what touching it means
    home            where a bucket's masters and optimizer state rest; kept: what they were, for a later reader
    param_store     where its compute parameters are between uses
    grad_store      where its reduced gradient is; landing: how it comes to the host
    awaited_step    an offloaded step of the bucket that was asked for
    flat_buffer     memory that comes and goes under views of it
    module_buffers  buffers of modules (running statistics), which stay replicated
"""
