"""Toy modules of the tests, by feature.

Most need no class of their own: :class:`Does` is a block whose forward is a function, :class:`Chain` a row of blocks.
Sizes are odd, so that parameters need gaps behind them and shards are cut inside of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11
TOKENS = 7
WIDTH = 19


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A model of language."""

    def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frozen(*names: str) -> Model:
    """A model whose submodules of these names are frozen."""
    module = Model()
    for name in names:
        module.get_submodule(name).requires_grad_(False)
    return module


class Odd(Model):
    """With a frozen unit, a parameter that stays whole, tied weights, and a buffer that counts forwards."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth=depth)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(tokens) * self.scale


class Does(nn.Module):
    """A block that holds ``parts`` (modules, parameters, anything else) and whose forward is ``act(self, ...)``."""

    def __init__(self, act: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.act = act
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, *args, **kwargs)


def linear(width: int = WIDTH, out: int | None = None, **settings: Any) -> nn.Linear:
    return nn.Linear(width, out or width, **settings)


class Chain(nn.Module):
    """A layer and blocks in a row, each called by ``call(block, x)``, in the order of ``path``."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Block,
        depth: int = 3,
        *,
        call: Callable[[nn.Module, Any], Any] | None = None,
        path: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.first = linear()
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.call = call or (lambda block, x: block(x))
        self.path = range(depth) if path is None else path

    def forward(self, x: Tensor, path: Sequence[int] | None = None) -> Tensor:
        x = self.first(x)
        for i in self.path if path is None else path:
            x = self.call(self.blocks[i], x)
        return x


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """For ``call``: blocks under activation checkpointing of torch's."""
    return functools.partial(checkpoint, use_reentrant=reentrant)


def paths() -> nn.Module:
    """Ranks that take other paths, and come to a unit several times."""

    def act(m: Any, x: Tensor, path: tuple[int, ...]) -> Tensor:
        for index in path:
            x = m.blocks[index](x).tanh()
        return x

    return Does(act, blocks=nn.ModuleList(linear(6) for _ in range(4)))


class Doubles(TorchFunctionMode):
    """A mode under which ``torch.tanh`` is another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result.sigmoid() if func is torch.tanh else result


class Clamped(nn.Module):
    """Keeps its weights small whenever it is called."""

    def __init__(self, how: str, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.how = linear(width), how

    def forward(self, x: Tensor) -> Tensor:
        write(self.linear.weight, lambda weight: weight.clamp_(-0.15, 0.15), self.how)
        return x + self.linear(x)


def write(param: Tensor, change: Callable[[Tensor], Any], how: str) -> None:
    """Let ``change`` write to ``param``: "in place", through its "data", or to a copy that is "assigned"."""
    if how == "in place":
        with torch.no_grad():
            change(param)
    elif how == "data":
        change(param.data)
    elif how == "assigned":
        values = param.detach().clone()
        change(values)
        param.data = values


class Adapted(nn.Module):
    """A frozen layer with a small trainable detour."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base, self.norm = linear(width).requires_grad_(False), nn.LayerNorm(width).requires_grad_(False)
        self.down, self.up = linear(width, rank, bias=False), linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(self.norm(x)) + self.up(self.down(x))) + x


class Dropping(Does):
    def __init__(self, width: int = 8) -> None:
        super().__init__(lambda m, x: x + nn.functional.dropout(m.inner(x), 0.5, m.training), inner=linear(width))


class Layers(nn.Module):
    """Blocks behind a layer, and a loss."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.enter, self.blocks = linear(width), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Down(nn.Sequential):
    def __init__(self, into: int, out: int) -> None:
        super().__init__(nn.Conv2d(into, out, 3, stride=2, padding=1), nn.GroupNorm(4, out), nn.ReLU())


class Up(nn.Module):
    def __init__(self, into: int, skip: int, out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(into, out, 2, stride=2)
        self.mix = nn.Sequential(nn.Conv2d(out + skip, out, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([self.grow(x), skip], dim=1))


class UNet(nn.Module):
    """4.6 MB, in modules of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.down1, self.down2, self.down3 = Down(32, 64), Down(64, 128), Down(128, 192)
        self.middle = nn.Sequential(nn.Conv2d(192, 192, 3, padding=1), nn.ReLU())
        self.up3, self.up2, self.up1 = Up(192, 128, 128), Up(128, 64, 64), Up(64, 32, 32)
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).relu()
        b = self.down1(a)
        c = self.down2(b)
        d = self.middle(self.down3(c))
        return self.last(self.up1(self.up2(self.up3(d, c), b), a))


class Recurrent(nn.Module):
    """4.3 MB: two GRUs, whose layers are no modules, and a cell that is called once for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(64, 160, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(160, 160)
        self.decoder = nn.GRU(160, 160, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(160, 512), nn.Tanh(), nn.Linear(512, 300))

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.encoder(x)
        state, seen = last[-1], []
        for place in states.unbind(1):
            state = self.cell(place, state)
            seen.append(state)
        return self.head(self.decoder(torch.stack(seen, dim=1))[0])


class Shapes(nn.Module):
    """0-d, one element, empty, odd, non-contiguous: every parameter takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.ones(0, 5))
        self.odd = nn.Parameter(torch.randn(3, 1, 7))
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.turned * self.scale + self.one + self.empty.sum()
        return torch.cat([x + y.sum(1, keepdim=True) + self.odd.sum(), y], 1)[:, :WIDTH]


def of_transformers(kind: str, seed: int = 0, **more: Any) -> nn.Module:
    """A small model of transformers with random values."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 32}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **more})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    make = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    made: nn.Module = make.from_config(config)
    return made
