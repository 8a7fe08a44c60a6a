"""What is sharded: units, their flat buffers, and where these rest.

::

    module --describe, build--> unit --holds--> bucket --rests in--> home, param_store --ask--> a tier

    describe     which unit owns which parameter, and which share a bucket; that this is the same on all ranks
    build        units and filled buckets from it, from meta too; buffers of modules, which stay replicated
    capacity     which tiers a unit rests on, and whether it fits
    unit         a group of parameters that is gathered at once, and its states
    bucket       the parameters of one unit with equal dtypes and equal requires_grad, split by size: one flat buffer
    flat_buffer  memory that comes and goes under views of it; what a rank keeps of it for its node
    param        what is known of one parameter, and the classes that say what touching it means
    home         where a bucket's masters and optimizer state rest; kept: a part of what it holds
    param_store  where its compute parameters are between uses
    grad_store   where its reduced gradient is, and how it comes to the host
    after_step   offloaded steps and their thread, and the gathers that follow a step: the next forward waits for them
"""
