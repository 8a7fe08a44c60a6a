"""The commands ``python -m lightning_zero.train`` (it trains), ``.plan``, ``.submit``, ``.replay``, ``.env``.

::

    train        checks settings, starts a run       tasks      fit, validate, test, predict
    parts        builds optimizer, model and data    schema     types of the Hydra groups
    instantiate  objects from groups                 overrides  explains mistakes on the command line, tells
                                                                what the user has set
    plan         the memory plan of a run            plan_model, plan_tables, plan_picture  its model and output
    memory_plan  the plan of a module of one's own
    submit       starts a run as a SLURM job         jobs       a run inside a cluster's job
    slurm        scripts and settings for SLURM      sweep      sweeps and their table
    replay       runs steps of a run again           unread     refuses settings that other apps do not read
    convert      checkpoints in another form         env, check  reports and tests the machine
"""
