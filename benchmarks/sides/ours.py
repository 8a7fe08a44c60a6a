"""Stages of the engine: with a row of offload, units that stay gathered, or compiled (``zero3+optimizer_cpu``,
``zero3+keep``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.sides.side import COMPILED, Side, make_adamw, train_step


def build(name: str, model: nn.Module, precision: str) -> Side:
    import lightning_zero

    stage, _, option = name.removesuffix(COMPILED).partition("+")
    settings: dict[str, Any] = {}
    if option == "keep":
        settings = {"keep_gathered_bytes": 1 << 40}
    elif option:
        settings = {"offload": option}  # a row of zero/offload
    if name.endswith(COMPILED):
        settings["compile"] = "blocks"
    engine = lightning_zero.shard(model, stage=stage, precision=precision, device="cpu", **settings)
    optimizer = make_adamw(model)
    engine.add_optimizer(optimizer)

    def step(tokens: Tensor) -> float:
        _ = engine  # lives as long as the step
        return train_step(model, optimizer, tokens, precision == "bf16")

    return Side(name, step)
