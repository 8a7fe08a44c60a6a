"""The place in an epoch, saved and found again by other numbers of ranks. No process is started."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_zero.data.resumable import ResumableLoader, ShuffledFrom
from lightning_zero.settings import ConfigError


def trainer(rank: int, world: int, *, batches: int = 0, epoch: int = 0, limit: float = float("inf")) -> Any:
    progress = SimpleNamespace(ready=batches, started=batches, processed=batches, completed=batches)
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=progress))
    epochs = SimpleNamespace(current=SimpleNamespace(processed=epoch))
    return SimpleNamespace(
        world_size=world,
        global_rank=rank,
        distributed_sampler_kwargs={"num_replicas": world, "rank": rank},
        num_training_batches=limit,
        fit_loop=SimpleNamespace(epoch_loop=loop, epoch_progress=epochs),
    )


def loader(size: int, batch_size: int, of: Any, **settings: Any) -> Any:
    return ResumableLoader(torch.arange(size), batch_size, trainer=of, drop_last=True, **settings)


def items(of: Any) -> list[list[int]]:
    return [batch.tolist() for batch in of]


@given(size=st.integers(1, 60), world=st.integers(1, 5), epoch=st.integers(0, 2))
def test_a_whole_epoch_is_that_of_torchs_sampler(size: int, world: int, epoch: int) -> None:
    for rank in range(world):
        kinds: Any = (DistributedSampler, ShuffledFrom)
        theirs, ours = (kind(torch.arange(size), num_replicas=world, rank=rank, seed=3) for kind in kinds)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs) == list(ours)
        assert len(ours) == len(theirs)


@given(
    batches=st.integers(3, 8),
    batch=st.integers(1, 3),
    world=st.integers(1, 4),
    done=st.integers(0, 7),
    epoch=st.integers(0, 2),
)
def test_the_same_ranks_go_on_where_they_were(batches: int, batch: int, world: int, done: int, epoch: int) -> None:
    done = min(done, batches - 1)
    size = batches * batch * world
    state = loader(size, batch, trainer(0, world, batches=done, epoch=epoch)).state_dict()
    for rank in range(world):
        whole = loader(size, batch, trainer(rank, world))
        whole.sampler.set_epoch(epoch)
        of = trainer(rank, world, batches=done)
        resumed = loader(size, batch, of)
        resumed.load_state_dict(state)
        assert len(resumed) == batches  # Lightning counts those that are done
        assert of.fit_loop.epoch_loop.batch_progress.current.ready == done
        assert items(resumed) == items(whole)[done:]
        for one in (resumed, whole):
            one.sampler.set_epoch(epoch + 1)
        assert items(resumed) == items(whole)  # the next epoch is whole


@given(
    size=st.integers(30, 90),
    first=st.integers(1, 4),
    then=st.integers(1, 4),
    batch=st.integers(1, 3),
    done=st.integers(0, 6),
)
def test_other_ranks_see_what_is_left_once(size: int, first: int, then: int, batch: int, done: int) -> None:
    before = [loader(size, batch, trainer(rank, first)) for rank in range(first)]
    done = min(done, len(before[0]) - 1)
    state = loader(size, batch, trainer(0, first, batches=done)).state_dict()
    had = {i for one in before for b in items(one)[:done] for i in b}
    seen: list[int] = []
    for rank in range(then):
        of = trainer(rank, then, batches=done)
        resumed = loader(size, batch, of)
        resumed.load_state_dict(state)
        found = items(resumed)
        counted = of.fit_loop.epoch_loop.batch_progress.current
        assert counted.ready + len(found) == len(resumed)  # the epoch ends where Lightning expects it
        seen += [i for b in found for i in b]
    step = then * batch
    assert len(had & set(seen)) < step + then  # a few again, to fill the last batch
    assert size - len(had | set(seen)) < step + then  # or a few not, of the last one that is not full


def test_what_was_trained_on_counts_since_the_last_resume() -> None:
    of = trainer(0, 4)
    resumed = loader(64, 1, of)
    resumed.load_state_dict({"items": 10, "epoch": 0, "whole": 0})
    of.fit_loop.epoch_loop.batch_progress.current.processed += 1
    assert resumed.state_dict()["items"] == 14
    of = trainer(0, 2, batches=3)
    of.fit_loop.epoch_loop.batch_progress.current.ready = 4  # a signal came between two steps
    assert loader(100, 2, of).state_dict() == {"items": 12, "epoch": 0, "whole": 0}


def test_an_epoch_that_limit_train_batches_ends_is_whole() -> None:
    assert [loader(64, 1, trainer(0, 2, batches=done, limit=4)).state_dict()["whole"] for done in (3, 4)] == [0, 1]


def test_loaders_of_unequal_length_of_which_one_has_begun_again_are_refused() -> None:
    of = trainer(0, 1, batches=9)
    of.train_dataloader = [loader(26, 2, of), loader(14, 2, of)]
    for one, refused in zip(of.train_dataloader, (False, True), strict=True):
        with pytest.raises(ConfigError, match=r"got loaders of \[7, 13\]") if refused else contextlib.nullcontext():
            one.load_state_dict(one.state_dict())


def test_workers_begin_at_the_place_too() -> None:
    of = loader(24, 2, trainer(0, 2), num_workers=2)
    of.load_state_dict({"items": 8, "epoch": 1, "whole": 0})
    whole = loader(24, 2, trainer(0, 2))
    whole.sampler.set_epoch(1)
    assert items(of) == items(whole)[2:]


def test_lightning_puts_its_sampler_in_the_place_of_ours() -> None:
    plain = loader(8, 2, trainer(0, 2))
    for sampler in (SequentialSampler(plain.dataset), DistributedSampler(plain.dataset, 2, 1, shuffle=False)):
        plain = _update_dataloader(plain, sampler)  # as with overfit_batches
    assert items(plain) == [[1, 3], [5, 7]] and plain.state_dict() == {}
