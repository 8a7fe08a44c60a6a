"""Saves and loads say how far they are: on rank 0, in bytes that add up, and where the Trainer has a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ProgressBar
from rich.filesize import decimal

from lightning_zero import ZeroStrategy
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.ranks import progress as long_work
from tests.harness import on_ranks
from tests.trainer.toys import Lit, SavesAt, loader, seeded, trainer

pytestmark = pytest.mark.full

SEEN: list[Seen] = []


class Seen:
    """One piece of work that is shown, with what it is told."""

    def __init__(self, what: str, total: int | None, *, in_bytes: bool) -> None:
        self.what, self.total, self.in_bytes, self.done, self.over = what, total, in_bytes, [0], False
        SEEN.append(self)

    def at(self, done: int) -> None:
        assert not any(other is not self and not other.over for other in SEEN), "two pieces of work at once"
        self.done.append(done)


@contextlib.contextmanager
def lines(work: long_work.LongWork, what: str, total: int | None, text: Any) -> Iterator[Callable[[int], None]]:
    """Takes the place of ``LongWork._lines``."""
    if not work.shows:
        yield lambda done: None
        return
    seen = Seen(what, total, in_bytes=text is decimal)
    yield seen.at
    seen.over = True


class Silent(ProgressBar):
    """Draws nothing."""

    def disable(self) -> None: ...

    enable = disable


def run(root: Path, checkpoint: dict[str, Any], *, bar: bool = True, **fit: Any) -> list[Seen]:
    """What has been shown on this rank in a fit that saves."""
    SEEN.clear()
    strategy = ZeroStrategy("zero3", checkpoint=checkpoint, gather_after_fit=False)
    callbacks: list[Callback] = [SavesAt(root / "a.ckpt", 3), *([Silent()] if bar else [])]
    of = trainer(strategy, root, max_epochs=1, callbacks=callbacks, enable_progress_bar=bar)
    with mock.patch.object(long_work.LongWork, "_lines", lines):
        of.fit(seeded(lambda: Lit(optimizer="adamw")), loader(), **fit)
    return list(SEEN)


@pytest.mark.sample
@pytest.mark.parametrize(("name", "background"), [("full", False), ("sharded", False), ("sharded", True)])
@on_ranks(2)
def test_saves_and_loads_count_their_bytes(name: str, background: bool, tmp_path: Path) -> None:
    ran: list[Passes] = []
    rest = Passes.rest
    settings = {"name": name, "background": background, "verify": True}
    with mock.patch.object(Passes, "rest", lambda passes: (ran.append(passes), rest(passes))):
        saved = run(tmp_path, settings)
        loaded = run(tmp_path, settings, ckpt_path=tmp_path / "a.ckpt")
    if dist.get_rank():
        assert not saved and not loaded
        return
    buckets = [bucket for unit in ran[-1].units for bucket in unit.buckets]
    nbytes = 4 * sum(f.numel for b in buckets for f in b.layout.fragments(b.comm.shard_rank))  # of this rank's shards
    assert saved[0].what == "sharding, in units" and all(seen.over for seen in saved + loaded)
    (write,) = [seen for seen in saved if seen.what == "saving a.ckpt"]
    assert write.in_bytes
    # Step counts of parameters are tensors of a few bytes, which a folder has in files of its own.
    assert 3 * nbytes <= write.total <= 3 * nbytes + 200
    if not background:
        assert write.done == sorted(write.done) and write.done[-1] == write.total
        assert "a.ckpt, to the disk" in [seen.what for seen in saved]
    by_name = {seen.what: seen for seen in loaded}
    weights, states = by_name["loading weights"], by_name["loading optimizer state, in buckets"]
    assert weights.total == weights.done[-1] == nbytes and len(weights.done) > 5
    assert states.total == len(buckets) and states.done[-1] == states.total - 1
    checked = by_name["checksums of a.ckpt"]
    assert 0 < checked.done[-1] <= checked.total
    assert ("reading a.ckpt, in values" in by_name) == (name == "sharded")


@on_ranks(1)
def test_saves_and_loads_show_nothing_without_a_progress_bar(tmp_path: Path) -> None:
    for settings in ({}, {"ckpt_path": tmp_path / "a.ckpt"}):
        assert not run(tmp_path, {"name": "full", "verify": True}, bar=False, **settings)
