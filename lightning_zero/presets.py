"""Presets for ``Trainer(strategy=...)``: each sets a stage, a choice of ``zero/offload`` and a start method."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    stage: str  # a choice of zero/stage
    offload: str  # a choice of zero/offload
    start_method: str = "popen"  # of the strategy


PRESETS: dict[str, Preset] = {
    "zero0": Preset("zero0", "none"),
    "zero1": Preset("zero1", "none"),
    "zero2": Preset("zero2", "none"),
    "zero3": Preset("zero3", "none"),
    "zero1_offload": Preset("zero1", "optimizer_cpu"),
    "zero2_offload": Preset("zero2", "optimizer_cpu"),
    "zero3_offload": Preset("zero3", "cpu"),
    "zero3_offload_optimizer": Preset("zero3", "optimizer_cpu"),
    "zero3_nvme": Preset("zero3", "nvme"),
    "zero_auto": Preset("auto", "auto"),
}

# The same presets for a notebook, where processes are forked.
PRESETS |= {f"{name}_notebook": preset._replace(start_method="fork") for name, preset in PRESETS.items()}

# The package of Lightning whose Trainer or Fabric was the first to ask for a preset, if any has.
ASKED: list[str] = []
