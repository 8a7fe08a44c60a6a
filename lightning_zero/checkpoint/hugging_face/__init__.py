"""Exports folders that Hugging Face's ``from_pretrained`` loads.

::

    files    finds the tensors to export, their names in the files, and the model of a checkpoint; assigns each tensor
             a position in a safetensors file, and writes ranges of tensors
    export   writes a sharded model on all ranks, config.json and the tokenizer's files
"""
