"""Real modules, built from the data of a program.

Every part maps vectors [ROWS, TOKENS, WIDTH] to vectors of that shape. It gets the number of the forward too, which
some parts choose their path by: as an argument, because a checkpoint calls them again later.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.fuzz.programs import Model, Node
from tests.models import Does

ROWS, TOKENS, WIDTH = 3, 5, 6
LATE = 2  # the number of the forward after which some writes begin
VOCABULARY = 7


def build(spec: Model, *, seed: int = 0, rank: int = 0) -> Tree:
    """The same module whenever ``seed`` is the same.

    Args:
        rank: some parts take other paths on other ranks.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm of before parametrizations
        torch.manual_seed(1000 * spec.seed + seed)
        return Tree(spec, rank)


class Part(nn.Module):
    """What all kinds have in common: ``fill`` makes what a part holds, ``n`` chooses among its variants."""

    def __init__(self, node: Node, rank: int) -> None:
        super().__init__()
        self.node, self.n, self.rank = node, node.n, rank
        if node.children:
            self.parts = nn.ModuleList(make(child, rank) for child in node.children)
        self.fill()
        if node.zeroed:
            linears = [m for m in self.modules() if isinstance(m, nn.Linear) and "weight" in m._parameters]
            for linear in linears[-1:]:
                nn.init.zeros_(linear.weight)
        if node.frozen:
            self.requires_grad_(False)

    def fill(self) -> None:
        """Make the modules and parameters of its own."""


class Mix(Part):
    """Has parts inside of it: calls those of ``path``, one after the other."""

    def path(self, number: int) -> Iterable[Any]:
        return self.parts

    def call(self, part: nn.Module, x: Tensor, number: int) -> Tensor:
        return part(x, number)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for part in self.path(number):
            x = self.call(part, x, number)
        return x


# -- without children -------------------------------------------------------------------------------------------------


def _recurrent(n: int) -> nn.Module:
    if n == 1:
        return nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
    return nn.LSTM(WIDTH, WIDTH + (n > 1), batch_first=True, **{"proj_size": WIDTH} if n else {"num_layers": 2})


def _by_token(m: Any, x: Tensor) -> Tensor:
    states = [torch.zeros_like(x[:, 0])]
    for token in x.unbind(1):
        states.append(m.cell(token, states[-1]))
    return torch.stack(states[1:], 1)


def _derived(n: int) -> nn.Module:
    hows = (parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm, _symmetric)
    return hows[n % 4](nn.Linear(WIDTH, WIDTH))


def _symmetric(linear: nn.Module) -> nn.Module:
    parametrize.register_parametrization(linear, "weight", Does(lambda m, x: x.triu() + x.triu(1).T))
    return linear


