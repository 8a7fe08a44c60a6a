"""Exports folders that Hugging Face's ``from_pretrained`` loads.

::

    files    finds which tensors the files have, under which names, and which model a checkpoint holds; decides where
    each
             tensor is in which safetensors file, and writes ranges of tensors
    export   writes a sharded model on all ranks, config.json and the tokenizer's files
"""
