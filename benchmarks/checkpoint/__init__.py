"""``make bench-checkpoint``: saves and loads beside FSDP2 with torch.distributed.checkpoint (DCP), in one run.

::

    __main__      the command: sides in turns, each in fresh processes; lines of JSON, tables, a check of the values
    ranks         processes of one turn, and how their memory is measured from outside
    measure       what one turn does: steps, plain writes, saves, loads
    sides         what all sides have in common; FSDP2 with DCP, DDP with torch.save
    ours          the strategy: one file, a folder
    hugging_face  folders of Hugging Face, in and out
    tables        figures of all turns, beside each other
"""
