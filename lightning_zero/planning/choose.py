"""Choose a stage and an offload setting for ``auto``: the fastest pair that fits. The choice is deterministic.

A share :data:`KEPT_FREE` of each memory stays free for what plans do not count: a GPU's context, the allocator's
rounding, the system.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.filesize import pick_unit_and_suffix

from lightning_zero.planning.activations import ByBatchSize
from lightning_zero.planning.fit import Machine, Model, Row, plan_row
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES, Rates
from lightning_zero.settings import ConfigError, Offload, OffloadConfig, Stage

KEPT_FREE = 0.1  # share of each tier
UNKNOWN_FREE = 0.5  # share of the device that stays free if activations are not known
MOST_SAMPLES = 1 << 16
MOST_MEASURED = 6  # batch sizes to try between one that fits and one that does not
NAMES = {Tier.device: "GPU memory", Tier.host: "host memory", Tier.nvme: "disk"}

Candidates = Sequence[tuple[Stage, Offload, OffloadConfig]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan of the stage and offload setting that ``auto`` takes, and the reason for this choice."""

    row: Row
    reason: str  # a sentence
    samples: int | None  # the largest micro-batch of a rank that fits; None: not known

    @property
    def rows(self) -> str:
        return f"zero/stage={self.row.stage.value} zero/offload={self.row.offload.value}"


def with_reserve(machine: Machine, *, activations_known: bool = True) -> Machine:
    """Return ``machine`` with less memory. Each size is reduced by the share :data:`KEPT_FREE`, but device memory by
    :data:`UNKNOWN_FREE` unless ``activations_known``."""
    device = KEPT_FREE if activations_known else UNKNOWN_FREE
    host = max(KEPT_FREE, device if machine.shared else 0.0)
    return replace(
        machine,
        gpu_memory=int(machine.gpu_memory * (1 - device)),
        host_memory=int(machine.host_memory * (1 - host)),
        nvme=int(machine.nvme * (1 - KEPT_FREE)),
    )


def choose_row(model: Model, machine: Machine, candidates: Candidates, rates: Rates) -> Choice:
    """Return the fastest of ``candidates`` (stages with offload settings) that fits. Of equally fast candidates, return
    the one that sends least, then offloads least, then shards least. Raises ConfigError if none fits."""
    usable = with_reserve(machine, activations_known=model.activations is not None)
    rows = [plan_row(model, stage, offload, usable, settings, rates) for stage, offload, settings in candidates]
    fitting = [row for row in rows if row.fits]
    if not fitting:
        raise ConfigError(_nothing_fits(rows, usable, model))
    chosen = min(fitting, key=_rank)
    settings = next(s for stage, offload, s in candidates if (stage, offload) == (chosen.stage, chosen.offload))
    samples = largest_batch(model, usable, chosen, settings)
    return Choice(chosen, _reason(chosen, rows, usable, rates), samples)


def _rank(row: Row) -> tuple[float, float, int, str]:
    assert row.time is not None and row.sent is not None
    return row.time.seconds, row.sent.nbytes, list(Offload).index(row.offload), row.stage.value


def largest_batch(model: Model, usable: Machine, row: Row, settings: OffloadConfig) -> int | None:
    """Return the largest micro-batch of a rank, in samples, with which the plan ``row`` fits, up to ``MOST_SAMPLES``.
    Return None if activations are unknown, or known for one size only. If activations can be measured, the result is
    checked by measuring, because bytes may grow faster than samples. ``usable``: see :func:`with_reserve`."""
    known = model.activations
    if known is None or not known.scales:
        return None

    def fits(of_a_part: int, activations: ByBatchSize = known) -> bool:
        of_size = replace(model, samples=of_a_part, activations=activations)
        return plan_row(of_size, row.stage, row.offload, usable, settings).fits

    samples = range(1, MOST_SAMPLES + 1)
    found = bisect.bisect_left(samples, True, key=lambda of_a_part: not fits(of_a_part))  # 0: none fits
    if known.measure is not None and found > max(known.sizes):
        measure = known.measure

        def really_fits(of_a_part: int) -> bool:
            size = of_a_part
            measured = measure(size)
            return measured is not None and fits(of_a_part, ByBatchSize((size, size), (measured, measured)))

        smallest = model.samples or known.sizes[0]  # ``row`` is known to fit with this size
        found = _largest_measured(really_fits, smallest, found)
    return found