# What a part holds, and what it does. Some activations work in place; what is ``Derived`` has weights that are computed
# from others; with ``max_norm`` an embedding writes to its weight, on all ranks to all rows.
SIMPLE: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[Any, Tensor], Tensor]]] = {
    "Line": (lambda n: {"linear": nn.Linear(WIDTH, WIDTH, bias=n == 0)}, lambda m, x: m.linear(x)),
    "Feed": (
        lambda n: {
            "norm": nn.LayerNorm(WIDTH),
            "up": nn.Linear(WIDTH, 2 * WIDTH + 1),
            "down": nn.Linear(2 * WIDTH + 1, WIDTH),
            "act": nn.ReLU(inplace=True) if n else nn.GELU(),
        },
        lambda m, x: x + m.down(m.act(m.up(m.norm(x)))),
    ),
    "Row": (
        lambda n: {
            "row": nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.ReLU(inplace=True),
                nn.Dropout(0.3) if n else nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
        },
        lambda m, x: m.row(x),
    ),
    "Convolution": (
        lambda n: {"conv": (nn.ConvTranspose1d if n else nn.Conv1d)(WIDTH, WIDTH, 3, padding=1)},
        lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    ),
    "Image": (
        lambda n: {
            "first": nn.Conv2d(1, 3, 3, padding=1, bias=False),
            "last": nn.Conv2d(3, 1, 1),
            "norm": nn.BatchNorm2d(3),
            "act": nn.ReLU(inplace=True),
        },
        lambda m, x: x + m.last(m.act(m.norm(m.first(x.unsqueeze(1))))).squeeze(1),
    ),
    "Attention": (
        lambda n: {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
        lambda m, x: x + m.attention(x, x, x, need_weights=m.n > 0)[0],
    ),
    "Layer": (
        lambda n: {
            "layer": nn.TransformerEncoderLayer(WIDTH, 2, 9, 0.2 if n > 1 else 0.0, batch_first=True, norm_first=n == 1)
        },
        lambda m, x: m.layer(x),
    ),
    "Recurrent": (lambda n: {"cells": _recurrent(n)}, lambda m, x: m.cells(x)[0]),
    "Cell": (lambda n: {"cell": nn.GRUCell(WIDTH, WIDTH)}, _by_token),
    "Positions": (
        lambda n: {"table": nn.Embedding(TOKENS, WIDTH, max_norm=0.5 if n else None)},
        lambda m, x: x + m.table(torch.arange(TOKENS)),
    ),
    "Derived": (lambda n: {"linear": _derived(n)}, lambda m, x: m.linear(x)),
    "Adapted": (
        lambda n: {
            "base": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "down": nn.Linear(WIDTH, 2, bias=False),
            "up": nn.Linear(2, WIDTH, bias=False),
        },
        lambda m, x: m.base(x) + m.up(m.down(x)),
    ),
    "Pairs": (lambda n: {"bilinear": nn.Bilinear(WIDTH, WIDTH, WIDTH)}, lambda m, x: x + m.bilinear(x, torch.tanh(x))),
    "Norms": (
        lambda n: {
            "norm": (nn.BatchNorm1d(WIDTH), nn.GroupNorm(2, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))[n % 3],
            "scale": nn.Parameter(torch.ones(WIDTH)),
        },
        lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2) * m.scale,
    ),
}


class Simple(Part):
    """A kind of ``SIMPLE``."""

    def fill(self) -> None:
        held, self.act_on = SIMPLE[type(self).__name__]
        for name, module in held(self.n).items():
            setattr(self, name, module)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.act_on(self, x)


class Consults(Part):
    """Gives a module inside of it a table that has as many rows as the batch."""

    def fill(self) -> None:
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH) / 8)
        self.inner = Does(_consulted, inner=nn.Linear(WIDTH, WIDTH), n=self.n)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.inner(x, self.table.to(x.dtype) * 1)


def _consulted(m: Any, x: Tensor, table: Tensor) -> Tensor:
    if m.n == 0:
        return m.inner(x) + (x @ table.T).softmax(-1) @ table
    if m.n == 1:
        return m.inner(x) + table.mean(0)
    return x + m.inner(x) * (table[0] if m.n == 2 else table.square().sum())


class Odd(Part):
    """Parameters of sizes that are rare: none, one and no dimension; integers; one that is never used."""

    def fill(self) -> None:
        # Not the empty one first: an optimizer that has no other in a bucket has no state for it.
        self.scalar, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.one, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3, 5))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.complex = nn.Parameter(torch.ones(WIDTH) + 0.5j) if self.n else None

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = x[..., self.order] * self.scalar * self.one + self.nothing.sum()
        if self.complex is not None:
            x = x * (self.complex * self.complex.conj()).real.to(x.dtype)
        return x


class KeepsALoss(Part):
    """As mixtures of experts do: a loss of its own stays on the module. It is made last, so autograd starts there."""

    def fill(self) -> None:
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, number: int) -> Tensor:
        y = x + torch.tanh(self.up(x)) * torch.softmax(self.gate(x), -1)
        weights = torch.softmax(self.gate(y if self.n == 0 else y.detach()), -1)
        self.kept = (weights * weights.mean((0, 1))).sum()
        return y


