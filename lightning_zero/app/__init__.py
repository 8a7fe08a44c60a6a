"""The commands ``train``, ``plan``, ``submit``, ``replay`` and ``env``: ``python -m lightning_zero.<command>``.

::

    train        checks settings, starts a run       tasks      fit, validate, test, predict
    parts        optimizer, model, data from groups  schema     types of the Hydra groups
    overrides    mistakes on the command line, and what the user has set
    plan         the memory plan of a run            memory_plan  the plan of the user's own module
    plan_model, plan_output  a plan's model and output
    submit       starts a run as a SLURM job         jobs       a run inside a cluster's job
    slurm        scripts and settings for SLURM      sweep      sweeps and their table
    replay       runs steps of a run again           unread     refuses settings that other apps do not read
    convert      checkpoints in another form         env, check  reports and tests the machine
"""
