"""The data of the main job.

::

    text       bytes of files, the default      sources    which files
    dataset    tokens, by the package datasets  synthetic  made-up tokens
    resumable  a loader that goes on in the middle of an epoch
"""
