"""Collectives that come late, at random, change nothing: races would show as other numbers."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.transports import Sent
from lightning_zero.engine import Engine
from tests.engine.support import Model, Sharded, Side, accumulate, check
from tests.harness import on_ranks

MAX_DELAY_S = 0.004


class LateWork:
    """A message that is seen to be complete only some time after it is."""

    def __init__(self, work: Any, delay: float) -> None:
        self._work = work
        self._from = time.monotonic() + delay

    def is_completed(self) -> bool:
        return time.monotonic() >= self._from and self._work.is_completed()

    def wait(self, *limit: Any) -> Any:
        time.sleep(max(0.0, self._from - time.monotonic()))
        return self._work.wait(*limit)


class LateTransport:
    """Issues messages after a pause and shows their end late, each rank by other lengths."""

    def __init__(self, inner: Any, chance: random.Random) -> None:
        self._inner, self._chance = inner, chance
        self.exchanges, self.waits_on_host = inner.exchanges, inner.waits_on_host

    def _pause(self) -> float:
        return self._chance.random() ** 4 * MAX_DELAY_S  # mostly short

    def gather(self, *args: Any) -> Sent:
        time.sleep(self._pause())
        return self._late(self._inner.gather(*args))

    def reduce(self, *args: Any, **kwargs: Any) -> Sent:
        time.sleep(self._pause())
        return self._late(self._inner.reduce(*args, **kwargs))

    def _late(self, sent: Sent) -> Sent:
        return Sent([LateWork(work, self._pause()) for work in sent.works], sent.finish)


def delay(engine: Engine, seed: int) -> None:
    chance = random.Random(100 * seed + dist.get_rank())
    engine.comm._transport = LateTransport(engine.comm._transport, chance)


@on_ranks(3, full=(2,))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_random_delays_change_nothing(stage: int, precision: str) -> None:
    config: dict[str, Any] = {"prefetch_bytes": 15_000, "reduce_bucket_bytes": 3000}

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded) and step == 0:
            delay(side.engine, stage)
        return accumulate(side, step, micro_batches=2)

    check(lambda: Model(depth=4), work, stage=stage, precision=precision, plain=True, steps=4, **config)
