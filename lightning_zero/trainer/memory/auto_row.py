"""Choose stage and offload for ``zero/stage=auto`` when a run starts: rank 0 chooses by all ranks' free memory. Also
refuse a model whose parameters do not fit into the memory of hosts without GPUs, before the parameters are allocated.

::

    all ranks   host, free memory, free disk        gathered
    rank 0      activations of one batch, the choice, or why there is none
    all ranks   the decision                        from rank 0
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.device import accelerator_of
from lightning_zero.engine import engine_of
from lightning_zero.engine.units.describe import UnitGroup, bucket_shapes, describe_units
from lightning_zero.lightning_api import isolate_rng, pl, rank_zero_info
from lightning_zero.planning.activations import ByBatchSize
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.choose import choose_row
from lightning_zero.planning.fit import Machine, Model, plan_row
from lightning_zero.planning.memory import ADAM_STATES, Limits
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES
from lightning_zero.planning.tensor_states import TensorStates
from lightning_zero.ranks.posts import machine
from lightning_zero.settings import (
    ConfigError,
    Offload,
    OffloadConfig,
    Recompute,
    ZeroConfig,
    candidate_rows,
    for_layout,
    with_rows,
)
from lightning_zero.tiers.limits import available_host_memory, free_swap
from lightning_zero.trainer.memory.activations import NotMeasured, measure_sizes
from lightning_zero.trainer.memory.fake_module import states_of
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.run import Run


@dataclass(frozen=True)
class Decision:
    """The chosen stage and offload, and the reason.

    Attributes:
        samples: the largest micro-batch per rank that fits according to the plan; None if not known.
        fitting: whether the choice was made for a fit, not for an evaluation.
    """

    stage: str
    offload: str
    reason: str
    samples: int | None
    fitting: bool = True

    @property
    def rows(self) -> str:
        return f"zero/stage={self.stage} zero/offload={self.offload}"

    def __str__(self) -> str:
        most = (
            "" if self.samples is None else f" The largest micro-batch that fits has {self.samples} sample(s) per rank."
        )
        return f"auto: {self.rows}: {self.reason}.{most}"


@dataclass
class Auto:
    """Holds the ``decision`` on stage and offload. ``asked``: the run's settings if ``stage=auto``, else None."""

    asked: ZeroConfig | None
    decision: Decision | None = None

    def decide(self, strategy: Run, trainer: pl.Trainer, module: pl.LightningModule, *, fitting: bool) -> None:
        """If ``stage=auto``, choose stage and offload, and set them in ``strategy.config``. A choice stays, except that
        a fit of an unsharded module replaces an evaluation's. All ranks raise ConfigError if none fits. Collective."""
        asked, before = self.asked, self.decision
        if asked is None or (before is not None and (before.fitting or not fitting)):
            return
        if before is not None and engine_of(module) is not None:  # keep the choice while the module is sharded
            return
        places = strategy._gather_objects(_place(strategy, asked), "free memory of all ranks, for zero/stage=auto")

        def act() -> Decision | None:
            if not strategy.is_global_zero:
                return None
            try:
                there = machine_of(places, strategy)
                model, assumed = model_of(strategy, trainer, module, asked, fitting=fitting)
                if model.activations is not None:
                    strategy.run_plan.activations = model.activations.measured[0]
                candidates = [(stage, settings.name, settings) for stage, settings in candidate_rows(asked)]
                if not candidates:
                    raise ConfigError(
                        "zero/stage=auto: expected a stage that allows zero/offload="
                        f"{asked.offload.name.name}, and a folder if this offload writes files, got none. Choose "
                        "zero/offload=auto, or set zero.offload.nvme_path."
                    )
                choice = choose_row(model, there, candidates, CPU_RATES if there.shared else GPU_RATES)
                reason = choice.reason + "".join(f" ({text})" for text in assumed)
                return Decision(choice.row.stage.value, choice.row.offload.value, reason, choice.samples, fitting)
            except ConfigError:
                raise
            except Exception as error:
                text = f"zero/stage=auto: rank 0 could not decide: {type(error).__name__}: {error}"
                raise RuntimeError(text) from error

        what = "the decision on zero/stage=auto"
        found: Decision = strategy._gather_objects(strategy._together(what, act), what)[0]
        self.decision = found
        strategy.config = with_rows(asked, found.stage, found.offload, settings=_settings(asked))
        rank_zero_info(str(found))


