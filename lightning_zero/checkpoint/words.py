"""What messages about a checkpoint call the argument that named it: the Trainer's words, or Fabric's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class Words(NamedTuple):
    """
    Attributes:
        key: what a user gave the checkpoint to.
        another: what to give in its place.
        restarts: said after that, of a file that was damaged.
        unsafe: how to allow classes that torch does not know.
        other_names: how to load a state dict where names alone differ.
    """

    key: str
    another: str
    restarts: str
    unsafe: str
    other_names: str


OF_TRAINER = Words(
    key="ckpt_path",
    another="another ckpt_path",
    restarts=" (a job that starts again takes the one before it when this file is gone)",
    unsafe="Trainer.fit (validate, test, predict), weights_only=false to lightning_zero.train",
    other_names="; where names alone differ, the LightningModule may set strict_loading=False",
)
OF_FABRIC = Words(
    key="fabric.load",
    another="another path",
    restarts="",
    unsafe="fabric.load",
    other_names=", or strict=False",
)
_words: ContextVar[Words] = ContextVar("words", default=OF_TRAINER)


def words() -> Words:
    """Those of the front that reads a checkpoint now. Readers are the same for both, down to the files of a folder."""
    return _words.get()


@contextlib.contextmanager
def in_words(of: Words) -> Iterator[None]:
    """Inside, messages are in the words ``of`` a front."""
    before = _words.set(of)
    try:
        yield
    finally:
        _words.reset(before)
