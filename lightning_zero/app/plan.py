"""Plan the memory of a run: ``python -m lightning_zero.plan [group=file] [key=value] [machine.gpus=8 ...]``.

Builds the model on meta and runs a batch without allocating tensors. Shows for each stage and offload setting
the bytes, whether they fit, what would make them fit, and the time of a step. ``picture=plan`` draws the bytes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_zero.app import train
from lightning_zero.app.jobs import GPU_ACCELERATORS, fit_trainer
from lightning_zero.app.overrides import check_keys
from lightning_zero.app.parts import check_packages
from lightning_zero.app.plan_output import TIER_NAMES, check_picture, is_chosen
from lightning_zero.app.schema import MachineConfig, TrainConfig
from lightning_zero.planning.activations import Activations
from lightning_zero.planning.choose import Choice
from lightning_zero.planning.fit import Advice, Row
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ZeroConfig
from lightning_zero.settings.names import positive

if TYPE_CHECKING:
    from lightning_zero.app.memory_plan import MemoryPlan

EXTRA_KEYS = ("machine", "json", "optimizer_states", "activations", "picture")

# -- the JSON document ------------------------------------------------------------------------------------------------


def numbers(held: Bytes) -> dict[str, dict[str, int]]:
    """Return the bytes in ``held`` as ``{tier: {role: bytes}}``, without zeros, for the JSON document."""
    found: dict[str, dict[str, int]] = {tier.value: {} for tier in Tier}
    for (role, tier), nbytes in sorted(held.items(), key=lambda item: item[0][0].value):
        if nbytes:
            found[tier.value][role.value] = nbytes
    return found


def row_document(row: Row, advice: Advice, chosen: ZeroConfig) -> dict[str, Any]:
    return {
        "stage": row.stage.value,
        "offload": row.offload.value,
        "chosen": is_chosen(row, chosen),
        "fits": row.fits,
        "at_rest": numbers(row.rest),
        "peaks": {phase.value: numbers(held) for phase, held in row.peaks.items()},
        "after_run": numbers(row.after_run) if row.is_whole else None,
        "per_gpu": row.per_rank[Tier.device],
        "per_host": row.per_host[Tier.host],
        "per_disk": row.per_host[Tier.nvme],
        "missing": {TIER_NAMES[s.tier].lower(): s.nbytes for s in row.shortages},
        "refused": row.refused or None,
        "gpus_that_fit": None if row.fits else advice.gpus,
        "offload_that_fits": None if row.fits or advice.offload is None else advice.offload.value,
        "sent_per_step": None if row.sent is None else asdict(row.sent),
        "seconds_per_step": None if row.time is None else row.time.seconds,
        "bound_by": None if row.time is None else row.time.binding,
        "seconds_by_resource": None if row.time is None else row.time.resources,
    }


def activations_document(found: Activations | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "saved": found.saved,
        "forward": found.peak(backward=False),
        "backward": found.peak(backward=True),
        "batch": found.batch,
        "flops": found.flops,
        "exchanged": found.exchanged,
    }


def document(plan: MemoryPlan) -> dict[str, Any]:
    """Return the whole plan as the JSON document that ``json=true`` prints. Sizes are in bytes."""
    described, machine, first = plan.described, plan.machine, plan.best
    model = described.model
    sizes = model.activations
    ways = [activations_document(sizes.measured[0] if sizes else None), activations_document(described.other)]
    without, with_blocks = reversed(ways) if model.recomputes else ways
    return {
        "model": {
            "parameters": sum(shape.numel for shape in model.shapes),
            "trainable": sum(shape.numel for shape in model.shapes if shape.trainable),
            "units": len(model.names),
            "optimizer_states": model.states if isinstance(model.states, int) else None,
            "optimizer_state_bytes": None if isinstance(model.states, int) else model.states.nbytes,
            "precision": described.precision,
            "whole_copy": model.copy_nbytes,
            "gather_after_fit": model.gather_after_fit,
        },
        "activations": {
            "samples": model.samples,
            "counted": ways[0],
            "without_checkpointing": without,
            "with_checkpointing": with_blocks,
            "not_known": described.why_not or None,
        },
        "machine": {
            "gpus": machine.gpus,
            "nodes": machine.nodes,
            "gpu_memory": machine.gpu_memory,
            "host_memory": machine.host_memory,
            "nvme": machine.nvme,
            "gpus_share_host_memory": machine.shared,
            "rates": asdict(plan.rates),
        },
        "rows": [row_document(*row, plan.config) for row in zip(plan.planned, plan.advices, strict=True)],
        "first_that_fits": None if first is None else {"stage": first.stage, "offload": first.offload},
        "auto": choice_document(plan.choice),
    }


def choice_document(choice: Choice | str) -> dict[str, Any]:
    if isinstance(choice, str):
        return {"stage": None, "offload": None, "reason": choice, "largest_micro_batch": None}
    row = choice.row
    return {
        "stage": row.stage.value,
        "offload": row.offload.value,
        "reason": choice.reason,
        "largest_micro_batch": choice.samples,
    }


# -- the command ------------------------------------------------------------------------------------------------------


def _show(what: str) -> None:
    """If stderr is a terminal, print ``what``, the name of the command's next action, which takes seconds."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


def run(config: TrainConfig, asked: MachineConfig, extras: dict[str, Any]) -> None:
    check_packages(config, "model")
    _show("importing torch and Lightning")
    from lightning_zero.app.memory_plan import find_machine, make_plan
    from lightning_zero.app.plan_model import describe

    if extras["picture"] is not None:
        check_picture(extras["picture"])
    if extras["optimizer_states"] is not None:
        positive("optimizer_states", extras["optimizer_states"], zero_ok=True)
    fit_trainer(config)
    measured = ", and measuring a batch with and without checkpointing" if extras["activations"] else ""
    _show(f"building the model without memory{measured}")
    described = describe(
        config, train.explicit_keys(), states=extras["optimizer_states"], activations=extras["activations"]
    )
    devices = train.local_devices(config.trainer) if asked.gpus is None else None
    machine = find_machine(
        asked,
        config.zero,
        gpus=devices if isinstance(devices, int) and devices > 0 else None,
        nodes=config.trainer.get("num_nodes"),
        on_gpus=config.trainer.get("accelerator", "auto") in GPU_ACCELERATORS,
    )
    _show("planning stages and offload")
    plan = make_plan(described, machine, config.zero, asked.rates)
    if extras["json"]:
        print(json.dumps(document(plan), indent=2))
    else:
        plan.show()
    if extras["picture"] is not None:
        files = plan.picture(extras["picture"])
        print(f"Wrote {', '.join(map(os.path.abspath, files))}", file=sys.stderr if extras["json"] else sys.stdout)


@hydra.main(version_base="1.3", config_path="pkg://lightning_zero.conf.app", config_name="plan")
def _task(cfg: DictConfig) -> None:
    with train.refusals():
        OmegaConf.set_struct(cfg, False)
        check_keys(cfg.machine, "machine.")
        asked = OmegaConf.to_object(cfg.machine)
        assert isinstance(asked, MachineConfig)
        extras = {key: cfg[key] for key in EXTRA_KEYS if key != "machine"}
        for key in EXTRA_KEYS:
            del cfg[key]
        run(train.train_config(cfg), asked, extras)


def main() -> None:
    train.start(_task, "plan")
