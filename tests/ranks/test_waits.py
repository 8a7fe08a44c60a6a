"""A rank that waits for ever says for whom; one that waits for a rank at work goes on waiting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.agreements import ApartError, barrier, broadcast_object, open_waits, together
from lightning_zero.comm.communicator import Communicator
from lightning_zero.ranks import verdict
from lightning_zero.ranks.verdict import StallError
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError
from tests.engine.support import places_posted_often
from tests.harness import on_ranks, run

CPU = torch.device("cpu")


@on_ranks(2, 3)
def test_a_stall_names_the_operation_the_ranks_and_their_places() -> None:
    with places_posted_often():
        comm = Communicator(dist.group.WORLD, CPU, stall_timeout_s=1.0)
        last = comm.world_size - 1
        comm.waits.place = f"at work on {comm.rank}"
        time.sleep(0.3)
        started = time.monotonic()
        if comm.rank == last:
            time.sleep(2.0)  # never comes
        else:
            with pytest.raises(StallError) as caught:
                comm.all_gather(torch.zeros(512 * comm.world_size), "blocks.1#0").wait()
            assert 0.9 < time.monotonic() - started < 1.9
            said = ("blocks.1#0", "zero.dynamic_graph", "zero.stall_timeout_s", f"rank {last}: at work on {last}")
            assert all(part in str(caught.value) for part in (*said, f"rank {comm.rank} waited")), caught.value
        comm.waits.close()  # messages were lost on these groups: they are not given back to the pool


@on_ranks(2)
def test_a_small_agreement_stalls_too() -> None:
    with places_posted_often():  # else the other rank answers no roll call before it stops
        comm = Communicator(dist.group.WORLD, CPU, stall_timeout_s=0.5)
        if comm.rank == 0:
            with pytest.raises(StallError, match="agreement"):
                comm.exchange(1)
        else:
            time.sleep(1.0)
        comm.waits.close()


@on_ranks(2)
def test_a_job_that_was_suspended_goes_on() -> None:
    with places_posted_often():
        comm = Communicator(dist.group.WORLD, CPU, stall_timeout_s=1.5)
        pid = os.getpid()
        suspend = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {pid}; sleep 3; kill -CONT {pid}"])
        if comm.rank == 1:
            time.sleep(1.0)  # is over when the process goes on
        assert comm.exchange(comm.rank) == [[0, 1]]
        assert suspend.wait() == 0
        comm.waits.close()


# -- waiting for a rank that is at work -------------------------------------------------------------------------------


@contextmanager
def quick() -> Iterator[None]:
    still, roll_call = mock.patch.object(verdict, "STILL_S", 0.1), mock.patch.object(verdict, "ROLL_CALL_S", 0.3)
    with places_posted_often(), still, roll_call:
        yield


def waits(seconds: float) -> Waits:
    return open_waits(dist.group.WORLD, CPU, seconds)


@on_ranks(2, 3)
def test_a_patient_wait_lasts_as_long_as_a_rank_is_at_work() -> None:
    with quick():
        own = waits(1.0)  # not less: beats of a rank on a busy machine may be that late
        if own.rank == 0:
            own.place = "downloading"
            time.sleep(4.0)
        barrier(dist.group.WORLD, own, "the data")
        last = own.world_size - 1
        assert broadcast_object(dist.group.WORLD, {"of": own.rank}, last, own) == {"of": last}
        own.close()


@on_ranks(2, 3)
def test_ranks_that_wait_for_different_things_all_hear_of_it() -> None:
    """One is at a barrier, the others wait in an operation that it will never join."""
    with quick():
        group = dist.new_group(list(range(dist.get_world_size())))  # with groups of its own, where messages get lost
        own, comm = open_waits(group, CPU, 0.5), Communicator(group, CPU, stall_timeout_s=3.0)
        own.place = f"place of {own.rank}"
        started = time.monotonic()
        with pytest.raises(StallError, match="place of 1" if own.rank == 0 else "blocks"):
            if own.rank == 0:
                barrier(group, own, "the end")
            else:
                comm.all_gather(torch.zeros(512 * comm.world_size), "blocks.1#0").wait()
        assert time.monotonic() - started < 6.0
        own.close()
        comm.waits.close()


@on_ranks(2, 3)
@pytest.mark.parametrize("error", [ValueError("its own"), StallError("its own"), KeyboardInterrupt()], ids=type)
def test_a_stall_quotes_the_rank_that_failed_before_it_came_to_the_next_engine(error: BaseException) -> None:
    with quick():
        group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=30))
        own = open_waits(group, CPU, 30.0)
        own.place = f"place of {own.rank}"
        if own.rank == 1:
            own.explain(error)
            time.sleep(2.5)
        else:
            said = rf"rank 1: place of 1[^\n]*\n.*rank 1 \(.*\) failed with {type(error).__name__}(: its own)?\n"
            with pytest.raises(StallError, match=f"(?s){said}"):
                open_waits(group, CPU, 1.0)
        own.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_patient_wait_for_a_rank_that_has_ended_is_over(gone: int) -> None:
    """Also where it is rank 0, with whom the store has gone."""
    with pytest.raises(RuntimeError, match="exit code 3") as caught:
        run(2, _one_ends, gone)
    assert "PeerError" in "".join(caught.value.__notes__)


def _one_ends(gone: int) -> None:
    with quick():
        own = waits(30.0)
        barrier(dist.group.WORLD, own, "the start")
        if own.rank == gone:
            os._exit(3)
        barrier(dist.group.WORLD, own, "the end")


# -- refusing together ------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize(("error", "expected", "message"), [
    (ConfigError("zero.x: expected 1, got 2."), ConfigError, r"zero\.x: expected 1, got 2\."),
    (KeyError("y"), RuntimeError, "rank 1 failed with KeyError: 'y'"),
], ids=["refusal", "error"])  # fmt: skip
def test_what_fails_on_one_rank_fails_on_all(error: Exception, expected: type[Exception], message: str) -> None:
    own = waits(30.0)
    undone: list[int] = []

    def act() -> int:
        if own.rank == 1:
            raise error
        return own.rank

    with pytest.raises(type(error) if own.rank == 1 else expected) as caught:
        together(dist.group.WORLD, own, "a try", act, undone.append)
    if own.rank != 1:
        caught.match(message)
    assert undone == ([] if own.rank == 1 else [own.rank])
    assert together(dist.group.WORLD, own, "a try", lambda: 7) == 7
    own.close()


@on_ranks(2, 3)
def test_ranks_at_different_places_hear_so_at_once() -> None:
    own = waits(30.0)
    for _ in range(2):
        with pytest.raises(ApartError, match="rank 0: the start\n.*rank 1: an object of rank 0"):
            if own.rank == 1:
                broadcast_object(dist.group.WORLD, "x", 0, own)
            else:
                barrier(dist.group.WORLD, own, "the start")
    barrier(dist.group.WORLD, own, "the end")
    own.close()


def test_the_error_of_another_rank_is_not_hidden_behind_frames_of_this_one() -> None:
    with pytest.raises(verdict.PeerError) as caught:
        try:
            raise verdict.PeerError("rank 1 has ended")
        except verdict.PeerError as error:
            deep = error.__traceback__
            Waits(None, stall_timeout_s=1.0).explain(error)
            raise
    assert deep is not None and caught.value.__traceback__ is not deep
