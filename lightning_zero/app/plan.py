"""The memory plan: ``python -m lightning_zero.plan [group=file] [key=value] [machine.gpus=8 ...]``.

Takes the configuration of a run, builds the model on the meta device, and shows for every stage and row of
``zero/offload`` the bytes of a GPU, a host and a disk, whether they fit, and what would make them fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_zero.app import train
from lightning_zero.app.jobs import fit_trainer
from lightning_zero.app.overrides import check_keys
from lightning_zero.app.schema import MachineConfig, TrainConfig
from lightning_zero.config import ConfigError, Offload, OffloadConfig, Precision, ZeroConfig
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.fit import Advice, Machine, Model, Row, advise, allowed_rows, best, plan_row
from lightning_zero.planning.memory import ADAM_STATES, Bytes, Limits
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.summary import human_bytes

WIDTH = 120  # columns, where the output is no terminal
WIDE = 118  # columns that one table of all takes at most
EXTRA_KEYS = ("machine", "json", "optimizer_states")

TIER_NAMES = {Tier.device: "GPU", Tier.host: "host", Tier.nvme: "disk"}
TIER_MARKS = {Tier.device: "", Tier.host: " h", Tier.nvme: " d"}
ROLE_COLUMNS = {
    "params": (Role.compute_param,),
    "grads": (Role.grad,),
    "optimizer": (Role.master_param, Role.optim_state),
}
PEAK_COLUMNS = ("peak/GPU", "peak/host", "disk", "fits")


# -- what is planned --------------------------------------------------------------------------------------------------


def precision_row(config: TrainConfig) -> Precision:
    """The row of ``zero/precision`` that a run would use."""
    asked = train.agreed_precision(config)
    asked = train.PRECISION_ALIASES.get(asked or "", asked)
    return next((row for row in Precision if row.value == asked), Precision.fp32)


def describe(config: TrainConfig, states: int | None) -> Model:
    """The model of a configuration, built without memory.

    Raises:
        ConfigError: it cannot be built on the meta device.
    """
    import torch

    from lightning_zero.engine.units.describe import TRUE_DTYPES, bucket_shapes, describe_units

    precision = precision_row(config)
    dtype = torch.get_default_dtype()
    # What a model prints belongs to no JSON document.
    with contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
        try:
            torch.set_default_dtype(TRUE_DTYPES.get(precision, dtype))
            module = train.build_model(config, train.explicit_keys())
            module.configure_model()
        except NotImplementedError as error:
            raise ConfigError(
                f"model: {config.model.get('_target_')} cannot be built on the meta device: {error}"
            ) from error
        finally:
            torch.set_default_dtype(dtype)
    units = describe_units(module, config.zero, precision)
    if states is None:
        states = optimizer_states(config)
    limits = Limits(
        config.zero.prefetch_bytes,
        config.zero.keep_gathered_bytes,
        config.zero.reduce_bucket_bytes,
        config.trainer.accumulate_grad_batches,
    )
    return Model(tuple(unit.name for unit in units), tuple(bucket_shapes(units)), limits, states)


def optimizer_states(config: TrainConfig) -> int:
    """Tensors of state that the optimizer of the configuration keeps for each parameter: found by one step of it."""
    import torch

    from lightning_zero.engine.steps.torch_optimizers import states_after_step

    if not config.optimizer:
        return ADAM_STATES
    param = torch.nn.Parameter(torch.zeros(2))
    return states_after_step(train.build_optimizer(config)([param]), param)


def find_machine(asked: MachineConfig, config: TrainConfig) -> Machine:
    """The machine that was described, with what is at hand where it was not."""
    from lightning_zero.comm.share import Share, own_path
    from lightning_zero.device.cuda import gpu_count, gpu_nbytes
    from lightning_zero.tiers.limits import available_host_memory

    there = gpu_count() if config.trainer.accelerator in ("auto", "gpu", "cuda") else 0
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
    with contextlib.suppress(ConfigError):  # variables that only the nodes have
        path = own_path(path, Share(), 0) if path else None
    nvme = asked.nvme
    if nvme is None:
        nvme = shutil.disk_usage(path).free if path and os.path.isdir(path) else 0
    nodes = asked.nodes or config.trainer.num_nodes or 1
    return Machine(gpus, gpu, host, nvme, nodes, shared, config.zero.comm.hierarchy)


# -- what is shown ----------------------------------------------------------------------------------------------------


def numbers(held: Bytes) -> dict[str, dict[str, int]]:
    """Bytes by tier and role, for tools."""
    found: dict[str, dict[str, int]] = {tier.value: {} for tier in Tier}
    for (role, tier), nbytes in sorted(held.items(), key=lambda item: item[0][0].value):
        if nbytes:
            found[tier.value][role.value] = nbytes
    return found


def row_document(row: Row, advice: Advice, chosen: ZeroConfig) -> dict[str, Any]:
    return {
        "stage": row.stage.value,
        "offload": row.offload.value,
        "chosen": _is_chosen(row, chosen),
        "fits": row.fits,
        "at_rest": numbers(row.rest),
        "peaks": {phase.value: numbers(held) for phase, held in row.peaks.items()},
        "per_gpu": row.per_rank[Tier.device],
        "per_host": row.per_host[Tier.host],
        "per_disk": row.per_host[Tier.nvme],
        "missing": {TIER_NAMES[s.tier].lower(): s.nbytes for s in row.shortages},
        "refused": row.refused or None,
        "gpus_that_fit": None if row.fits else advice.gpus,
        "offload_that_fits": None if row.fits or advice.offload is None else advice.offload.value,
    }


def document(
    model: Model, machine: Machine, rows: list[Row], advices: list[Advice], config: TrainConfig
) -> dict[str, Any]:
    """The whole plan, for tools. Sizes are bytes."""
    first = best(rows)
    return {
        "model": {
            "parameters": sum(shape.numel for shape in model.shapes),
            "trainable": sum(shape.numel for shape in model.shapes if shape.trainable),
            "units": len(model.names),
            "optimizer_states": model.states,
            "precision": precision_row(config).name,
        },
        "machine": {
            "gpus": machine.gpus,
            "nodes": machine.nodes,
            "gpu_memory": machine.gpu_memory,
            "host_memory": machine.host_memory,
            "nvme": machine.nvme,
            "gpus_share_host_memory": machine.shared,
        },
        "rows": [row_document(row, advice, config.zero) for row, advice in zip(rows, advices, strict=True)],
        "first_that_fits": None if first is None else {"stage": first.stage.value, "offload": first.offload.value},
    }


def _is_chosen(row: Row, chosen: ZeroConfig) -> bool:
    return (row.stage, row.offload) == (chosen.stage.name, chosen.offload.name)


def short_bytes(nbytes: float) -> str:
    """``1536`` -> ``1.5K``: powers of 1024."""
    number, _, unit = human_bytes(nbytes).partition(" ")
    return number + unit.removesuffix("iB").removesuffix("B")


def _cell(row: Row, roles: tuple[Role, ...]) -> str:
    parts = []
    for tier in Tier:
        nbytes = sum(row.rest[role, tier] for role in roles)
        if nbytes:
            parts.append((nbytes, short_bytes(nbytes) + TIER_MARKS[tier]))
    most = max((nbytes for nbytes, _ in parts), default=0)
    return " ".join(text for nbytes, text in parts if nbytes * 100 > most) or "-"  # without crumbs


def machine_line(machine: Machine) -> str:
    nvme = f", {short_bytes(machine.nvme)} of disk" if machine.nvme else ", no disk"
    host = f"{short_bytes(machine.host_memory)} of host memory{nvme}"
    if machine.shared:
        what = f"{machine.gpus} process(es) without GPU in {host}"
    else:
        what = f"{machine.gpus} GPU(s) of {short_bytes(machine.gpu_memory)} each, {host}"
    return what if machine.nodes == 1 else f"{machine.nodes} hosts, each with {what}"


def title_of(model: Model, machine: Machine, config: TrainConfig) -> str:
    count = sum(shape.numel for shape in model.shapes)
    return f"{count:,} parameters, {precision_row(config).name}; {machine_line(machine)}"


def _roles(row: Row) -> list[str]:
    return [_cell(row, roles) for roles in ROLE_COLUMNS.values()]


def _peaks(row: Row) -> list[str]:
    peaks = (row.per_rank[Tier.device], row.per_host[Tier.host], row.per_host[Tier.nvme])
    missing = "no: " + ", ".join(TIER_NAMES[s.tier] for s in row.shortages)
    fits = "yes" if row.fits else "no: budgets" if row.refused else missing
    return [*(short_bytes(nbytes) if nbytes else "-" for nbytes in peaks), fits]


def tables_of(rows: list[Row], config: TrainConfig, width: int) -> list[Table]:
    """One table, or two where ``width`` columns do not hold it: what fits, and what rests where."""
    rest, peaks = (_roles, tuple(ROLE_COLUMNS)), (_peaks, PEAK_COLUMNS)
    if width >= WIDE:
        return [_table(rows, config, None, [rest, peaks])]
    return [_table(rows, config, box.SIMPLE_HEAD, [part]) for part in (peaks, rest)]


def _table(
    rows: list[Row],
    config: TrainConfig,
    lines: box.Box | None,
    parts: Sequence[tuple[Callable[[Row], list[str]], tuple[str, ...]]],
) -> Table:
    """
    Args:
        lines: the frame; ``None``: rich's own, which takes two more columns of text for each column.
        parts: groups of columns.
    """
    style: dict[str, Any] = {} if lines is None else {"box": lines, "padding": 0, "show_edge": False}
    table = Table(pad_edge=False, **style)
    for name in ("", "stage", "offload"):
        table.add_column(name, no_wrap=True)
    for _, names in parts:
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous is not None and row.stage is not previous:
            table.add_section()
        previous = row.stage
        chosen = _is_chosen(row, config.zero)
        table.add_row(
            ">" if chosen else "",
            row.stage.value,
            row.offload.value,
            *(cell for cells, _ in parts for cell in cells(row)),
            style="bold" if chosen else None,
        )
    return table


def advice_lines(machine: Machine, rows: list[Row], advices: list[Advice]) -> list[str]:
    """What would make the rows fit that do not, and where to begin."""
    return [
        f"{row.stage.value} + {row.offload.value}: {_lack(row)}; {_remedy(row, advice, machine)}"
        for row, advice in zip(rows, advices, strict=True)
        if not row.fits
    ] + [_first_to_try(rows)]


def _lack(row: Row) -> str:
    if row.refused:
        return "the budgets have no room"
    each = {Tier.device: "each GPU", Tier.host: "the host", Tier.nvme: "its disk"}
    return "lacks " + ", ".join(f"{short_bytes(s.nbytes)} on {each[s.tier]}" for s in row.shortages)


def _remedy(row: Row, advice: Advice, machine: Machine) -> str:
    ways = []
    if any(s.tier is Tier.nvme for s in row.shortages) and not machine.nvme:
        ways.append("machine.nvme or zero.offload.nvme_path")
    elif advice.gpus is not None:
        ways.append(f"{advice.gpus} {'processes' if machine.shared else 'GPUs'}")
    if advice.offload is not None:
        ways.append(f"zero/offload={advice.offload.value}")
    return f"fits with {' or '.join(ways)}" if ways else "fits on no number of such hosts"


def _first_to_try(rows: list[Row]) -> str:
    first = best(rows)
    if first is None:
        return "Nothing fits: use more hosts, or a smaller model."
    return f"Try first: zero/stage={first.stage.value} zero/offload={first.offload.value}"


def legend(model: Model) -> list[str]:
    """What the columns mean."""
    several = model.limits.micro_batches > 1
    stage_1 = "still whole, and in slices once they are reduced" if several else "in slices, and whole until then"
    return [
        f"params, grads, optimizer: of one rank, at rest {'between micro-batches' if several else 'before the step'}; "
        f"h: on the host, d: on disk. At zero1 gradients are {stage_1}.",
        "peak/host, disk: of all ranks of a host. Activations are not counted. K, M, G, T: powers of 1024.",
    ]


def show(model: Model, machine: Machine, rows: list[Row], advices: list[Advice], config: TrainConfig) -> None:
    width = shutil.get_terminal_size((WIDTH, 0)).columns  # COLUMNS counts too
    console = Console(width=width, highlight=False)

    def say(text: str) -> None:
        print(textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))

    say(title_of(model, machine, config))
    for table in tables_of(rows, config, width):
        console.print(table)
    for line in (*legend(model), *advice_lines(machine, rows, advices)):
        say(line)


# -- the command ------------------------------------------------------------------------------------------------------


def run(config: TrainConfig, asked: MachineConfig, states: int | None, as_json: bool) -> None:
    """Plan and show."""
    fit_trainer(config)
    model = describe(config, states)
    machine = find_machine(asked, config)
    rows = [plan_row(model, stage, offload, machine, _budgets(config, offload)) for stage, offload in allowed_rows()]
    advices = [
        Advice(None, None) if row.fits else advise(model, row, machine, _budgets(config, row.offload), rows)
        for row in rows
    ]
    if as_json:
        print(json.dumps(document(model, machine, rows, advices, config), indent=2))
    else:
        show(model, machine, rows, advices, config)


def _budgets(config: TrainConfig, offload: Offload) -> OffloadConfig:
    """Settings for a row: those that were given for ``auto`` count for that alone."""
    return config.zero.offload if offload is config.zero.offload.name else OffloadConfig()


@hydra.main(version_base="1.3", config_path="pkg://lightning_zero.conf", config_name="plan")
def _task(cfg: DictConfig) -> None:
    with train.refusals():
        OmegaConf.set_struct(cfg, False)
        check_keys(cfg.machine, "machine.")
        asked = OmegaConf.to_object(cfg.machine)
        assert isinstance(asked, MachineConfig)
        as_json, states = bool(cfg["json"]), cfg["optimizer_states"]
        for key in EXTRA_KEYS:
            del cfg[key]
        run(train.train_config(cfg), asked, states, as_json)


def main() -> None:
    train.start(_task, "plan")
