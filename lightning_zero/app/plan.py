"""Plan the memory of a run: ``python -m lightning_zero.plan [group=file] [key=value] [machine.gpus=8 ...]``.

Builds the model on meta and runs a batch without allocating tensors. Shows for each stage and offload setting
the bytes, whether they fit, what would make them fit, and the time of a step. ``picture=plan`` draws the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_zero.app import train
from lightning_zero.app.jobs import GPU_ACCELERATORS, fit_trainer
from lightning_zero.app.overrides import check_keys
from lightning_zero.app.plan_picture import check_picture, draw
from lightning_zero.app.plan_tables import TIER_NAMES, Described, is_chosen, rates_line, show, title_of
from lightning_zero.app.schema import MachineConfig, TrainConfig
from lightning_zero.planning.activations import Activations
from lightning_zero.planning.choose import Choice, choose_row
from lightning_zero.planning.fit import Advice, Machine, Row, advise, best, plan_row
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES, Rates
from lightning_zero.planning.topology import check_groups
from lightning_zero.settings import ConfigError, Offload, OffloadConfig, ZeroConfig, allowed_rows
from lightning_zero.settings.values import positive

EXTRA_KEYS = ("machine", "json", "optimizer_states", "activations", "picture")

# -- the machine ------------------------------------------------------------------------------------------------------


def find_machine(asked: MachineConfig, config: TrainConfig) -> Machine:
    """Return the machine to plan for. Values that ``asked`` does not give come from ``config`` or this machine."""
    from lightning_zero.comm.share import Share, own_path
    from lightning_zero.device.cuda import gpu_count, gpu_nbytes
    from lightning_zero.tiers.limits import available_host_memory

    there = gpu_count() if config.trainer.get("accelerator", "auto") in GPU_ACCELERATORS else 0
    shared = not there and asked.gpu_memory is None
    gpus = asked.gpus
    if gpus is None:
        devices = train.local_devices(config.trainer)
        gpus = devices if isinstance(devices, int) and devices > 0 else max(1, there)
    host = asked.host_memory if asked.host_memory is not None else available_host_memory()
    gpu = asked.gpu_memory
    if gpu is None:
        gpu = 0 if shared else gpu_nbytes()
    path = config.zero.offload.nvme_path
    with contextlib.suppress(ConfigError):  # the path may hold variables that only the nodes have
        path = own_path(path, Share(), 0) if path else None
    nvme = asked.nvme
    if nvme is None:
        nvme = shutil.disk_usage(path).free if path and os.path.isdir(path) else 0
    nodes = asked.nodes or config.trainer.get("num_nodes") or 1
    return Machine(gpus, gpu, host, nvme, nodes, shared, config.zero.hybrid_shard)


# -- the JSON document ------------------------------------------------------------------------------------------------


def numbers(held: Bytes) -> dict[str, dict[str, int]]:
    """Return the numbers of bytes ``held``, without zeros, as ``{tier: {role: bytes}}`` for the JSON document."""
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


def document(
    described: Described,
    machine: Machine,
    rows: list[Row],
    advices: list[Advice],
    config: TrainConfig,
    choice: Choice | str,
    rates: Rates,
) -> dict[str, Any]:
    """Return the whole plan as the JSON document that ``json=true`` prints. Sizes are in bytes."""
    first, model = best(rows), described.model
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
            "rates": asdict(rates),
        },
        "rows": [row_document(row, advice, config.zero) for row, advice in zip(rows, advices, strict=True)],
        "first_that_fits": None if first is None else {"stage": first.stage.value, "offload": first.offload.value},
        "auto": choice_document(choice),
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


def run(config: TrainConfig, asked: MachineConfig, extras: dict[str, Any]) -> None:
    from lightning_zero.app.plan_model import describe

    if extras["picture"] is not None:
        check_picture(extras["picture"])
    if extras["optimizer_states"] is not None:
        positive("optimizer_states", extras["optimizer_states"], zero_ok=True)
    fit_trainer(config)
    described = describe(
        config, train.explicit_keys(), states=extras["optimizer_states"], activations=extras["activations"]
    )
    model, machine = described.model, find_machine(asked, config)
    check_groups(config.zero, machine.world_size)
    given = {key: value for key, value in asked.rates.items() if value is not None}
    rates = replace(CPU_RATES if machine.shared else GPU_RATES, **given)
    candidates = [(stage, offload, _budgets(config, offload)) for stage, offload in allowed_rows(machine.hybrid_shard)]
    rows = [plan_row(model, *row[:2], machine, row[2], rates) for row in candidates]
    advices = [
        Advice(None, None) if row.fits else advise(model, row, machine, _budgets(config, row.offload), rows)
        for row in rows
    ]
    try:
        choice: Choice | str = choose_row(model, machine, candidates, rates)
    except ConfigError as error:
        choice = str(error)
    if extras["json"]:
        print(json.dumps(document(described, machine, rows, advices, config, choice, rates), indent=2))
    else:
        show(
            described,
            machine,
            rows,
            advices,
            config.zero,
            choice,
            rates_line(rates, sorted(given), shared=machine.shared),
        )
    if extras["picture"] is not None:
        title = title_of(model, machine, described.precision)
        files = draw(extras["picture"], title, machine, rows, config.zero, choice)
        print(f"Wrote {', '.join(map(os.path.abspath, files))}", file=sys.stderr if extras["json"] else sys.stdout)


def _budgets(config: TrainConfig, offload: Offload) -> OffloadConfig:
    """Return memory budgets to plan ``offload`` with: the user's if ``offload`` is the user's choice, else defaults."""
    return config.zero.offload if offload is config.zero.offload.name else OffloadConfig()


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
