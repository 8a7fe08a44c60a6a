"""The sides of ``benchmarks.bench``: ways to train one model, each as its documentation advises.

side         what all have in common
peers        the bare module, DDP, torch's ZeroRedundancyOptimizer, FSDP2
deep_speed   DeepSpeed, where it is installed
ours         stages and rows of offload
"""

from __future__ import annotations

from torch import nn

from benchmarks.sides import deep_speed, ours, peers
from benchmarks.sides.side import COMPILED, Side
from lightning_zero.engine.passes.compiled import find_compiler
from lightning_zero.settings import ConfigError


def build(name: str, model: nn.Module, precision: str) -> Side:
    """The side of that name, for this rank; process groups are there already."""
    if name in peers.BUILD:
        return peers.BUILD[name](model, precision)
    if name in deep_speed.STAGES:
        return deep_speed.build(name, model, precision)
    return ours.build(name, model, precision)


def is_peer(name: str) -> bool:
    return name in peers.BUILD or name in deep_speed.STAGES


def why_not(name: str) -> str | None:
    """The reason why a side cannot run on this machine; None where it can."""
    if name in deep_speed.STAGES:
        return deep_speed.why_not(name)
    if name.endswith(COMPILED):
        try:
            find_compiler(name, "leave it out")
        except ConfigError as error:
            return str(error)
    return None
