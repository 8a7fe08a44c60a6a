"""ZeroMonitor: logs speed, memory by role and tier, and the time that computation waited."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch

from lightning_zero.device import recording
from lightning_zero.device.recording import MOVES, WAITS, Recorder
from lightning_zero.engine import Engine
from lightning_zero.engine.passes.containers import find_tensors
from lightning_zero.lightning_api import Callback, pl
from lightning_zero.planning.buckets import RESTING
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.peaks import peak_flops
from lightning_zero.settings import ConfigError, Offload, Precision
from lightning_zero.settings.names import positive
from lightning_zero.trainer.callbacks.flops import FlopCount
from lightning_zero.trainer.memory.held_bytes import held_bytes, planned_now
from lightning_zero.trainer.step_tokens import step_tokens

SMOOTHED = 10  # number of logs over which speeds are averaged
_BETWEEN_RANKS = ("gather", "reduce", "agree")
_OFFLOADED = ("transfer", "step", "h2d", "d2h")
_DISK = ("disk", "disk_read", "disk_write")
_DTYPES = {Precision.fp32: "fp32", Precision.fp64: "fp64", Precision.fp16: "fp16", Precision.fp16_true: "fp16"}


class ZeroMonitor(Callback):
    """Logs these metrics of rank 0 to all loggers, without messages or waits.

    ::

        zero/steps_per_s             optimizer steps
        zero/tokens_per_s            tokens of all ranks; if batches have no tokens, zero/samples_per_s
        zero/tflops_per_s            model FLOP/s of one device, in 1e12, if the FLOPs of a batch are known
        zero/mfu                     model FLOP/s divided by the device's peak FLOP/s, if the peak is known too
        zero/bytes/<role>/<tier>     bytes between steps: compute_param, master_param, grad, optim_state, staging
        zero/bytes_over_plan         the sum of these bytes, without staging, divided by the planned sum
        zero/grad_norm               the newest gradient norm that has reached the host, with gradient_clip_val
        zero/skipped_steps           steps skipped because of gradients that were not finite, if steps can be skipped
        zero/loss                    the last step's mean loss over all its tokens, with zero.loss=tokens
        zero/peak_bytes/device       the peak of GPU memory for tensors
        zero/wait_s_per_step         seconds per step in which computation waited, for any of the following
        zero/wait_s/<what>           gather, reduce, agree (small messages), transfer, disk, step (of an offloaded
                                     optimizer), sequence (the exchange of heads)
        zero/moved_bytes/<what>      bytes per step: gather, reduce, sequence, h2d, d2h, disk_read, disk_write
        zero/prefetch_hits           fraction of gathers that were issued before they were needed

    Speeds are averages over the last ten logs; other metrics cover the time since the last log.

    Model FLOPs are counted during the first batch with torch's formulas, or taken from the module's attribute
    ``flops_per_batch``: FLOPs of the forward and backward of one whole batch, even if ranks share sequences. Compiled
    modules need this attribute. Raises ConfigError under other strategies.

    Args:
        every_n_steps: optimizer steps between two logs; default: ``Trainer(log_every_n_steps=)``.
        prog_bar: show speed, and MFU if known, in the progress bar.
        peak_flops: FLOP/s of one device; default: the GPU's known peak.
        count_flops: count FLOPs during the first batch.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        prog_bar: bool = False,
        peak_flops: float | None = None,
        count_flops: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("peak_flops", peak_flops)):
            if value is not None:
                positive(f"ZeroMonitor({name}=)", value)
        self._every_n_steps = every_n_steps
        self._prog_bar = prog_bar
        self._peak, self._count_flops = peak_flops, count_flops
        self._recorder: Recorder | None = None
        self._counting: FlopCount | None = None
        self._flops_per_sample: float | None = None
        self._sums: defaultdict[str, float] = defaultdict(float)  # since training began, without validation
        self._logged: deque[dict[str, float]] = deque(maxlen=SMOOTHED + 1)
        self._since: float = 0.0

    # -- a run --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        from lightning_zero.trainer.strategy import ZeroStrategy

        if not isinstance(trainer.strategy, ZeroStrategy):
            raise ConfigError(
                f"ZeroMonitor: expected a Trainer with ZeroStrategy, got {type(trainer.strategy).__name__}. Set "
                "Trainer(strategy='zero3'), or drop the callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = _engine(trainer)
        self._stop()
        self._recorder = recording.listen(engine.comm.streams.accelerator)
        self._sums, self._flops_per_sample = defaultdict(float), None
        self._since = time.monotonic()
        self._logged.clear()
        self._logged.append(self._now(trainer))
        if self._peak is None:
            dtype = _DTYPES.get(engine.passes.precision, "bf16")
            tf32 = torch.get_float32_matmul_precision() != "highest"
            self._peak = peak_flops(engine.comm.streams.accelerator.name, dtype, tf32=tf32)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._end_counting()  # still open if on_train_batch_start returned -1
        first = self._recorder is not None and not self._sums["batches"]
        known = getattr(pl_module, "flops_per_batch", None) is not None
        if first and self._count_flops and not known and not _engine(trainer).compiled.are_there:
            self._counting = FlopCount()
            self._counting.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is None:
            return
        counted, samples, tokens = self._end_counting(), *batch_size(batch)
        sums = self._sums
        sums["batches"] += 1
        sums["samples"] += samples
        sums["tokens"] += tokens
        if counted is not None and counted.of_model and samples:
            self._flops_per_sample = counted.of_model / samples
        if (given := getattr(pl_module, "flops_per_batch", None)) is not None:
            sums["flops"] += float(given) * batches_at_once(trainer) / trainer.world_size
        elif self._flops_per_sample is not None:
            sums["flops"] += self._flops_per_sample * samples
        every = self._every_n_steps or getattr(trainer, "log_every_n_steps", 0)
        if every and trainer.global_step >= self._logged[-1]["steps"] + every:
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_counting()  # as in on_train_batch_start

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._sums["seconds"] += time.monotonic() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.monotonic()

    def _stop(self, *_: Any, **__: Any) -> None:
        self._end_counting()
        if self._recorder is not None:
            self._recorder = None
            recording.stop()

    on_train_end = on_exception = teardown = _stop  # teardown: after an exception of another callback's hook

    def _end_counting(self) -> FlopCount | None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counting

    # -- what is logged -----------------------------------------------------------------------------------------------

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged.append(self._now(trainer))
        oldest, before, now = self._logged[0], self._logged[-2], self._logged[-1]
        speed = self._speed(trainer, {name: now[name] - oldest.get(name, 0) for name in now})
        recent = {name: now[name] - before.get(name, 0) for name in now}
        metrics = speed | self._waits(trainer, recent) | self._memory(trainer) | self._of_step(trainer)
        # Not ``self.log``: Lightning drops its values if Trainer(log_every_n_steps=) differs from ours.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        # Host tensors: Lightning would send plain numbers to the device one by one, and wait for each.
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        trainer.callback_metrics.update(values)
        if self._prog_bar:
            shown: list[str] = [n for n in ("zero/tokens_per_s", "zero/samples_per_s", "zero/mfu") if n in speed]
            for name in [*shown] or ["zero/steps_per_s"]:
                pl_module.log(name, values[name], on_step=True, on_epoch=False, logger=False, prog_bar=True)

    def _now(self, trainer: pl.Trainer) -> dict[str, float]:
        assert self._recorder is not None
        sums, order, now = self._sums, _engine(trainer).passes.order, time.monotonic()
        sums["seconds"] += now - self._since
        sums["steps"], self._since = trainer.global_step, now
        stood, moved = self._recorder.waited_so_far(), self._recorder.moved_so_far()
        waits = {f"wait_s/{kind}": stood.get(kind, 0.0) for kind in WAITS}
        bytes_moved = {f"moved_bytes/{kind}": moved[kind] for kind in MOVES}
        return {**sums, **waits, **bytes_moved, "ahead": order.ahead, "missed": order.missed}

    def _speed(self, trainer: pl.Trainer, done: Mapping[str, float]) -> dict[str, float]:
        seconds = max(done["seconds"], 1e-9)
        found = {"zero/steps_per_s": done["steps"] / seconds}
        for name in ("tokens", "samples"):
            if done.get(name):
                found[f"zero/{name}_per_s"] = batches_at_once(trainer) * done[name] / seconds
                break
        if flops := done.get("flops"):
            found["zero/tflops_per_s"] = flops / seconds / 1e12
            if self._peak is not None:
                found["zero/mfu"] = flops / seconds / self._peak
        return found

    @staticmethod
    def _waits(trainer: pl.Trainer, done: Mapping[str, float]) -> dict[str, float]:
        kinds = _kinds(_engine(trainer))
        found = {"zero/wait_s_per_step": sum(done[f"wait_s/{kind}"] for kind in WAITS) / done["steps"]}
        for name in (*(f"wait_s/{kind}" for kind in WAITS), *(f"moved_bytes/{kind}" for kind in MOVES)):
            if name.partition("/")[2] in kinds or done[name]:
                found[f"zero/{name}"] = done[name] / done["steps"]
        if fetched := done["ahead"] + done["missed"]:
            found["zero/prefetch_hits"] = done["ahead"] / fetched
        return found

    @staticmethod
    def _of_step(trainer: pl.Trainer) -> dict[str, float]:
        engine, tokens = _engine(trainer), step_tokens(trainer.strategy)
        found = {} if tokens is None or tokens.loss is None else {"zero/loss": float(tokens.loss)}
        if (norm := trainer.strategy._interruptions.not_finite.norm) is not None:  # type: ignore[attr-defined]
            found["zero/grad_norm"] = norm
        skips = engine.config.optimizer.skip_nonfinite is not None or engine.passes.precision is Precision.fp16
        return found | ({"zero/skipped_steps": float(engine.passes.sharded_grads.overflows)} if skips else {})

    @staticmethod
    def _memory(trainer: pl.Trainer) -> dict[str, float]:
        engine = _engine(trainer)
        held = held_bytes(engine)
        found = {f"zero/bytes/{role.value}/{tier.value}": float(nbytes) for (role, tier), nbytes in held.items()}
        if plan := at_rest(planned_now(engine, held)):
            found["zero/bytes_over_plan"] = at_rest(held) / plan
        accelerator = engine.comm.streams.accelerator
        if accelerator.has_streams:
            found["zero/peak_bytes/device"] = float(accelerator.peak_nbytes())
        return found


def at_rest(held: Bytes) -> int:
    """Return the bytes in ``held`` of the roles that stay allocated between steps (:data:`RESTING`)."""
    return sum(nbytes for (role, _), nbytes in held.items() if role in RESTING)


def _engine(trainer: pl.Trainer) -> Engine:
    return trainer.strategy.engine  # type: ignore[attr-defined]


def batches_at_once(trainer: pl.Trainer) -> int:
    """Return how many batches all ranks compute at once. Ranks that share a sequence share one batch."""
    batches: int = trainer.strategy.distributed_sampler_kwargs["num_replicas"]  # type: ignore[attr-defined]
    return batches


def _kinds(engine: Engine) -> set[str]:
    """Return the kinds of waits (:data:`WAITS`) and transfers (:data:`MOVES`) that can occur in this run."""
    kinds = set(_BETWEEN_RANKS) if engine.comm.world_size > 1 else set()
    if engine.config.offload.name is not Offload.none:
        kinds.update(_OFFLOADED)
    if engine.tiers.nvme is not None:
        kinds.update(_DISK)
    return kinds


def batch_size(batch: Any) -> tuple[int, int]:
    """Return the numbers of samples and tokens in a batch, 0 if unknown. Tokens are integers ``[samples, length]``."""
    parts = (batch.get("input_ids"), batch) if isinstance(batch, Mapping) else batch
    first = next((tensor for tensor in find_tensors(parts) if tensor.dim()), None)
    if first is None:
        return 0, 0
    is_tokens = first.dim() == 2 and not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool)
    return len(first), first.numel() if is_tokens else 0
