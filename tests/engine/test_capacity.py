"""Memory that is not there is missed before anything is moved, and by all ranks alike."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share
from lightning_zero.engine import Engine
from lightning_zero.engine.units import capacity
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError, OffloadConfig
from lightning_zero.tiers.aio import DiskError, DiskFile
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.nvme import NvmeTier
from tests.engine.sides import Sharded, load_state, state_of
from tests.engine.works import language_work, loss_at, train
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.sample  # the full tier has all cases

WIDTH = 64
NUMEL = sum(p.numel() for p in Model(width=WIDTH).parameters())


def available(nbytes: int) -> Any:
    return mock.patch.object(capacity, "available_host_memory", lambda: nbytes)


def free_files(nbytes: int) -> Any:
    return mock.patch.object(NvmeTier, "free_nbytes", nbytes)


@contextlib.contextmanager
def sharded(**settings: Any) -> Iterator[Engine]:
    """A model without an optimizer."""
    engine = lightning_zero.shard(Model(width=WIDTH), device="cpu", **settings)
    yield engine
    engine.release()


def add_adamw(engine: Engine, **settings: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(engine.module.parameters(), **settings)
    engine.add_optimizer(optimizer)
    return optimizer


def drop_optimizers(engine: Engine) -> None:
    for sharded in engine.optimizers:
        sharded.release()
    engine.optimizers.clear()


@on_ranks(2)
def test_ranks_of_a_host_share_its_memory() -> None:
    """Each rank's half of the masters fits alone; both together do not."""
    need = rf"^offload: the 2 rank\(s\) on host {socket.gethostname()} need"
    says = rf"{need}.* more bytes of host memory.*{3 * NUMEL:,} are available"
    with available(3 * NUMEL), mock.patch.object(HostTier, "reserve") as reserve:
        with pytest.raises(ConfigError, match=says):
            lightning_zero.shard(Model(width=WIDTH), device="cpu", offload="cpu")
        reserve.assert_not_called()


@on_ranks(2)
def test_a_budget_replaces_the_look_at_free_memory() -> None:
    """Some machines get more memory as it is used."""
    offload = {"name": "cpu", "host_budget": 100 * NUMEL}
    nothing = mock.patch.dict(HostTier.__init__.__kwdefaults__ or {}, available=lambda: 0)
    with available(0), nothing, Sharded(Model(width=WIDTH), offload=offload) as side:
        language_work(side, 0)
        side.engine.restage(offload={"name": "optimizer_cpu", "host_budget": 100 * NUMEL})


def test_what_the_ranks_of_a_host_hold_counts_as_free_for_each_of_them() -> None:
    comm = Communicator(None, torch.device("cpu"))
    held = Counter({(Role.master_param, Tier.host): 900})
    with available(200):
        found = capacity._budgets(OffloadConfig(), None, comm, Share(local_ranks=2), held)
    assert found.host == 900  # 90 % of 200 + 2 * 900, for two
    comm.close()


@on_ranks(2)
def test_the_state_of_the_optimizer_is_asked_for_before_its_first_step() -> None:
    with sharded(offload="cpu") as engine:
        with available(7 * NUMEL), pytest.raises(ConfigError, match=r"the 2 rank\(s\) on host .* host memory"):
            add_adamw(engine)
        with available(9 * NUMEL):  # two states of 4 bytes fit now; and SGD without momentum needs nothing
            add_adamw(engine)
        drop_optimizers(engine)
        with available(0):
            engine.add_optimizer(torch.optim.SGD(engine.module.parameters(), lr=1.0))


@on_ranks(2)
def test_state_beyond_a_budget_or_the_room_in_files_is_refused(tmp_path: Path) -> None:
    budget = NUMEL * 4 // 2 * 3  # the gradients and masters of this rank, and one state of the two
    for offload, says in (
        ({"name": "optimizer_cpu", "host_budget": budget}, "zero.offload.host_budget: rank 0 needs .* the budget is"),
        ({"name": "nvme", "nvme_path": str(tmp_path)}, "bytes of files"),
    ):
        with sharded(offload=offload) as engine, free_files(7 * NUMEL), pytest.raises(ConfigError, match=says):
            add_adamw(engine)