class Clamped(Part):
    """Keeps its weights small whenever it is called, or from a later call on."""

    def fill(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int) -> Tensor:
        weight = self.linear.weight
        if self.n == 0:
            with torch.no_grad():
                weight.clamp_(-0.3, 0.3)
        elif self.n == 1 or (self.n == 3 and number > LATE):
            weight.data.clamp_(-0.3, 0.3)
        elif self.n == 2:
            # Not an inference tensor: torch refuses to thaw a parameter that holds one, and the engine copies it.
            with torch.inference_mode(False):
                weight.data = weight.detach().clamp(-0.3, 0.3)
        return self.linear(x)


class Statistics(Part):
    """Buffers of its own: written to in place, replaced, or written through ``.data``, from the begin or later."""

    def fill(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0), persistent=self.n == 0)

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.linear(x)
        if self.training:
            mean = x.detach().mean((0, 1)).to(self.mean.dtype)
            with torch.no_grad():
                if self.n == 0:
                    self.mean.lerp_(mean, 0.1)
                elif self.n == 1:
                    self.mean = 0.9 * self.mean + 0.1 * mean
                elif self.n == 2 or number > LATE:
                    self.mean.data.lerp_(mean, 0.1)
            if self.n < 2:
                self.count += 1
        return x - self.mean.clone().to(x.dtype)


class Marked(nn.Parameter):
    """A class of a user's own."""


