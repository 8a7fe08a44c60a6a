"""What the engine may refuse: how it says so, and why it has to.

A program that ends in anything else has found a mistake: in the engine, in the fuzzer, or in this list.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Refusal(NamedTuple):
    """
    Attributes:
        pattern: of "kind of exception: message".
        why: what would be wrong otherwise.
    """

    pattern: str
    why: str


REFUSALS = (
    Refusal(
        r"RuntimeError: \S+ is sharded, and between steps its values are on no rank",
        "a read outside of a pass would need all ranks, and not all come to it",
    ),
    Refusal(
        r"RuntimeError: .* is computed again from its inputs in backward \(zero.activation_checkpointing\), and its "
        r"inputs (are|were) changed in place",
        "it would be computed again from other inputs",
    ),
    Refusal(
        r"ConfigError: zero.activation_checkpointing=\w+: the model has no blocks that were found to be units",
        "there is nothing to compute again, and nobody would notice",
    ),
    Refusal(
        r"RuntimeError: gradients of backwards inside no_sync\(\) have not been reduced over the ranks",
        "a step would use this rank's gradients alone",
    ),
)

_PATTERNS = [(re.compile(refusal.pattern, re.DOTALL), refusal) for refusal in REFUSALS]


def refusal_of(text: str) -> Refusal | None:
    """The one on the list that ``text`` is."""
    return next((refusal for pattern, refusal in _PATTERNS if pattern.match(text)), None)
