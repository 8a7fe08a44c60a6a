"""What the engine may refuse: how it says so, and why it has to.

A program that ends in anything else has found a mistake: in the engine, in the fuzzer, or in this list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.fuzz import programs as p
from tests.fuzz.programs import Program
from tests.fuzz.sides import AUTOCAST


class Refusal(NamedTuple):
    """A pattern of "kind of exception: message", what would be wrong otherwise, and which programs may be refused."""

    pattern: str
    why: str
    of: Callable[[Program], bool]


def _stages(program: Program) -> Iterator[int]:
    yield program.settings.stage
    yield from (action.stage for action in program.everything() if isinstance(action, p.Reshard))


def _replaces_values(program: Program) -> bool:
    """Assignments to ``.data``, under autocast all writes and steps: torch's own graphs keep the memory of before."""
    autocast = program.settings.precision in ("bf16", "fp16")
    return any(
        (isinstance(a, p.Write) and (autocast or a.how in ("outside", "assign")))
        or (isinstance(a, p.Gather) and (autocast or a.write in ("data", "one rank")))
        or (isinstance(a, p.Step) and a.late and autocast)
        for a in program.everything()
    ) or program.has("Clamped")


def _walks_again(program: Program) -> bool:
    """At stage 3, from weights that a backward which is only noticed has not gathered, or that were read outside."""
    reads = program.settings.plain or "ModuleList" in program.settings.classes  # which is never called
    reads |= any(isinstance(a, p.Forward) and a.penalty for a in program.everything())
    again = any(isinstance(a, p.Backward) and (a.twice or a.separately) for a in program.everything())
    return 3 in _stages(program) and again and reads


REFUSALS = (
    Refusal(
        r"ConfigError: param group \d+ of optimizer 0: expected one lr on all ranks, got \S+ on rank 0 "
        r"and \S+ on rank [1-9]",
        "each rank would step its shards with its own",
        lambda program: any(isinstance(a, p.ChangeRate) and a.by_rank for a in program.everything()),
    ),
    Refusal(
        r"ConfigError: (zero\.offload\.host_budget|offload\['host_budget'\]): rank \d+ needs",
        "auto splits the optimizer before it knows it, as one with two tensors of state: amsgrad has three",
        lambda program: program.settings.offload == "auto" and program.optimizer == "amsgrad",
    ),
    Refusal(
        r"RuntimeError: gradients of backwards inside no_sync\(\) have not been reduced over the ranks",
        "a backward that is only noticed, by a gradient of a parameter, has reached none: those of before still wait",
        lambda program: (
            program.settings.plain
            and any(node.frozen for node in program.nodes())
            and any(isinstance(action, p.Backward) and action.no_sync for action in program.everything())
        ),
    ),
    Refusal(
        r"RuntimeError: .* is computed again from its inputs in backward \(zero.activation_checkpointing\), and its "
        r"inputs (are|were) changed in place",
        "it would be computed again from other inputs",
        lambda program: program.settings.recompute != "none",
    ),
    Refusal(
        r"ConfigError: activation_checkpointing='\w+': the model has no blocks that were found to be units",
        "there is nothing to compute again, and nobody would notice",
        lambda program: program.settings.recompute != "none",
    ),
    Refusal(
        r"RuntimeError: one of the variables needed for gradient computation has been modified",
        "a graph is walked again, from weights of the root, which only a backward that is told of has gathered, or "
        "from weights that were read outside of their module's call",
        _walks_again,
    ),
    Refusal(
        r"RuntimeError: (one of the variables needed for gradient computation has been modified"
        r"|.*: assigned between a forward that used the parameter and its backward)",
        "the values of before, which the backward needs, are overwritten",
        _replaces_values,
    ),
    Refusal(
        r"RuntimeError: a hook \(register_post_accumulate_grad_hook\) on \S+ was called for a second gradient",
        "torch shows such hooks the sum, which is in slices",
        lambda program: any(node.kind == "Watched" and node.n for node in program.nodes()),
    ),
    Refusal(
        r"RuntimeError: .*: written to in a step, with other values on some ranks than on others",
        "no rank's values are right for all",
        lambda program: program.ranks_differ,
    ),
    Refusal(
        r"RuntimeError: \S+: expected a write to fp32 values, got one to values in torch\.(bfloat16|float16)",
        "frozen values of few bits would lose small changes",
        lambda program: program.settings.precision in AUTOCAST,
    ),
    Refusal(
        r"RuntimeError: could not create a primitive descriptor for the LSTM",
        "torch has no kernel for it: an LSTM in fp16 on some processors, one under autocast whose input is fp32",
        lambda program: program.settings.precision in AUTOCAST and program.has("Recurrent"),
    ),
)


def refusal_of(program: Program, text: str) -> Refusal | None:
    """The one on the list that ``text`` is."""
    return next((r for r in REFUSALS if re.match(r.pattern, text, re.DOTALL) and r.of(program)), None)
