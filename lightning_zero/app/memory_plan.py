"""Plan the memory of a module: :func:`plan_memory`, and code that the command ``plan`` uses too."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero.app.parts import PRECISION_ALIASES
from lightning_zero.app.plan_model import describe_module, on_meta
from lightning_zero.app.plan_output import (
    WIDTH,
    Described,
    advice_lines,
    auto_line,
    check_picture,
    draw,
    legend,
    rates_line,
    tables_of,
    title_of,
)
from lightning_zero.app.schema import MachineConfig, named_machine
from lightning_zero.engine import engine_of
from lightning_zero.engine.units.describe import UnitGroup
from lightning_zero.lightning_api import is_overridden, pl
from lightning_zero.planning.choose import Choice, choose_row
from lightning_zero.planning.fit import Advice, Machine, Row, advise, best, plan_row
from lightning_zero.planning.memory import ADAM_STATES
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES, Rates
from lightning_zero.planning.tensor_states import TensorStates
from lightning_zero.planning.topology import check_groups
from lightning_zero.settings import (
    ConfigError,
    Offload,
    OffloadConfig,
    Precision,
    ZeroConfig,
    allowed_rows,
    change,
    make_config,
)
from lightning_zero.settings.names import kinds_of, positive
from lightning_zero.trainer.memory.activations import quiet
from lightning_zero.trainer.memory.auto_row import batch_from
from lightning_zero.trainer.memory.fake_module import meta_copy, states_of

# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The memory and time that a run with ``ZeroStrategy(stage, offload=offload)`` needs.

    Attributes:
        fits: whether the machine has this memory.
        per_gpu, per_host, per_disk: peak bytes of one GPU, and of one host's memory and disk for all its ranks.
        seconds_per_step, bound_by: how long a step is expected to take, and the resource that limits its speed;
            None: unknown.
    """

    stage: str
    offload: str
    fits: bool
    per_gpu: int
    per_host: int
    per_disk: int
    seconds_per_step: float | None
    bound_by: str | None

    @classmethod
    def of(cls, row: Row) -> PlannedRow:
        each = row.per_rank[Tier.device], row.per_host[Tier.host], row.per_host[Tier.nvme]
        time = (None, None) if row.time is None else (row.time.seconds, row.time.binding)
        return cls(row.stage.value, row.offload.value, row.fits, *each, *time)


@dataclass(frozen=True, eq=False, repr=False)
class MemoryPlan:
    """A memory plan. ``print(plan)`` shows the table of the command ``plan``."""

    described: Described
    machine: Machine
    config: ZeroConfig
    planned: Sequence[Row]
    advices: Sequence[Advice]
    choice: Choice | str  # what auto takes, or why it takes nothing
    rates: Rates
    given_rates: Sequence[str]

    @property
    def rows(self) -> list[PlannedRow]:
        """Return a :class:`PlannedRow` for each possible pair of stage and offload setting."""
        return [PlannedRow.of(row) for row in self.planned]

    @property
    def best(self) -> PlannedRow | None:
        """Return the row to try first, which fits and offloads and shards as little as possible; None if none fits."""
        row = best(self.planned)
        return None if row is None else PlannedRow.of(row)

    @property
    def auto(self) -> PlannedRow | None:
        """Return the row that ``stage="auto"`` would select: the fastest that leaves some memory free; None if none
        fits."""
        return None if isinstance(self.choice, str) else PlannedRow.of(self.choice.row)

    def show(self, file: Any = None) -> None:
        """Print the plan to ``file``, by default to stdout."""
        width, described, machine = (
            shutil.get_terminal_size((WIDTH, 0)).columns,
            self.described,
            self.machine,
        )  # COLUMNS
        console = Console(width=width, highlight=False, file=file)

        def say(text: str) -> None:
            lines = textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
            print(lines, file=file)

        say(title_of(described.model, machine, described.precision))
        for table in tables_of(self.planned, self.config, width):
            console.print(table)
        rates = rates_line(self.rates, self.given_rates, shared=machine.shared)
        advice = advice_lines(machine, self.planned, self.advices)
        for line in (*legend(described, self.planned), rates, *advice, auto_line(self.choice)):
            say(line)

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(text)
        return text.getvalue().rstrip()

    __repr__ = __str__

    def picture(self, path: str | os.PathLike[str]) -> list[str]:
        """Draw the plan to ``path``, or to ``path.png`` and ``path.svg`` if it has no suffix. Return the files."""
        check_picture(os.fspath(path))
        title = title_of(self.described.model, self.machine, self.described.precision)
        return draw(os.fspath(path), title, self.machine, self.planned, self.config, self.choice)


