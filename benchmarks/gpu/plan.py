"""Which models, which rows, in which order, and how long each takes. Arithmetic; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A GPT and its batch.

    Attributes:
        recompute: blocks keep their inputs only; on all sides alike.
        together: the peers' processes stay while rows run, and all take turns. Else one process at a time has the
            device, because two would not fit.
        reduce_dtype: of gradients, on all sides that know such a setting. None: fp32.
    """

    name: str
    vocab_size: int
    n_layer: int
    n_head: int
    d_model: int
    length: int
    micro_batch: int
    precision: str = "bf16"
    recompute: bool = False
    together: bool = True
    reduce_dtype: str | None = None

    @property
    def block_parameters(self) -> int:
        return 12 * self.d_model**2 + 13 * self.d_model

    @property
    def parameters(self) -> int:
        return self.n_layer * self.block_parameters + (2 * self.vocab_size + self.length + 2) * self.d_model

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.length

    @property
    def flops(self) -> float:
        """Of a step's forward and backward, without recomputation: 6 for each weight of a matrix, causal attention."""
        weights = 12 * self.n_layer * self.d_model**2 + self.vocab_size * self.d_model
        return 6.0 * self.tokens * (weights + self.n_layer * self.d_model * self.length / 2)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter as it is computed with."""
        return 4 if self.precision == "fp32" else 2


SIZES = {
    size.name: size
    for size in (
        Size("0.1b", 32768, 12, 12, 768, 1024, 16),
        Size("1b", 32768, 18, 16, 2048, 1024, 16),
        Size("7b", 32768, 32, 32, 4096, 2048, 8, recompute=True, together=False, reduce_dtype="bf16"),
        Size("13b", 32768, 40, 40, 5120, 2048, 2, recompute=True, together=False, reduce_dtype="bf16"),
        Size("bits", 4096, 4, 8, 512, 256, 4),
        Size("tiny", 64, 2, 2, 32, 16, 2, precision="fp32"),
        Size("tiny-alone", 64, 2, 2, 32, 16, 2, recompute=True, together=False),
    )
}

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # between losses of two sides at the same step, relative

BITS = "bits of stages and rows, also while streams are late"
SANITIZER = "torch's sanitizer of streams"
TRAINER = "the Trainer under ZeRO beside the Trainer alone"
SIDES = ("zero0", "zero1", "zero2", "zero3", "zero3+optimizer_cpu", "zero3+cpu")


@dataclass(frozen=True)
class Row:
    """One way to train one size, in a process of its own.

    Attributes:
        side: ``bare``, ``fsdp2``, or ``zero<stage>``.
        offload: a row of ``zero/offload``.
        alone: with ``LIGHTNING_ZERO_EVEN_ALONE=1``: messages go through the library also on one rank.
        compiled: blocks are compiled, on all sides.
        estimate_s: how long the whole row takes on the machine that this is for.
    """

    size: Size
    side: str
    offload: str = "none"
    alone: bool = False
    compiled: bool = False
    estimate_s: float = 20.0
    warm_up: int = 2
    rounds: int = 3
    steps: int = 3

    @property
    def name(self) -> str:
        option = f"+{self.offload}" if self.offload != "none" else ""
        return self.side + option + ("+even_alone" if self.alone else "") + ("+compiled" if self.compiled else "")

    @property
    def is_ours(self) -> bool:
        return self.side.startswith("zero")

    @property
    def is_peer(self) -> bool:
        return not (self.is_ours or self.compiled or self.offload != "none")

    def spec(self, device: str, folder: str) -> dict[str, Any]:
        """What its process is told."""
        return {**asdict(self), "name": self.name, "device": device, "folder": folder}


@dataclass(frozen=True)
class Part:
    """Something that runs or does not: the tests, the rates, one row, or a question to :mod:`benchmarks.gpu.side`.

    Attributes:
        why_not: why it does not run; empty where it may.
    """

    kind: str  # job, tests, rates, row; bits, sanitizer, trainer: a method of Side
    name: str
    estimate_s: float
    row: Row | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    why_not: str = ""


def _row(size: str, side: str, estimate_s: float, **options: Any) -> Part:
    row = Row(SIZES[size], side, estimate_s=estimate_s, **options)
    return Part("row", f"{size} {row.name}", estimate_s, row, {"size": size, "side": row.name})


def _asked(kind: str, name: str, size: str, estimate_s: float, *, ranks: int = 1, **fields: Any) -> Part:
    on = f"{ranks} ranks on one GPU: " if ranks > 1 else ""
    return Part(kind, f"{on}{size}: {name}", estimate_s, fields={"size": size, "ranks": ranks, **fields})


def parts(tests_s: float = 60.0) -> list[Part]:
    """All parts, the most worth first. A peer stands before the rows that are compared with it."""
    compiled: dict[str, Any] = {"compiled": True, "rounds": 1, "warm_up": 3}
    alone, short, once = {"alone": True}, {"rounds": 2}, {"rounds": 1, "warm_up": 1, "steps": 2}
    return [
        Part("job", "the main job under zero3", 25.0),
        _asked("trainer", TRAINER, "bits", 30, sides=SIDES),
        _asked("bits", BITS, "bits", 45, ranks=2),
        _asked("trainer", TRAINER, "bits", 25, ranks=2, sides=("zero1", "zero3")),
        Part("tests", "tests marked gpu", tests_s),
        _asked("bits", BITS, "bits", 25),
        Part("rates", "rates of compute, memory, link and disk", 20.0),
        *(_row("1b", side, estimate_s, **short) for side, estimate_s in (("bare", 12), ("fsdp2", 15), ("zero3", 18))),
        *(_row("1b", "zero3", 28, offload=offload, **short) for offload in ("optimizer_cpu", "cpu")),
        _row("7b", "bare", 26, **once),
        _row("7b", "zero3", 30, **once),
        _row("7b", "zero3", 60, offload="optimizer_cpu", **once),
        _row("7b", "fsdp2", 30, **once),
        _row("13b", "zero3", 75, offload="auto", **once),
        _row("7b", "fsdp2", 70, offload="cpu", **once),
        *(_row("1b", side, 45, **compiled) for side in ("bare", "fsdp2", "zero3")),
        _asked("trainer", TRAINER, "1b", 35, sides=("zero3",)),
        _row("1b", "zero3", 75, offload="nvme", **once),
        _asked("sanitizer", SANITIZER, "bits", 25),
        *(_row("1b", f"zero{stage}", 18) for stage in (0, 1, 2)),
        *(_row("0.1b", side, 10) for side in ("bare", "fsdp2", "zero3", "zero2", "zero1", "zero0")),
        *(_row("0.1b", "zero3", 12, offload=offload) for offload in ("optimizer_cpu", "cpu")),
        *(_row("1b", f"zero{stage}", 20, **alone) for stage in (3, 2, 1, 0)),
    ]


def tiny_parts() -> list[Part]:
    """The same in seconds, on a CPU: each kind of part, with and without peers that stay."""
    few = {"rounds": 2, "warm_up": 1, "steps": 1, "estimate_s": 20.0}  # on a machine that does much else
    return [
        Part("job", "the main job under zero3", 60.0),
        Part("tests", "tests marked gpu", 60.0),
        Part("rates", "rates of compute, memory, link and disk", 20.0),
        *(_row("tiny", side, **few) for side in ("bare", "fsdp2", "zero3")),
        *(_row("tiny", "zero3", offload=offload, **few) for offload in ("optimizer_cpu", "nvme", "auto")),
        _row("tiny", "fsdp2", offload="cpu", **few),
        _row("tiny", "zero3", alone=True, **few),
        _row("tiny-alone", "bare", **few),
        _row("tiny-alone", "zero1", **few),
        _row("tiny-alone", "zero3", compiled=True, **few | {"estimate_s": 60.0}),
        _asked("bits", BITS, "tiny", 10),
        _asked("sanitizer", SANITIZER, "tiny", 20),
        _asked("trainer", TRAINER, "tiny", 60, sides=("zero3", "zero3+cpu")),
        _asked("bits", BITS, "tiny-alone", 20, ranks=2),
        _asked("trainer", TRAINER, "tiny", 60, ranks=2, sides=("zero1", "zero3")),
    ]
