"""Exports folders that Hugging Face's ``from_pretrained`` loads.

::

    files    decides where each tensor lies in which safetensors file, and writes ranges of tensors
    names    finds which tensors the files have, under which names, and which model a checkpoint holds
    export   writes a sharded model on all ranks, config.json and the tokenizer's files
"""