def make_plan(
    described: Described, machine: Machine, zero: ZeroConfig, given: Mapping[str, float | None]
) -> MemoryPlan:
    """Return the plan of a described model on ``machine``. ``given``: the machine's rates, in bytes or FLOPs per
    second; None: use the default."""
    model, known = described.model, {key: value for key, value in given.items() if value is not None}
    check_groups(zero, machine.world_size)
    rates = replace(CPU_RATES if machine.shared else GPU_RATES, **known)
    candidates = [(stage, offload, _budgets(zero, offload)) for stage, offload in allowed_rows(machine.hybrid_shard)]
    rows = [plan_row(model, *row[:2], machine, row[2], rates) for row in candidates]
    advices = [
        Advice(None, None) if row.fits else advise(model, row, machine, _budgets(zero, row.offload), rows)
        for row in rows
    ]
    try:
        choice: Choice | str = choose_row(model, machine, candidates, rates)
    except ConfigError as error:
        choice = str(error)
    return MemoryPlan(described, machine, zero, rows, advices, choice, rates, sorted(known))


def _budgets(zero: ZeroConfig, offload: Offload) -> OffloadConfig:
    """Return memory budgets for planning ``offload``: the user's if the user chose this offload, else defaults."""
    return zero.offload if offload is zero.offload.name else OffloadConfig()


def find_machine(
    asked: MachineConfig, zero: ZeroConfig, *, gpus: int | None = None, nodes: int | None = None, on_gpus: bool = True
) -> Machine:
    """Return the machine to plan for. Values that ``asked`` does not give come from this machine. ``gpus``, ``nodes``:
    the run's GPUs per node and its nodes, if known. ``on_gpus``: whether the run uses GPUs if there are any."""
    from lightning_zero.comm.share import Share, own_path
    from lightning_zero.device.cuda import gpu_count, gpu_nbytes
    from lightning_zero.tiers.limits import available_host_memory

    there = gpu_count() if on_gpus else 0
    shared = not there and asked.gpu_memory is None
    host = asked.host_memory if asked.host_memory is not None else available_host_memory()
    gpu = asked.gpu_memory
    if gpu is None:
        gpu = 0 if shared else gpu_nbytes()
    path = zero.offload.nvme_path
    with contextlib.suppress(ConfigError):  # the path may hold variables that only the nodes have
        path = own_path(path, Share(), 0) if path else None
    nvme = asked.nvme
    if nvme is None:
        nvme = shutil.disk_usage(path).free if path and os.path.isdir(path) else 0
    gpus = asked.gpus or gpus or max(1, there)
    return Machine(gpus, gpu, host, nvme, asked.nodes or nodes or 1, shared, zero.hybrid_shard)


# -- a module of the user's own ---------------------------------------------------------------------------------------


