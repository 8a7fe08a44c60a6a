"""Draws programs. What comes first in each choice is the simplest: programs are made small towards it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lightning_zero.settings import allowed_rows
from tests.fuzz import programs as p
from tests.fuzz.models import CONTAINERS, LEAVES, MIXES, class_names
from tests.fuzz.sides import AUTOCAST, OPTIMIZERS

PARTS = st.integers(0, 3)


def _rarely(number: int = 6) -> SearchStrategy[bool]:
    return st.sampled_from([False] * (number - 1) + [True])


def _mostly(first: Any, *others: Any) -> SearchStrategy[Any]:
    """``first`` about as often as all ``others`` together."""
    return st.sampled_from([first] * len(others) + list(others))


NODES = st.recursive(
    st.builds(p.Node, kind=st.sampled_from(list(LEAVES)), n=st.integers(0, 3), frozen=_rarely(), zeroed=_rarely()),
    lambda nodes: st.builds(
        p.Node,
        kind=st.sampled_from(list(MIXES)),
        children=st.lists(nodes, min_size=1, max_size=3).map(tuple),
        n=st.integers(0, 3),
        frozen=_rarely(12),
    ),
    max_leaves=4,
)

MODELS = st.builds(
    p.Model,
    body=st.lists(NODES, min_size=1, max_size=4).map(tuple),
    tokens=st.booleans(),
    head=st.sampled_from(["none", "linear", "tied"]),
    output=_mostly(*CONTAINERS),
    input_grad=_rarely(3),
    teacher=_mostly("none", "frozen", "no_grad", "trained"),
    seed=st.integers(0, 3),
)

# -- actions ----------------------------------------------------------------------------------------------------------

MAYBE_PART = st.none() | PARTS
OFFLOADS = {
    number: [offload.name for stage, offload in allowed_rows() if stage.name == f"zero{number}"] for number in range(4)
}

SOMETIMES = {"penalty": _rarely(8), "slope": _rarely(8), "dropped": _rarely(8)}
FORWARD = st.builds(p.Forward, part=_mostly(None, 0, 1, 2), scoped=_rarely(4), **SOMETIMES)
BACKWARD = st.builds(p.Backward, no_sync=_rarely(), separately=_rarely(), twice=_rarely(8))
STEP = st.builds(
    p.Step,
    clip=_mostly(0.0, 0.1, 10.0),
    zero=_mostly("none", "zeros", "keep"),
    late=_rarely(20),
    factor=_mostly(0.0, 0.3, 2.0),
    bad=_rarely(),
)
SELDOM = st.one_of(
    st.builds(p.Freeze, part=PARTS, thaw=st.booleans()),
    st.builds(p.AddGroup),
    st.builds(p.ChangeRate, by_rank=_rarely()),
    st.builds(p.Renew, how=st.sampled_from(["same", "new", "other", "old"])),
    st.builds(p.SyncBuffers),
    st.builds(p.Save),
    st.builds(p.Load),
    st.builds(p.Write, how=st.sampled_from(["in place", "data", "assign", "outside"])),
    st.builds(
        p.Gather,
        write=st.sampled_from(["nothing", "copy", "data", "one rank", "gradients"]),
        part=MAYBE_PART,
        raises=_rarely(),
    ),
    st.builds(
        p.Evaluate,
        part=_mostly(None, 0, 1),
        mode=st.sampled_from(["no_grad", "inference"]),
        eval_mode=st.booleans(),
        scoped=_rarely(3),
    ),
    st.builds(p.StepWithClosure, writes=_rarely(3)),
    st.builds(p.Raise, where=st.sampled_from(["forward", "backward"]), part=PARTS, alone=_rarely(20)),
    st.sampled_from(sorted(OFFLOADS)).flatmap(
        lambda stage: st.builds(
            p.Reshard,
            stage=st.just(stage),
            offload=_mostly(*OFFLOADS[stage], "none"),
            optimizer=st.sampled_from(["loaded", "new", "same"]),
        )
    ),
    st.builds(p.Use, how=st.sampled_from(["read", "in place", "data", "assign", "load", "copy", "keep"])),
)


@st.composite
def _rounds(draw: DrawFn) -> list[p.Action]:
    """A step as trainers make it, with a thing in between now and then."""
    actions: list[p.Action] = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        actions += draw(st.lists(SELDOM, max_size=1)) if draw(_rarely(3)) else []
        actions.append(draw(st.just(p.Forward()) | FORWARD))
        actions += draw(st.lists(SELDOM | FORWARD, max_size=1)) if draw(_rarely(5)) else []
        actions.append(draw(BACKWARD))
    actions += draw(st.lists(SELDOM, max_size=1)) if draw(_rarely(3)) else []
    actions.append(draw(STEP))
    if draw(_rarely(5)):
        return [p.Scope(actions=tuple(actions))]
    return actions


ACTIONS = st.lists(
    st.one_of(_rounds(), _rounds(), _rounds(), st.one_of(SELDOM, FORWARD, BACKWARD, STEP).map(lambda a: [a])),
    min_size=1,
    max_size=5,
).map(lambda rounds: tuple(action for actions in rounds for action in actions))

# -- settings and the whole --------------------------------------------------------------------------------------------


@st.composite
def _settings(draw: DrawFn, model: p.Model, world: int) -> p.Settings:
    stage = draw(st.sampled_from([3, 3, 3, 2, 1, 0]))
    names = class_names(model)
    by_class = draw(st.booleans())
    return p.Settings(
        stage=stage,
        offload=draw(_mostly(*OFFLOADS[stage], "none")),
        precision=draw(_mostly("fp32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64")),
        recompute=draw(_mostly("none", "none", "blocks", "offload")),
        classes=tuple(draw(st.lists(st.sampled_from(names), max_size=4, unique=True))) if by_class else (),
        max_bytes=0 if by_class else draw(st.sampled_from([0, 1, 300, 1000])),
        prefetch_bytes=draw(st.sampled_from([10**6, 0, 1, 500])),
        keep_gathered_bytes=draw(st.sampled_from([0, 0, 700, 10**6])) if stage == 3 else 0,
        reduce_bucket_bytes=draw(st.sampled_from([10**6, 500, 100])),
        dynamic_graph=draw(_rarely()) if stage == 3 else False,
        ranks_per_node=draw(_rarely()) * (world // 2),
        plain=draw(st.booleans()),
        lag=draw(_rarely(4)) * 4,
        skips=draw(_rarely(3)),
    )


@st.composite
def programs(draw: DrawFn) -> p.Program:
    world = draw(st.sampled_from([2, 2, 2, 1, 3, 4]))
    model = draw(MODELS)
    settings = draw(_settings(model, world))
    program = p.Program(
        model=model,
        actions=draw(ACTIONS),
        settings=settings,
        world=world,
        optimizer=draw(_mostly(*OPTIMIZERS)),
        left_out=draw(st.sampled_from([0, 0, 1, 3])),
        follows=draw(st.sampled_from(["lerp", "copy", "data", "ema", "foreach", "load"])),
        every=draw(st.integers(1, 3)),
        syncs=draw(st.booleans()),
        looks=draw(st.booleans()),
    )
    return _comparable(program)


# What a forward changes beside its result; a recomputation changes it again, with torch's own checkpoints too.
CHANGES_BUFFERS = {"Image", "Norms", "Statistics", "Derived"}


def _comparable(program: p.Program) -> p.Program:
    """Without what a plain twin does otherwise, and rightly.

    Where one rank raises alone, the others are to notice: gloo's reduce_scatter waits for longer than it is told to.
    Where ranks take different paths, a backward that is only noticed is noticed by a gradient, which a rank may not
    get; an exception has to be one on all ranks; and a rank that needs a gather is heard by the others up to the end of
    their backward, so one follows each forward. What is refused must be so on all ranks: reads outside of a step, and
    what torch refuses, which a plain twin can tell.
    """
    nodes = list(program.nodes())
    kinds = {node.kind for node in nodes}
    settings, actions = program.settings, program.actions
    # A recomputation takes the new values, torch's own checkpoints too.
    if kinds & CHANGES_BUFFERS or _writes_before_a_backward(actions):
        settings = replace(settings, recompute="none")
    # Called outside of a step before any unit, a part computes with masters, and in the backward again in few bits.
    if settings.precision in AUTOCAST and "Checkpointed" in kinds:
        actions = tuple(replace(a, scoped=True) if isinstance(a, p.Forward) else a for a in actions)
    if program.raises_alone or program.ranks_differ:
        program = replace(program, model=replace(program.model, body=_unwatched(program.model.body)))
        classes = tuple("Line" if name == "Clamped" else name for name in settings.classes)
        settings = replace(settings, classes=classes)
    if program.ranks_differ:
        precision = settings.precision if settings.precision == "fp64" else "fp32"
        recompute = "none" if "ChangesItsInput" in kinds else settings.recompute
        # A unit that is refused in chunks would be so on the ranks that call it only.
        settings = replace(settings, plain=False, precision=precision, recompute=recompute)
        actions = _for_ranks_that_differ(actions)
    return replace(program, settings=settings, actions=actions)


def _unwatched(nodes: tuple[p.Node, ...]) -> tuple[p.Node, ...]:
    """Without what may be refused on some ranks only: hooks on gradients, and writes (at the end of the backward),
    also those of an embedding with ``max_norm``."""
    return tuple(
        replace(
            node,
            kind="Line" if node.kind == "Clamped" else node.kind,
            n=0 if node.kind in ("Watched", "Positions") else node.n,
            children=_unwatched(node.children),
        )
        for node in nodes
    )


def _writes_before_a_backward(actions: tuple[p.Action, ...]) -> bool:
    """Return whether parameters are written to between a forward and its backward."""
    waits = False
    for action in actions:
        if isinstance(action, p.Write | p.Use) and waits:
            return True
        waits = isinstance(action, p.Forward) or (waits and not isinstance(action, p.Backward))
    return False


def _for_ranks_that_differ(actions: tuple[p.Action, ...]) -> tuple[p.Action, ...]:
    kept: list[p.Action] = []
    for action in actions:
        if isinstance(action, p.Scope):
            kept.append(p.Scope(actions=_for_ranks_that_differ(action.actions)))
        elif isinstance(action, p.Forward):
            kept += [replace(action, dropped=False, scoped=True), p.Backward()]
        elif isinstance(action, p.Evaluate):
            kept.append(replace(action, scoped=True))
        elif not isinstance(action, p.Raise):
            kept.append(action)
    return tuple(kept)
