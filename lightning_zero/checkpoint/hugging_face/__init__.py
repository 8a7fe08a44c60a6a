"""Folders of Hugging Face, out: safetensors files that ``from_pretrained`` loads.

::

    files    which tensor goes where in which file, and their writing in ranges
    names    what tensors are called there, and in which form
    extras   config.json, tokenizers, and the index
    record   which model a checkpoint holds
    export   of a model that is sharded, by all ranks
"""
