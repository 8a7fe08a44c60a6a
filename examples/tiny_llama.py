"""A folder as ``save_pretrained`` writes it, with a Llama of a million parameters: what the other examples take in the
place of a model that was downloaded.

python examples/tiny_llama.py FOLDER
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "\n".join(topics[name] for name in sorted(topics))  # of Python's help: English, and on every machine


def make_folder(folder: Path) -> None:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT], trainer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=128, **sizes))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    model.save_pretrained(folder)


def pieces(tokens: list[int], length: int) -> Tensor:
    """``[n, length]``: a text cut into pieces of the same length."""
    n = len(tokens) // length
    return torch.tensor(tokens[: n * length]).view(n, length)


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))
