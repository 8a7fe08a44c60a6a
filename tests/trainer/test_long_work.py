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
from lightning_zero.engine.units.bucket import Bucket
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


def _buckets(passes: Passes) -> list[Bucket]:
    return [bucket for unit in passes.units for bucket in unit.buckets]


def _nbytes(passes: Passes, tensors: int) -> int:
    """Of this rank's shards: the masters and so many tensors of optimizer state."""
    return sum(f.numel * 4 for b in _buckets(passes) for f in b.layout.fragments(b.comm.shard_rank)) * tensors


@pytest.mark.sample
@pytest.mark.parametrize(("name", "background"), [("full", False), ("sharded", False), ("sharded", True)])
@on_ranks(2)
def test_saves_and_loads_count_their_bytes(name: str, background: bool, tmp_path: Path) -> None:
    ran: list[Passes] = []
    before = Passes.rest

    def noted(passes: Passes) -> None:
        ran[:] = [passes]
        before(passes)

    settings = {"name": name, "background": background, "verify": True}
    with mock.patch.object(Passes, "rest", noted):
        saved = run(tmp_path, settings)
        loaded = run(tmp_path, settings, ckpt_path=tmp_path / "a.ckpt")
    if dist.get_rank():
        assert not saved and not loaded
        return
    assert saved[0].what == "sharding, in units" and all(seen.over for seen in saved + loaded)
    writes = [seen for seen in saved if seen.what == "saving a.ckpt"]
    assert len(writes) == 1 and writes[0].in_bytes
    # Step counts of parameters are tensors of a few bytes, which a folder has in files of its own.
    own = _nbytes(ran[0], 3)
    assert own <= writes[0].total <= own + 200, (own, writes[0].total)
    if not background:
        assert writes[0].done == sorted(writes[0].done) and writes[0].done[-1] == writes[0].total
        assert "a.ckpt, to the disk" in [seen.what for seen in saved]
    by_name = {seen.what: seen for seen in loaded}
    weights = by_name["loading weights"]
    assert weights.total == weights.done[-1] == _nbytes(ran[0], 1) and len(weights.done) > 5
    states = by_name["loading optimizer state, in buckets"]
    assert states.total == len(_buckets(ran[0])) and states.done[-1] == states.total - 1
    checked = by_name["checksums of a.ckpt"]
    assert 0 < checked.done[-1] <= checked.total
    assert ("reading a.ckpt, in values" in by_name) == (name == "sharded")


@on_ranks(2)
def test_wait_for_a_write_behind_training_shows_its_bytes(tmp_path: Path) -> None:
    """The count is the writer's, whoever waits and when."""
    with mock.patch.object(long_work.LongWork, "wait", autospec=True, side_effect=long_work.LongWork.wait) as waits:
        run(tmp_path, {"name": "sharded", "background": True})
    counts = [call.args[3] for call in waits.call_args_list if len(call.args) > 3]
    assert [count.done == count.total > 0 for count in counts if count is not None] == [True]


@on_ranks(1)
def test_saves_and_loads_show_nothing_without_a_progress_bar(tmp_path: Path) -> None:
    for settings in ({}, {"ckpt_path": tmp_path / "a.ckpt"}):
        assert not run(tmp_path, {"name": "full", "verify": True}, bar=False, **settings)