class _Place(NamedTuple):
    """One rank's host, and its free bytes of GPU memory, host memory and disk."""

    host: str
    gpu: int  # 0: the rank computes on the host
    memory: int
    disk: int


def _settings(asked: ZeroConfig) -> OffloadConfig:
    """Return the offload settings. Under ``auto``, the folder for files defaults to LIGHTNING_ZERO_NVME_PATH."""
    path = asked.offload.nvme_path or os.environ.get("LIGHTNING_ZERO_NVME_PATH")
    if asked.offload.name is not Offload.auto or path is None:
        return asked.offload
    return replace(asked.offload, nvme_path=path)


def _place(strategy: Run, asked: ZeroConfig) -> _Place:
    path = _settings(asked).nvme_path
    folder = os.path.expandvars(os.path.expanduser(path)) if path else ""
    disk = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    return _Place(machine(), accelerator_of(strategy.root_device).free_nbytes(), available_host_memory(), disk)


def machine_of(places: list[_Place], strategy: Run) -> Machine:
    """Return the Machine to plan for. ``places``: one per rank; the smallest values of free memory and disk count."""
    ranks = Counter(place.host for place in places)
    gpus = max(ranks.values())
    return Machine(
        gpus,
        min(place.gpu for place in places),
        min(place.memory for place in places),
        min(place.disk for place in places),
        len(ranks),
        shared=strategy.root_device.type == "cpu",
        hybrid_shard=strategy.config.hybrid_shard,
    )


def model_of(
    strategy: Run, trainer: pl.Trainer, module: pl.LightningModule, config: ZeroConfig, *, fitting: bool
) -> tuple[Model, list[str]]:
    """Return the planner's description of ``module``, and a list of assumptions made where facts are unknown."""
    layout, precision = for_layout(config), strategy.precision_plugin.row
    units = describe_units(module, layout, precision)
    found, why_not = None, "" if fitting else "there is no training"
    if fitting:
        found, why_not = activations_of(strategy.precision_plugin, trainer, module, layout)
    assumed = []
    if why_not:
        assumed.append(f"activations are not in the plan, and half of the memory is left for them, because {why_not}")
    states: int | TensorStates | None = strategy.run_plan.optimizer_states
    why = ""
    if states is None:
        states, why = states_of(module, trainer, units, config) if fitting else (ADAM_STATES, "")
    if why:
        assumed.append(f"{states} tensors of optimizer state for each parameter are assumed, as for Adam: {why}")
    return planned_model(units, config, trainer.accumulate_grad_batches, states, found), assumed


def planned_model(
    units: Sequence[UnitGroup],
    config: ZeroConfig,
    micro_batches: int,
    states: int | TensorStates,
    activations: ByBatchSize | None = None,
) -> Model:
    return Model(
        tuple(unit.name for unit in units),
        tuple(bucket_shapes(units)),
        Limits(config.prefetch_bytes, config.keep_gathered_bytes, config.reduce_bucket_bytes, micro_batches),
        states,
        activations,
        recomputes=config.activation_checkpointing is not Recompute.none,
        gather_after_fit=config.gather_after_fit,
    )


