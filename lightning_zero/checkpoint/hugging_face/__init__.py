"""Exports folders that Hugging Face's ``from_pretrained`` loads.

::

    files    which tensor goes where in which safetensors file, and writing them in ranges
    names    names and forms of tensors in the files; which model a checkpoint holds
    export   all ranks together write a sharded model, and config.json and tokenizers
"""
