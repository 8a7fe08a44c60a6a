"""The data modules of the main job.

::

    text       bytes of text files, the default     sources    finds the files
    dataset    tokenized text, by package datasets  synthetic  made-up tokens
    resumable  a loader that continues in the middle of an epoch
"""
