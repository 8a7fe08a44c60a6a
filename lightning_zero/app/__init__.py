"""The main job and its tools. ``lightning_zero.train``, ``.plan``, ``.submit`` and ``.env`` are the doors.

::

    train        a run; parts: what it is made of  schema       types of the Hydra groups
    plan         what a run needs of a machine   instantiate  objects from groups, with errors that name the key
    plan_model   the model that it is for        plan_tables, plan_picture  what it shows
    submit       a run as a job                  jobs         a run as a job of a cluster
    slurm        scripts and sweeps for SLURM     convert      checkpoints in another form
    env          what a bug report needs         check        every stage and tier on this machine
    overrides    mistakes on the command line
    tasks        fit, validate, test, predict     sweep        runs of a sweep on this machine, and their table
"""