def activations_of(
    plugin: ZeroPrecision, trainer: pl.Trainer, module: pl.LightningModule, config: ZeroConfig
) -> tuple[ByBatchSize | None, str]:
    """Return the measured activations of a first training batch, and "". If they cannot be measured, return None and
    the reason. The states of random number generators stay unchanged."""
    try:
        with isolate_rng(include_cuda=False):
            batch = batch_from(trainer.fit_loop._data_source.dataloader())
    except Exception as error:  # of users' code; training will raise it again
        return None, f"a first batch cannot be taken: {type(error).__name__}: {error}"
    try:
        return measure_sizes(module, batch, config, plugin.row, trainer=trainer), ""
    except NotMeasured as error:
        return None, str(error)


def batch_from(loaders: Any) -> Any:
    """Return a batch of a loader's first samples; for several loaders, a batch of each. Uses no samplers or workers."""
    if isinstance(loaders, Mapping):
        return {key: batch_from(value) for key, value in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(batch_from(value) for value in loaders)
    if type(loaders).__name__ == "CombinedLoader":
        return batch_from(loaders.iterables)
    if not isinstance(loaders, DataLoader):
        return next(iter(loaders))
    dataset, size = loaders.dataset, loaders.batch_size
    if size is None:
        size = getattr(loaders.batch_sampler, "batch_size", None)
    if isinstance(dataset, IterableDataset):
        samples = list(itertools.islice(iter(dataset), size or 1))
        return loaders.collate_fn(samples) if size else samples[0]
    if size is None:
        return loaders.collate_fn(dataset[0])
    count = min(size, len(dataset))  # type: ignore[arg-type]
    return loaders.collate_fn([dataset[index] for index in range(count)])


def check_host_room(strategy: Run, module: nn.Module, config: ZeroConfig) -> None:
    """Raise ConfigError on all ranks if a host lacks memory for its ranks' shards of a module on meta. Collective.

    Gradients, optimizer state and activations are left out, because it is not known yet which parameters get them. If
    the user has set ``host_budget``, nothing is checked.
    """
    if accelerator_of(strategy.root_device).has_streams or config.offload.host_budget is not None:
        return
    if config.offload.name is Offload.auto:  # the offload is chosen by the available memory
        return
    what = "room for parameters"
    needed = strategy._together(what, partial(_needed, strategy, module, config))
    own = (machine(), socket.gethostname(), needed, available_host_memory() + free_swap())
    hosts = defaultdict(list)
    for key, *values in strategy._gather_objects(own, what):
        hosts[key].append(values)
    for ranks in hosts.values():
        want, free = sum(rank[1] for rank in ranks), min(rank[2] for rank in ranks)
        if want > free:
            raise ConfigError(
                f"zero.offload: expected room for the parameters of {len(ranks)} rank(s) on host {ranks[0][0]}, "
                f"{want:,} bytes, got {free:,} available bytes (of its cgroup, or of the machine). Without GPUs "
                "parameters are in host memory. Use GPUs, more hosts, zero/offload=nvme, zero/precision=bf16_true or a "
                "smaller model (python -m lightning_zero.plan shows what each stage needs). On a machine whose memory "
                "grows with use, choose zero/offload=cpu and set zero.offload.host_budget, which is not checked."
            )


def _needed(strategy: Run, module: nn.Module, config: ZeroConfig) -> int:
    """Return how many more bytes this rank's shards take than the module does now; 0 if no parameter is on meta."""
    if not any(param.is_meta for param in module.parameters()):
        return 0
    units = describe_units(module, config, strategy.precision_plugin.row)
    ranks, nodes = strategy.world_size // strategy.num_nodes, strategy.num_nodes
    there = Machine(ranks, 0, available_host_memory(), 0, nodes, shared=True, hybrid_shard=config.hybrid_shard)
    model = planned_model(units, config, 1, states=0)
    row = plan_row(model, config.stage.name, config.offload.name, there, config.offload)
    rest = sum(n for (role, tier), n in row.rest.items() if role is not Role.grad and tier is not Tier.nvme)
    return max(0, rest - sum(param.nbytes for param in module.parameters() if not param.is_meta))