class Watched(Part):
    """Parameters with a class, an attribute and a hook that changes accumulated gradients, of a user's own."""

    def fill(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = Marked(self.linear.weight.detach())
        self.linear.weight.no_decay = True
        if self.n:
            halves = Does(lambda m, param: None if param.grad is None else param.grad.mul_(0.5))
            self.linear.weight.register_post_accumulate_grad_hook(halves.forward)

    def forward(self, x: Tensor, number: int) -> Tensor:
        assert self.linear.weight.no_decay
        return self.linear(x)


# -- with children ----------------------------------------------------------------------------------------------------


def _through_tanh(m: Any, part: nn.Module, x: Tensor, number: int) -> Tensor:
    return torch.tanh(part(x, number))


def _changing_output(m: Any, part: nn.Module, x: Tensor, number: int) -> Tensor:
    y = part(x, number)
    y = y + 0 if y is x else y
    if m.n == 0:
        y += x
    elif m.n == 1:
        y = F.relu_(y)
    else:
        y[:, 0] = 1.0
    return y


def _backwards(m: Any, number: int) -> list[nn.Module]:
    count = len(m.parts)
    return [m.parts[-1 - (i + m.n * number) % count] for i in range(count)]


def _mix(name: str, **methods: Callable[..., Any]) -> type[Mix]:
    return type(name, (Mix,), methods)


# Other orders than that of the registration, another one at the next forward; parts that are called several times, left
# out in some forwards or on some ranks, or never used; outputs that are changed.
WALKS = [
    _mix("Chain"),
    _mix("Backwards", path=_backwards),
    _mix("Repeats", path=lambda m, number: list(m.parts) * (2 + m.n), call=_through_tanh),
    _mix("AddsInPlace", call=_changing_output),
    _mix("Sometimes", path=lambda m, number: [p for i, p in enumerate(m.parts) if (number + i + m.n) % 2]),
    _mix("ByRank", path=lambda m, number: [p for i, p in enumerate(m.parts) if (number + i + m.rank + m.n) % 2]),
    _mix("Never", path=lambda m, number: ()),
]


class Found(NamedTuple):
    value: Tensor
    note: str = "note"


@dataclasses.dataclass
class Record:
    value: Any
    more: Any = None


class Ordered(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of Hugging Face's models: by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def into(container: str, x: Tensor) -> Any:
    """``x`` in a container."""
    return {
        "tensor": x,
        "tuple": (x, None),
        "list": [x, 3],
        "dict": {"value": x, "other": x.detach()},
        "dataclass": Record(x),
        "named": Found(x),
        "ordered": Ordered(value=x),
        "nested": {"a": [Record({"b": (Found(x),)})], "c": Record(None)},
    }[container]


CONTAINERS = ("tensor", "tuple", "list", "dict", "dataclass", "named", "ordered", "nested")


def out_of(output: Any) -> Tensor:
    """What :func:`into` put there."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict):
            output = output["value"] if "value" in output else output.get("a", output.get("b"))
        elif isinstance(output, Record | Found):
            output = output.value
        else:
            output = output[0]
    return output


class Packs(Mix):
    """Its parts take their inputs from containers, and put their results in some."""

    def fill(self) -> None:
        kinds = [CONTAINERS[(self.n + i) % len(CONTAINERS)] for i in range(len(self.parts))]
        parts = zip(self.parts, kinds, strict=True)
        self.parts = nn.ModuleList(Does(_packs, inner=part, container=kind) for part, kind in parts)

    def call(self, part: Any, x: Tensor, number: int) -> Tensor:
        return out_of(part(given=into(part.container, x), number=number))


def _packs(m: Any, *, given: Any, number: int) -> Any:
    return into(m.container, m.inner(out_of(given), number))


class Collects(Mix):
    """Its parts return nothing: their results go into a list that they are given."""

    def fill(self) -> None:
        self.parts = nn.ModuleList(Does(_appends, inner=part) for part in self.parts)

    def forward(self, x: Tensor, number: int) -> Tensor:
        found = [x]
        for part in self.parts:
            part(found, number)
        return found[-1] + found[0]


def _appends(m: Any, found: list[Tensor], number: int) -> None:
    found.append(m.inner(found[-1], number))


class Borrows(Mix):
    """Uses the weight of a module without calling it."""

    def fill(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)
        if self.n:
            self.lent = make(Node(kind="Line"), self.rank)

    def forward(self, x: Tensor, number: int) -> Tensor:
        linear = self.lent.linear if self.n else self.linear
        if self.n < 2:
            x = F.linear(x, linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype))
        x = super().forward(x, number)
        return F.linear(x, linear.weight.to(x.dtype)) if self.n else x


class Checkpointed(Mix):
    def call(self, part: nn.Module, x: Tensor, number: int) -> Tensor:
        return checkpoint(part, x, number, use_reentrant=self.n > 0)


class Teacher(Mix):
    """A part without gradients, whose result is used; with one that has them beside it."""

    def fill(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int) -> Tensor:
        with torch.no_grad():
            y = super().forward(x, number)
        return self.linear(x) * y if self.n == 0 else self.parts[0](x, number) + y


class Cut(Mix):
    """Its parts get no gradient to pass on, or none at all."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        y = super().forward(x.detach() if self.n == 0 else x, number)
        return x + (y.detach() if self.n == 1 else y)


class Shared(Mix):
    """One module under two names, or weights that two modules share."""

    def fill(self) -> None:
        self.again = self.parts[0] if self.n == 0 else make(self.node.children[0], self.rank)
        for module, other in zip(self.parts[0].modules(), self.again.modules(), strict=True):
            for name, param in module.named_parameters(recurse=False):
                if not isinstance(module, nn.utils.parametrize.ParametrizationList):
                    setattr(other, name, param)

    call = _through_tanh

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.again(super().forward(x, number), number)


class Hooked(Mix):
    """Hooks of the user's own, on its parts, on modules inside of them, and on what they return."""

    def fill(self) -> None:
        for part in self.parts:
            if self.n == 3:
                [*part.modules()][-1].register_forward_hook(_louder)
            elif self.n == 0:
                part.register_forward_hook(_louder)
                part.register_forward_pre_hook(lambda m, args: (args[0] + 1, *args[1:]))
            elif self.n == 1:
                part.register_forward_hook(_scales_gradients)
            else:
                part.register_full_backward_hook(lambda m, given, got: None)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return super().forward(x, number) + 0


def _louder(module: nn.Module, args: Any, output: Any) -> Tensor | None:
    return output * 1.5 if isinstance(output, Tensor) else None


def has_history(tensor: Tensor) -> bool:
    """Whether a hook can be put on it. torch 2.13 crashes if a view that was changed in place was not asked before."""
    return tensor.grad_fn is not None


def _scales_gradients(module: nn.Module, args: Any, output: Tensor) -> None:
    if has_history(output):
        output.register_hook(lambda grad: grad * 0.5)


class Stores(Mix):
    """Hooks of the user's own on the tensors that its parts save for the backward."""

    def call(self, part: nn.Module, x: Tensor, number: int) -> Tensor:
        with save_on_cpu() if self.n == 1 else saved_tensors_hooks(self._pack, lambda t: t):
            return part(x, number)

    def _pack(self, t: Tensor) -> Tensor:
        return t if self.n == 0 or (self.n == 2 and isinstance(t, nn.Parameter)) else t.clone()


class ChangesItsInput(Mix):
    """Gives each of its parts a tensor that the part changes in place."""

    def fill(self) -> None:
        self.parts = nn.ModuleList(Does(_changes, inner=part) for part in self.parts)

    def call(self, part: nn.Module, x: Tensor, number: int) -> Tensor:
        return part(x + 1 if self.n == 0 or x.is_leaf else x, number)


def _changes(m: Any, x: Tensor, number: int) -> Tensor:
    x *= 0.5
    return m.inner(x, number)


class Listed(Mix):
    """Parameters in lists and dicts, beside its parts."""

    def fill(self) -> None:
        self.few = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / WIDTH, "b": torch.randn(WIDTH)})

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = super().forward(x, number)
        return x @ self.named["a"].to(x.dtype) + sum(param.to(x.dtype) for param in (self.named["b"], *self.few))


