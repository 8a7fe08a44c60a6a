"""What is sharded: units, their flat buffers, and where these rest.

::

    module --build--> unit --holds--> bucket --rests in--> home --asks--> a tier

    build           units and buckets from a module; materialise: from meta; agreement: the same model on all ranks
    capacity        which tiers a unit rests on, and whether it fits
    unit            a group of parameters that is gathered at once, and its states
    bucket          the parameters of one unit with equal dtypes and equal requires_grad, split by size: one flat buffer
    home            where a bucket's values rest
    flat_buffer     memory that comes and goes under views of it
    module_buffers  buffers of modules (running statistics), which stay replicated
"""
