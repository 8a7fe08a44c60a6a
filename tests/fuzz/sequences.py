"""Random steps under ``zero.sequence_parallel``: what the check lets pass must train as one process does.

::

    python -m tests.fuzz.sequences --minutes 10            # with a new seed, which it prints
    python -m tests.fuzz.sequences --program 7:12          # one program again

A program adds what a chain of operations makes of the activations ``[batch, length, width]``, along any dimension, and
takes one or two losses. It ends in the gradients and losses of one process, or in a refusal. An operation along the
positions may be refused or not; a program without one must not be.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lightning_zero
from lightning_zero.settings import ConfigError
from tests import harness
from tests.trainer.test_long_sequences import LENGTH, Own, Texts, fit, one_process
from tests.trainer.toys import seeded

LIMIT_S = 120.0
TOLERANCE = 1e-4  # relative, of losses and of each gradient; fp32

# Each makes a tensor of the shape of its first argument, or one that broadcasts to it. ``d``: a dimension, 1 or 2.
Operation = Callable[[Tensor, int], Tensor]
ALONG: dict[str, Operation] = {
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "sum": lambda x, d: x.sum(d, keepdim=True) / x.shape[d],
    "var": lambda x, d: x.var(d, keepdim=True),
    "std": lambda x, d: x.std(d, keepdim=True),
    "norm": lambda x, d: x.norm(dim=d, keepdim=True),
    "amax": lambda x, d: x.amax(d, keepdim=True),
    "median": lambda x, d: x.median(d, keepdim=True).values,
    "logsumexp": lambda x, d: x.logsumexp(d, keepdim=True),
    "softmax": lambda x, d: x.softmax(d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "cumsum": lambda x, d: x.cumsum(d) / x.shape[d],
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "sort": lambda x, d: x.sort(d).values,
    "diff": lambda x, d: F.pad(x.diff(dim=d), (0, int(d == 2), 0, int(d == 1))),
    "first": lambda x, d: x.narrow(d, 0, 1),
    "last": lambda x, d: x.narrow(d, x.shape[d] - 1, 1),
    "half": lambda x, d: x.narrow(d, 0, x.shape[d] // 2).mean(d, keepdim=True),
    "fft": lambda x, d: torch.fft.rfft(x, dim=d).abs().mean(d, keepdim=True),
    "linspace": lambda x, d: torch.linspace(0, 1, x.shape[d]).unflatten(0, (-1, 1) if d == 1 else (1, -1)) + 0 * x,
    "tril": lambda x, d: (
        torch.einsum("btc,ts->bsc" if d == 1 else "btc,cs->bts", x, torch.ones(x.shape[d], x.shape[d]).tril())
        / x.shape[d]
    ),
    "gram": lambda x, d: torch.einsum("btc,bsc,bsd->btd" if d == 1 else "btc,bte,btd->btd", x, x, x) / 16,
    "transposed": lambda x, d: x.transpose(1, 2).sum(3 - d).unsqueeze(d) / x.shape[d],
}
LOCAL: dict[str, Operation] = {
    "tanh": lambda x, d: x.tanh(),
    "gelu": lambda x, d: F.gelu(x),
    "square": lambda x, d: x * x,
    "dropout": lambda x, d: F.dropout(x, 0.0),
    "outer": lambda x, d: (x[..., None] @ x[..., None, :]).mean(-1),
    "attention": lambda x, d: (
        F.scaled_dot_product_attention(*[x.unflatten(2, (4, 4)).transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
    ),
}
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "smooth": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1),
    "nll": lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "tokens": lambda logits, labels: lightning_zero.mean_over_tokens(
        F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), where=labels != -100
    ),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "summed": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH,
    "by hand": lambda logits, labels: -logits.log_softmax(-1).gather(2, labels.clamp(0)[..., None]).mean(),
    "square of a mean": lambda logits, labels: logits.mean() ** 2,
    "worst": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").amax(1).mean(),
    "mse": lambda logits, labels: F.mse_loss(logits, torch.ones_like(logits)),
    "penalty": lambda logits, labels: logits.logsumexp(-1).square().mean(),
}


class Program(NamedTuple):
    """
    Attributes:
        chain: operations with their dimension, each applied to what the one before it has made.
        losses: the loss is their mean; of ``logged`` alone nothing goes backward.
        uneven: labels do not count at some positions, most of them of one part.
    """

    chain: tuple[tuple[str, int], ...]
    losses: tuple[str, ...]
    logged: tuple[str, ...]
    uneven: bool
    stage: int

    @property
    def is_honest(self) -> bool:
        """Each position is computed by itself, and losses are means over tokens."""
        return all(name in LOCAL or dim == 2 for name, dim in self.chain) and {*self.losses} <= {*MEANS}


def draw(chance: random.Random) -> Program:
    names = [*ALONG, *LOCAL, *LOCAL]
    chain = tuple((chance.choice(names), chance.choice((1, 2, 2))) for _ in range(chance.randint(0, 3)))
    losses = [*MEANS, *MEANS, *OTHERS]
    return Program(
        chain,
        tuple(chance.choice(losses) for _ in range(chance.choice((1, 1, 2)))),
        (chance.choice(losses),) if chance.random() < 0.4 else (),
        chance.random() < 0.4,
        chance.choice((0, 1, 2, 3, 3)),
    )


class Model(Own):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(lightning_zero.sequence_positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
            y = x
            for name, dim in self.program.chain:
                y = (y + 0 * x) if y.shape != x.shape else y
                y = (ALONG | LOCAL)[name](y, dim)
            x = x + 3 * (y / 3).tanh() if self.program.chain else x
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self(batch[0]), batch[1]
        losses = MEANS | OTHERS
        for name in self.program.logged:
            self.log(name, losses[name](logits.detach(), labels))
        return torch.stack([losses[name](logits, labels) for name in self.program.losses]).mean()


def run(program: Program) -> str:
    """On each of two ranks: ``equal``, ``refused`` or what went wrong."""
    data = Texts("pair", 1, ignored=program.uneven)
    plain = seeded(lambda: Model(program))
    plain.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    losses, gradients = one_process(plain, data, 1, lambda module, batch: module.training_step(batch, 0))
    module = seeded(lambda: Model(program))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = fit(module, data, Path(folder), 2, program.stage)
        except ConfigError as error:
            text = str(error)
            return "refused" if "sequence_parallel" in text and not program.is_honest else f"refused wrongly: {text}"
        except Exception:
            return f"raises: {traceback.format_exc()}"
        finally:
            dist.barrier()
    for expected, got in zip(losses[0], found.losses, strict=True):
        if not abs(got - expected) <= TOLERANCE * (1 + abs(expected)):
            return f"differs: loss {got} in the place of {expected}"
    scale = max(float(value.norm()) for value in gradients.values())
    for name, value in gradients.items():
        apart = float((found.gradients[name] - value).norm())
        if not apart <= TOLERANCE * (float(value.norm()) + scale):
            return f"differs: the gradient of {name}, {apart} of {float(value.norm())}"
    return "equal"


def main(name: str, about: str, draw: Callable[[random.Random], Any], run: Callable[[Any], str], ranks: int) -> int:
    """Draw programs and run each on ``ranks`` ranks, until the time is over."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}", description=about.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--program", metavar="SEED:NUMBER", help="this one alone")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**31)
    only = None
    if given.program:
        seed, only = map(int, given.program.split(":"))
    print(f"seed {seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    until, number, pool = time.monotonic() + 60 * given.minutes, only or 0, None
    while (time.monotonic() < until and only is None) or number == only:
        program = draw(random.Random(f"{seed} {number}"))
        pool = pool or harness.Pool(ranks)
        try:
            verdict = max(pool.run(pickle.dumps((run, (program,), {})), LIMIT_S), key=len)
        except Exception as error:
            verdict, pool = f"dies: {error}", pool.kill()  # type: ignore[func-returns-value]
        kind = verdict.partition(":")[0]
        counts[kind] += 1
        if kind not in ("equal", "refused") or only is not None:
            print(f"--program {seed}:{number}  {program}\n{verdict}\n", flush=True)
        if kind == "raises" and pool is not None:
            pool = pool.kill()  # type: ignore[func-returns-value]
        number += 1
    if pool is not None:
        pool.close()
    print(f"{sum(counts.values())} programs, seed {seed}: {dict(counts)}")
    return int(any(kind not in ("equal", "refused") for kind in counts))


if __name__ == "__main__":
    sys.exit(main("sequences", __doc__ or "", draw, run, 2))