@on_ranks(2)
def test_room_inside_of_files_counts_as_free(tmp_path: Path) -> None:
    """A second fit has the room of the first, on a disk that has nothing left beside it; but no byte more."""
    offload = {"name": "nvme", "nvme_path": str(tmp_path)}
    with sharded(offload=offload) as engine, free_files(20_000):
        for fit in range(2):
            with contextlib.nullcontext() if fit else free_files(1 << 40):
                optimizer = add_adamw(engine)
            engine.passes.backward(loss_at(engine.module, fit))
            optimizer.step()
            engine.passes.wait_for_all()
            drop_optimizers(engine)
        with pytest.raises(ConfigError, match="bytes of files"):
            add_adamw(engine, amsgrad=True)


@on_ranks(2)
@pytest.mark.parametrize("row", ["nvme", "optimizer_nvme"])
def test_files_are_asked_for_before_anything_is_moved(row: str, tmp_path: Path) -> None:
    """Each rank's part fits alone; both together do not."""
    offload = {"name": row, "nvme_path": str(tmp_path)}
    with free_files(3 * NUMEL), mock.patch.object(NvmeTier, "reserve") as reserve:
        place = rf"the 2 rank\(s\) on host {socket.gethostname()}, in {tmp_path} need .* more bytes of files"
        budget = r"^offload\['nvme_budget'\]: rank 0 needs .* the budget is 1,000"
        for more, says in (({}, f"^offload: {place}"), ({"nvme_budget": 1000}, budget)):
            with pytest.raises(ConfigError, match=says):
                lightning_zero.shard(Model(width=WIDTH), device="cpu", offload={**offload, **more})
        reserve.assert_not_called()
    assert_free(offload, tmp_path)


def assert_free(offload: dict[str, Any], folder: Path) -> None:
    dist.barrier()  # the other rank has heard of it, and may not have put its file away yet
    assert not [*folder.rglob("*.bin")]
    with Sharded(Model(width=WIDTH), offload=offload):
        pass


@on_ranks(2)
@pytest.mark.parametrize("row", ["nvme", "optimizer_nvme"])
def test_a_disk_that_another_job_fills_on_one_rank_is_every_rank_s_error(row: str, tmp_path: Path) -> None:
    grow, calls = DiskFile.grow, [0]

    def full(self: DiskFile, nbytes: int) -> None:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3:
            raise DiskError(errno.ENOSPC, "it is full")
        grow(self, nbytes)

    offload = {"name": row, "nvme_path": str(tmp_path)}
    started = time.monotonic()
    says = r"offload\['nvme_path'\]: expected .* space .*, where it is full"
    with mock.patch.object(DiskFile, "grow", full), pytest.raises(ConfigError, match=says):
        lightning_zero.shard(Model(width=WIDTH), device="cpu", offload=offload, stall_timeout_s=20.0)
    assert time.monotonic() - started < 10
    assert_free(offload, tmp_path)


@on_ranks(1)
def test_state_that_is_replaced_gives_its_place_back_and_parameters_that_have_left_at_a_load() -> None:
    with Sharded(Model(width=WIDTH), offload="cpu") as side:
        host: Any = side.engine.tiers.host
        sizes = []
        for step in range(2):
            train(side, [step])
            load_state(side, state_of(side))
            sizes.append(host.nbytes)
        assert sizes[0] == sizes[1]
        side.optimizer.param_groups[0]["params"] = list(side.module.head.parameters())
        train(side, [2])
        side.engine.passes.wait_for_all()
        assert host.nbytes == sizes[0]  # they may come back
        load_state(side, state_of(side))
        assert host.nbytes < 0.6 * sizes[0]