class _Trained(pl.LightningModule):
    """A LightningModule around ``module``, whose training step calls ``step`` with ``module`` and a batch."""

    def __init__(self, module: nn.Module, step: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(self.module, batch)


def plan_memory(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    machine: str | Mapping[str, Any] | None = None,
    *,
    stage: int | str | None = None,
    offload: Any = None,
    precision: Any = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    accumulate_grad_batches: int = 1,
    optimizer_states: int | None = None,
    **settings: Any,
) -> MemoryPlan:
    """Plan the memory of ``module`` on a machine, for every stage and offload setting, and the time of a step.

    Nothing is computed, and ``module`` does not change::

        plan = lightning_zero.plan_memory(MyModule, batch, {"name": "h100", "nodes": 2, "host_memory": "1TB"})
        print(plan)
        Trainer(strategy=ZeroStrategy(plan.best.stage, offload=plan.best.offload), ...)

    Args:
        module: a module, or a class or function that returns one, which is called on the meta device.
        batch: a batch of one rank as ``training_step`` gets it, or a DataLoader, whose first batch is used. None:
            activations are not counted.
        machine: a name such as ``"h100"``, or a mapping of ``gpus``, ``gpu_memory``, ``host_memory``, ``nvme``,
            ``nodes`` and ``rates``. Missing keys are those of the machine ``name``, if given, or of this machine.
        stage, offload: the stage and offload to mark, as for :class:`ZeroStrategy`.
        precision: a name of ``zero/precision``, or of ``Trainer(precision=)``. Default: fp32.
        training_step: a function of the module and a batch that returns a loss, for a module without this method.
        accumulate_grad_batches: as for the Trainer.
        optimizer_states: number of state tensors for each parameter. Default: that of ``configure_optimizers``.
        settings: as for :class:`ZeroStrategy`.

    Raises ConfigError for settings that cannot work, and any exception from building the module.
    """
    if optimizer_states is not None:
        positive("optimizer_states", optimizer_states, zero_ok=True)
    flag = PRECISION_ALIASES.get(str(precision), str(precision))
    named = next((row.name for row in Precision if row.value == flag), precision)
    rows = {"stage": stage, "offload": offload, "precision": named}
    zero = make_config(None, **{key: row for key, row in rows.items() if row is not None}, **settings)
    row = zero.precision.name or Precision.fp32
    asked = _machine_config(machine)
    built = _built(module, row)
    if training_step is not None:
        built = _Trained(built, training_step)
    first = batch_from(batch) if isinstance(batch, DataLoader) else batch
    described = describe_module(
        built,
        zero,
        row,
        micro_batches=accumulate_grad_batches,
        states=partial(_states, optimizer_states, zero),
        take_batch=None if batch is None else lambda: first,
    )
    return make_plan(described, find_machine(asked, zero), zero, asked.rates)


def _machine_config(machine: str | Mapping[str, Any] | None) -> MachineConfig:
    given: dict[str, Any] = {"name": machine} if isinstance(machine, str) else dict(machine or {})
    name = given.pop("name", None)
    known = named_machine(name) if name is not None else {}
    if unknown := sorted(set(given) - (keys := set(kinds_of(MachineConfig)))):
        raise ConfigError(
            f"machine: expected name, {', '.join(sorted(keys))}, got {unknown[0]!r}. "
            f"{change('machine.', unknown[0], keys)}"
        )
    rates = dict(known.get("rates") or {}) | dict(given.get("rates") or {})
    return MachineConfig(**known | given | {"rates": rates})


def _built(module: nn.Module | Callable[[], nn.Module], precision: Precision) -> nn.Module:
    """Return ``module``, or the module that it builds, after a call of ``configure_model``. A module that is built or
    changed here is on meta."""
    if isinstance(module, nn.Module) and engine_of(module) is not None:
        raise ConfigError("plan_memory: expected a module that is not sharded, got one after a run. Pass a new module.")
    if isinstance(module, nn.Module) and not _configures(module):
        return module

    def build() -> nn.Module:
        made: Any = meta_copy(module) if isinstance(module, nn.Module) else module() if callable(module) else module
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"plan_memory: expected a module, or a class or function that makes one, got {module!r}. Pass a module."
            )
        if _configures(made):
            made.configure_model()  # type: ignore[operator]
        return made

    return on_meta(build, precision)


def _configures(module: nn.Module) -> bool:
    return isinstance(module, pl.LightningModule) and is_overridden("configure_model", module)


def _states(
    asked: int | None, zero: ZeroConfig, units: Sequence[UnitGroup], module: nn.Module
) -> tuple[int | TensorStates, str]:
    if asked is not None:
        return asked, ""
    if isinstance(module, pl.LightningModule) and is_overridden("configure_optimizers", module):
        with quiet(logging.CRITICAL):  # Lightning logs a new Trainer
            return states_of(module, None, units, zero)
    return ADAM_STATES, "the module has no configure_optimizers; give optimizer_states"