def _largest_measured(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the micro-batch size ``high`` if it fits. Otherwise bisect a few times between ``low``, which fits, and
    ``high``, and return the largest size that was found to fit."""
    if fits(high):
        return high
    for _ in range(MOST_MEASURED):
        middle = math.isqrt(low * high)
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _reason(chosen: Row, rows: Sequence[Row], usable: Machine, rates: Rates) -> str:
    assert chosen.time is not None
    at = " at assumed rates" if rates in (CPU_RATES, GPU_RATES) else ""
    fitting = sum(row.fits for row in rows)
    parts = [
        f"the fastest of {fitting} combinations that fit, of {len(rows)}" if len(rows) > 1 else "the only candidate",
        f"an expected {seconds_text(chosen.time.seconds)} per step{at}, "
        f"bound by {chosen.time.binding.replace('_', ' ')}",
    ]
    faster = [r for r in rows if not r.fits and r.time is not None and _rank(r) < _rank(chosen)]
    if faster:
        best = min(faster, key=_rank)
        parts.append(f"{best.stage.value} + {best.offload.value} would be faster, but it {lacks(best, usable)}")
    return "; ".join(parts)


def seconds_text(seconds: float) -> str:
    """Format seconds: ``0.0123`` -> ``12.3 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def human_bytes(nbytes: float) -> str:
    """Format bytes in powers of 1024: ``1536`` -> ``1.5 KiB``."""
    unit, name = pick_unit_and_suffix(int(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{nbytes / unit:.{int(unit > 1)}f} {name}"


def lacks(row: Row, usable: Machine) -> str:
    """Describe the largest shortage of the plan ``row``: how many bytes it needs on a tier, and how many may be used.
    Return "fits" if no tier lacks memory."""
    if row.refused:
        return "has budgets without usable memory"
    if not row.shortages:
        return "fits"
    worst = max(row.shortages, key=lambda s: s.nbytes)
    have = {Tier.device: usable.gpu_memory, Tier.host: usable.host_memory, Tier.nvme: usable.nvme}[worst.tier]
    return f"needs {human_bytes(have + worst.nbytes)} of {NAMES[worst.tier]}, but {human_bytes(have)} may be used"


def _nothing_fits(rows: Sequence[Row], usable: Machine, model: Model) -> str:
    def lack(row: Row) -> tuple[bool, int]:
        return bool(row.refused), sum(s.nbytes for s in row.shortages)

    nearest = min(rows, key=lack)
    ways = ["use more ranks"]
    if model.activations is not None and model.activations.scales and model.samples != 1:
        ways.append("lower the batch size (data.batch_size)")
    if not model.recomputes:
        ways.append("set zero.activation_checkpointing=blocks")
    if not usable.nvme and any(s.tier is not Tier.nvme for s in nearest.shortages):
        ways.append("give zero.offload.nvme_path a folder on a local disk")
    if model.gather_after_fit is True and any(s.tier is Tier.host for s in nearest.shortages):
        ways.append("set zero.gather_after_fit=null")
    if any(shape.trainable and not shape.whole and shape.itemsizes.compute == 4 for shape in model.shapes):
        ways.append("choose zero/precision=bf16")
    text = ", ".join(ways[:-1]) + (", or " if len(ways) > 1 else "") + ways[-1]
    device = "" if usable.shared else f"{human_bytes(usable.gpu_memory)} of each GPU, "
    return (
        f"zero/stage and zero/offload: expected a combination that fits into {usable.world_size} rank(s) on "
        f"{usable.nodes} host(s): {device}"
        f"{human_bytes(usable.host_memory)} of a host's memory, {human_bytes(usable.nvme)} of its disk, got none of "
        f"{len(rows)}: the nearest, {nearest.stage.value} + {nearest.offload.value}, {lacks(nearest, usable)}. "
        f"{text[0].upper()}{text[1:]} (python -m lightning_zero.plan shows all of them)."
    )
