"""The data of the main job.

::

    text       files of text, the default      sources    which files
    dataset    a dataset of Hugging Face       tokenizer  tokens of a tokenizer of Hugging Face
    synthetic  made-up tokens                  resumable  a loader that goes on in the middle of an epoch
"""
