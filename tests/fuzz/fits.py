"""Random fits: hooks that use weights, and ranks with different numbers of batches, beside DDP.

::

    python -m tests.fuzz.fits --minutes 10            # with a new seed, which it prints
    python -m tests.fuzz.fits --program 7:12          # one program again

A program says what each hook does with weights and gradients, how many batches each rank has, and how the Trainer
counts them. It ends in the losses, metrics, weights and results of hooks of DDP, whose ranks have the batches that all
have; of stage 0 with ``zero.uneven=join``.
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
from unittest import mock

import torch.distributed as dist
from torch import nn

from lightning_zero.comm import one_sided
from tests import harness
from tests.trainer import test_between_steps as uses
from tests.trainer.test_uneven import loader
from tests.trainer.toys import record, seeded, strategy_of, trainer

LIMIT_S = 120.0
ROWS = ("zero3", "zero3_offload", "zero3 nvme", "zero3 optimizer_cpu", "zero2", "zero2_offload", "zero1", "zero0")
KEEPING = (uses.keeps, uses.keeps_states, uses.swaps_data, uses.everything_but_writes_alone)
ACTS = {act.__name__: act for act in (*uses.ACTS, uses.uses_units_together, *KEEPING)}
KEEP = [act.__name__ for act in KEEPING]
OF_A_BATCH = "on_validation_batch_end"


def _assigns(param: nn.Parameter) -> None:
    param.grad = param.grad * 0.5 + 0.001  # type: ignore[operator]


CHANGES: dict[str, Callable[[Any], object]] = {
    "rows": lambda param: param.grad.__setitem__(0, 0.0),
    "halves": lambda param: param.grad.mul_(0.5),
    "assigns": _assigns,
    "views": lambda param: param.grad.view(-1)[1:].add_(param.grad.mean()),
    "data": lambda param: setattr(param.grad, "data", param.grad.data - param.grad.data.mean()),
}
AT_ALL_TIMES = "rows", "halves"  # also in the middle of an accumulation


class Program(NamedTuple):
    row: str
    uses: tuple[tuple[str, str], ...]  # hooks, and acts
    batches: tuple[int, int]  # of training, on each rank
    checked: tuple[int, int]  # of validation
    listed: tuple[bool, bool]  # loaders of the two have lengths
    join: bool
    hides: bool  # each unit as soon as another is used
    changes: str | None  # of gradients
    patience_s: float  # of ranks for others that do not come to a use
    settings: dict[str, Any]  # of the Trainer


def draw(numbers: random.Random) -> Program:
    batches, checked = ((numbers.randint(1, 5), numbers.randint(1, 5)) for _ in range(2))
    if numbers.random() < 0.3:
        batches = (batches[0],) * 2
    listed = numbers.random() < 0.5, numbers.random() < 0.5
    # DDP does not know the last batch of an epoch that ends below a limit; where ranks differ, it is known.
    limits = [1.0, 1.0, 2, 4] if listed[0] or len(set(batches)) == 1 else [1.0, 1.0, min(batches)]
    row, join = numbers.choice(ROWS), numbers.random() < 0.2
    hooks = [hook for hook in uses.HOOKS if hook != OF_A_BATCH or checked[0] == checked[1]]
    pairs = {hook: numbers.choice(list(ACTS)) for hook in numbers.sample(hooks, numbers.randint(0, 4))}
    for hook, act in pairs.items():
        if hook in uses.IN_STEPS or (hook in uses.AFTERWARDS and act in KEEP):
            pairs[hook] = "reads"
    # Where parameters stay in their places, views that are not results of `.data` follow what is assigned to it. The
    # twin of `join` is stage 0.
    if ("zero3" not in row or join) and any(act in KEEP for act in pairs.values()):
        pairs = {hook: "swaps" if act in ("writes", "swaps_data") else act for hook, act in pairs.items()}
    return Program(
        row=row,
        uses=tuple(pairs.items()),
        batches=batches,
        checked=checked,
        listed=listed,
        join=join,
        hides=numbers.random() < 0.5,
        changes=numbers.choice([None, *CHANGES]),
        patience_s=numbers.choice([0.02, 0.5]),
        settings={
            "accumulate_grad_batches": numbers.choice([1, 1, 2, 3]),
            "limit_train_batches": numbers.choice(limits),
            "limit_val_batches": numbers.choice([1.0, 1.0, 1, 3]),
            "val_check_interval": numbers.choice([1.0, 1]),
            "max_epochs": numbers.choice([1, 2, 3]),
            "max_steps": numbers.choice([-1, -1, 3]),
        },
    )


class Fit(uses.Uses):
    def __init__(self, acts: dict[str, str], changes: str | None) -> None:
        super().__init__(None, tuple(acts))  # type: ignore[arg-type]
        self.changes = changes
        self.acts, self.views = acts, dict.fromkeys(KEEP)

    def use(self, hook: str) -> None:
        if hook == "on_before_optimizer_step" or (hook == "on_after_backward" and self.changes in AT_ALL_TIMES):
            for param in self.parameters() if self.changes is not None else ():
                if param.grad is not None:
                    CHANGES[self.changes](param)
        if (name := self.acts.get(hook)) is not None:
            self.kept = self.views.get(name)
            self.noted.append((hook, ACTS[name](self)))
            if name in self.views:
                self.views[name] = self.kept


def run(program: Program) -> str:
    """On each rank: what came of the program."""
    most = None if program.join else min(program.batches)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared)
        uneven: dict[str, Any] = {"uneven": "join"} if program.join else {}
        twin = strategy_of("zero0", **uneven) if program.join else "ddp"
        hides: dict[str, Any] = {"prefetch_bytes": 0} if program.hides and program.row.startswith("zero3") else {}
        ours = strategy_of(program.row, Path(shared[0]), **hides, **uneven)
        for strategy in (twin, ours):
            of, module = (
                trainer(strategy, shared[0], **program.settings),
                seeded(lambda: Fit(dict(program.uses), program.changes)),
            )
            train = loader(program.batches, most if strategy is twin else None, listed=program.listed[0])
            try:
                with mock.patch.multiple(one_sided, PATIENCE_S=program.patience_s, KNOWN_S=0.02, LISTEN_S=0.02):
                    of.fit(module, train, loader(program.checked, listed=program.listed[1]))
                found.append(record(of, module))
            except Exception:
                found.append(traceback.format_exc())
        dist.barrier()
    if isinstance(found[0], str) or isinstance(found[1], str):
        return f"raises: {found[1]}" if found[1] != found[0] else "equal"
    try:
        uses.assert_as(found[1], found[0], program.row)
    except AssertionError as error:
        return f"differs: {error}"
    return "equal"


def main() -> int:
    """Draw programs and run each on two ranks, until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fits", description=(__doc__ or "").split("\n\n")[0])
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
        pool = pool or harness.Pool(2)
        try:
            verdict = max(pool.run(pickle.dumps((run, (program,), {})), LIMIT_S), key=len)
        except Exception as error:
            verdict, pool = f"dies: {error}", pool.kill()  # type: ignore[func-returns-value]
        kind = verdict.partition(":")[0]
        counts[kind] += 1
        if kind != "equal" or only is not None:
            print(f"--program {seed}:{number}  {program}\n{verdict}\n", flush=True)
        if kind == "raises" and pool is not None:
            pool = pool.kill()  # type: ignore[func-returns-value]
        number += 1
    if pool is not None:
        pool.close()
    print(f"{sum(counts.values())} programs, seed {seed}: {dict(counts)}")
    return int(any(kind != "equal" for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
