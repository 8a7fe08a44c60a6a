"""Exports folders that Hugging Face's ``from_pretrained`` loads.

::

    files    decides where each tensor lies in which safetensors file, and writes ranges of tensors
    names    finds names and forms of tensors in the files, and which model a checkpoint holds
    export   writes a sharded model on all ranks, config.json and the tokenizer's files
"""
