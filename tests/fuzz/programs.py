"""What a program is: a model, settings and actions, as plain data.

Whatever differs from its default is printed, and nothing else: :func:`script` makes a file that runs on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINE = 116


class Data:
    """Each kind is a dataclass that does not change."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class Node(Data):
    """A part of a model, of a kind of models.py; ``n`` chooses among its variants; ``frozen``: without gradients;
    ``zeroed``: the weight of its last linear layer starts as zeros."""

    kind: str
    children: tuple[Node, ...] = ()
    n: int = 0
    frozen: bool = False
    zeroed: bool = False


class Model(Data):
    """
    Attributes:
        tokens: the input is tokens, which an embedding turns into vectors; else it is vectors.
        head: "none", "linear", or "tied": the weight of the embedding is used again.
        output: the container that the model returns its result in.
        input_grad: the input requires a gradient (where it is not tokens).
        teacher: "none", or a part like the first one, that follows it: "frozen", "no_grad" (its parameters require
            gradients that they do not get) or "trained".
    """

    body: tuple[Node, ...]
    tokens: bool = False
    head: str = "none"
    output: str = "tensor"
    input_grad: bool = False
    teacher: str = "none"
    seed: int = 0


class Settings(Data):
    """Arguments of ``shard``, in a form that can be left out.

    Attributes:
        classes: class names of units; without them units are found by themselves.
        ranks_per_node: more than 0: nodes are made up, and shards stay within them.
        plain: call ``loss.backward()`` and let the engine notice, instead of telling it.
        lag: milliseconds by which ranks are late, each at other places.
        skips: steps whose gradients are not finite are skipped.
    """

    stage: int = 3
    offload: str = "none"
    precision: str = "fp32"
    recompute: str = "none"
    classes: tuple[str, ...] = ()
    max_bytes: int = 0
    prefetch_bytes: int = 10**6
    keep_gathered_bytes: int = 0
    reduce_bucket_bytes: int = 10**6
    dynamic_graph: bool = False
    ranks_per_node: int = 0
    plain: bool = False
    lag: int = 0
    skips: bool = False


# -- actions ----------------------------------------------------------------------------------------------------------


class Action(Data):
    """Something that a program does."""


class Forward(Action):
    """Compute a loss and keep it for a backward.

    Attributes:
        part: call this one of the body for itself, not the whole model.
        scoped: inside a step scope.
        penalty: the squares of all weights are a part of the loss, computed beside the model.
        slope: so are the gradients of the loss for the input (with ``create_graph``).
        dropped: throw the loss away.
    """

    part: int | None = None
    scoped: bool = False
    penalty: bool = False
    slope: bool = False
    dropped: bool = False


class Backward(Action):
    """Of the losses that are kept.

    Attributes:
        no_sync: gradients that rest replicated are not reduced yet.
        separately: one backward for each loss, instead of one for their sum.
        twice: walk the graph twice.
    """

    no_sync: bool = False
    separately: bool = False
    twice: bool = False


class Step(Action):
    """
    Attributes:
        clip: the norm to clip to before; 0: do not.
        zero: what becomes of gradients afterwards: "none", "zeros" or "keep".
        late: graphs of before the step get their backward after it, which torch refuses.
        factor: multiply the gradients by it before clipping, as for a mean over tokens; 0: do not.
        bad: one rank's loss is NaN, if the settings skip such steps.
    """

    clip: float = 0.0
    zero: str = "none"
    late: bool = False
    factor: float = 0.0
    bad: bool = False


class StepWithClosure(Action):
    """Forward and backward inside of ``optimizer.step``; ``writes``: to parameters, before the forward."""

    writes: bool = False


class Evaluate(Action):
    """``mode``: "no_grad" or "inference". ``eval_mode``: with ``module.eval()``."""

    part: int | None = None
    mode: str = "no_grad"
    eval_mode: bool = True
    scoped: bool = False


class Gather(Action):
    """Look at whole parameters (of one ``part`` of the body), or change them; ``raises``: leave by an exception.

    ``write``: "nothing", "copy" (in place), "data" (assigned), "one rank" (whose values count) or "gradients".
    """

    write: str = "nothing"
    part: int | None = None
    raises: bool = False


class Write(Action):
    """Write to parameters inside of a step scope: "in place", "data" or "assign"; "outside": assign outside of one."""

    how: str = "in place"


class Use(Action):
    """Use parameters between steps, without gather: "read", "in place", "data", "assign", "load", "copy" or "keep"."""

    how: str = "read"


class Save(Action):
    """Keep the state dicts of model and optimizer."""


