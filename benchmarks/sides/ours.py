"""Stages of the engine: with a row of offload, units that stay gathered, gradients that travel in fp32, or compiled
(``zero3+optimizer_cpu``, ``zero3+keep``, ``zero3+full_wire``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.sides.side import COMPILED, Side, loss_of, make_adamw, train_step

EARLY = "~early"  # ends the name of a side that steps offloaded buckets inside the backward


def build(name: str, model: nn.Module, precision: str) -> Side:
    import lightning_zero

    stage, _, option = name.removesuffix(EARLY).removesuffix(COMPILED).partition("+")
    settings: dict[str, Any] = {}
    if option == "keep":
        settings = {"keep_gathered_bytes": 1 << 40}
    elif option == "full_wire":
        settings = {"comm": {"grad_wire": "full"}}
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

    def early_step(tokens: Tensor) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, tokens, precision == "bf16")
            engine.backward(loss)
            return loss

        with engine.stepping_in_backward():
            return float(optimizer.step(closure))

    return Side(name, early_step if name.endswith(EARLY) else step)