MIXES = {kind.__name__: kind for kind in Mix.__subclasses__()}
LEAVES: dict[str, type[Part]] = {name: type(name, (Simple,), {}) for name in SIMPLE}
LEAVES |= {kind.__name__: kind for kind in Part.__subclasses__() if kind not in (Mix, Simple)}


def make(node: Node, rank: int) -> Part:
    return {**LEAVES, **MIXES}[node.kind](node, rank)


# -- the whole --------------------------------------------------------------------------------------------------------


class Tree(nn.Module):
    """The model of a program."""

    def __init__(self, spec: Model, rank: int) -> None:
        super().__init__()
        self.output = spec.output
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if spec.tokens else None
        self.body = nn.ModuleList(make(node, rank) for node in spec.body)
        self.trained = spec.teacher == "trained"
        self.teacher = None if spec.teacher == "none" else make(spec.body[0], rank)
        if self.teacher is not None and spec.teacher == "frozen":
            self.teacher.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY) if spec.head != "none" else None
        if spec.head == "tied" and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, batch: Tensor, number: int) -> Any:
        x = batch if self.embed is None else self.embed(batch)
        taught: Any = 0
        if self.teacher is not None:
            with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
                taught = 0.1 * self.teacher(x + 0, number)
        for part in self.body:
            x = part(x, number)
        x = x + taught
        return into(self.output, x if self.head is None else self.head(x))

    def take_losses(self) -> list[Tensor]:
        """What parts have kept since the last call."""
        found = []
        for module in self.modules():
            if isinstance(module, KeepsALoss):
                found += [module.kept] if module.kept is not None else []
                module.kept = None
        return found


def batch(spec: Model, number: int, rank: int, dtype: torch.dtype, *, vectors: bool = False) -> Tensor:
    """Another one for every rank and number. ``vectors``: for a part of the body, which takes no tokens."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    if spec.tokens and not vectors:
        return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator).to(dtype)
    return x.requires_grad_(spec.input_grad)


def class_names(spec: Model) -> list[str]:
    """Of all modules that may be units."""
    return list(dict.fromkeys(type(module).__name__ for module in build(spec).modules()))[1:]