class Load(Action):
    """Load what the last Save kept."""


class Freeze(Action):
    """Parameters of one part of the body do not require gradients from here on, or do (``thaw``)."""

    part: int = 0
    thaw: bool = False


class AddGroup(Action):
    """The optimizer gets the parameters that it was made without."""

    rate: float = 0.01


class ChangeRate(Action):
    """``by_rank``: ranks above 0 keep theirs, and a backward follows, which tells."""

    factor: float = 0.5
    by_rank: bool = False


class SyncBuffers(Action):
    """Rank 0's buffers for all."""


class Raise(Action):
    """An exception in a "forward" or "backward" of a part of the body. ``alone``: the last rank's, which ends the
    program."""

    where: str = "forward"
    part: int = 0
    alone: bool = False


class Reshard(Action):
    """Release the module, look at it, and shard it again. Its ``optimizer`` is the "same" object, or another one, into
    which the state is "loaded", or a "new" one."""

    stage: int = 3
    offload: str = "none"
    optimizer: str = "loaded"


class Renew(Action):
    """As at the begin of a fit: the optimizer is the "same" object, a "new" one, one of an "other" class, or the "old"
    one of before that."""

    how: str = "same"


class Scope(Action):
    """Actions inside of one step scope, as in manual optimization."""

    actions: tuple[Action, ...] = ()


class Program(Data):
    """
    Attributes:
        optimizer: a name of ``sides.OPTIMIZERS``.
        left_out: how many parameters the optimizer does not have before AddGroup.
        follows: how the teacher is written to: "lerp", "copy", "data", "ema", "foreach" or "load" (between steps).
        every: after so many steps.
        syncs: all compute with rank 0's buffers, from before every step on, as in a Trainer.
        looks: compare gradients, parameters and state at every step; else at the end only, because looking settles
            what is under way.
    """

    model: Model
    actions: tuple[Action, ...]
    settings: Settings = Settings()
    world: int = 2
    optimizer: str = "sgd"
    left_out: int = 0
    follows: str = "lerp"
    every: int = 1
    syncs: bool = False
    looks: bool = True

    def everything(self) -> list[Action]:
        """All actions, those inside of others too."""
        return [inner for action in self.actions for inner in (action, *getattr(action, "actions", ()))]

    def nodes(self) -> Iterator[Node]:
        stack = list(self.model.body)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def has(self, kind: str) -> bool:
        return any(node.kind == kind for node in self.nodes())

    @property
    def ranks_differ(self) -> bool:
        """They take different paths through the model."""
        return self.has("ByRank")

    @property
    def raises_alone(self) -> bool:
        return any(isinstance(action, Raise) and action.alone for action in self.everything())

    @property
    def torch_tells_of_changes(self) -> bool:
        """A backward after a step is refused by torch, on all ranks; a recomputation would see the new weights only."""
        return self.settings.recompute == "none" and not self.ranks_differ


# -- printing ---------------------------------------------------------------------------------------------------------


def source(value: Any, indent: int = 0, beside: int = 0) -> str:
    """A Python expression for a program or a part of one.

    Args:
        indent: of the line that it begins on.
        beside: characters that stand on that line too.
    """
    if dataclasses.is_dataclass(value):
        shown = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        parts = [(f"{f.name}=", getattr(value, f.name)) for f in shown]
        opening, closing = f"{type(value).__name__}(", ")"
    elif isinstance(value, tuple):
        parts = [("", item) for item in value]
        opening, closing = "(", ",)" if len(value) == 1 else ")"
    else:
        return repr(value)
    flat = opening + ", ".join(name + source(item) for name, item in parts) + closing
    if len(flat) + indent + beside <= LINE or not parts:
        return flat
    inner = " " * (indent + 4)
    lines = [f"{inner}{name}{source(item, indent + 4, len(name) + 1)},\n" for name, item in parts]
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing[-1]}"


def script(program: Program, message: str, earlier: tuple[Program, ...] = ()) -> str:
    """A file that runs ``program``, after ``earlier`` ones, and says what comes of it."""
    named = {f"earlier_{i}": other for i, other in enumerate(earlier)} | {"program": program}
    comment = "\n".join(f"# {line}".rstrip() for line in message.splitlines())
    return (
        f"{comment}\n\nimport sys\n\nsys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n\n"
        "from tests.fuzz.programs import *  # noqa: E402, F403\n"
        "from tests.fuzz.run import main  # noqa: E402\n\n"
        + "".join(f"{name} = {source(value)}\n\n" for name, value in named.items())
        + f'if __name__ == "__main__":\n    main({", ".join(named)})\n'
    )
