"""How ranks join at the start of a run. Ranks are threads here, around a store in memory."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.ranks import rendezvous
from lightning_zero.ranks.rendezvous import Member, Rendezvous, StartError, open_store, places

SHARED = {"versions": {"torch": "2.13"}, "settings": {"seed": "1", "zero.dynamic_graph": "False"}}


def member(rank: int, world_size: int, *, per_node: int = 2) -> Member:
    return Member(rank=rank, world_size=world_size, host=f"node{rank // per_node}", pid=100 + rank)


def meet(
    ranks: Sequence[int],
    world_size: int,
    *,
    store: Any = None,
    shared: Mapping[int, Any] | None = None,
    expected: Mapping[int, int] | None = None,
    timeout_s: float = 10.0,
) -> list[Any]:
    """What joining returns or raises, on each rank; what some of them share or how many they expect is another."""
    store = store if store is not None else dist.HashStore()

    def join(rank: int) -> Any:
        own, says = member(rank, (expected or {}).get(rank, world_size)), (shared or {}).get(rank, SHARED)
        try:
            return Rendezvous(store, own=own, shared=says, where="node0:1", timeout_s=timeout_s, per_node=2).join()
        except StartError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(join, ranks))


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MARGIN_S", 1.5)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def text_of(found: object) -> str:
    assert isinstance(found, StartError)
    return str(found)


def test_all_come_and_rank_0_knows_where_they_are() -> None:
    found = meet([2, 0, 3, 1], 4)
    assert found[1] == {rank: member(rank, 4) for rank in range(4)}
    assert found[0] == found[2] == found[3] == {}
    assert places(found[1].values()) == "2 nodes (node0: 0-1, node1: 2-3)"


def test_ranks_that_do_not_come_are_named_to_all() -> None:
    started = time.monotonic()
    found = meet([0, 1, 2], 4, timeout_s=0.5)
    assert time.monotonic() - started < 8
    said = "rank 3 of 4 did not come to node0:1 within 0.5 s: expected ranks 0-3, found 0-2 on 2 nodes"
    for text in map(text_of, found):
        assert text.startswith(said) and "zero.stall_timeout_s" in text and "trainer.num_nodes" in text
    assert "ranks 2-3 of 4 (all of node 1) did not come" in text_of(meet([0, 1], 4, timeout_s=0.5)[0])


def test_rank_0_that_does_not_come() -> None:
    (found, _) = meet([1, 2], 3, timeout_s=0.5)
    said = "rank 1 on node0 (process 101): expected rank 0 at node0:1, heard nothing of it within 0.5 s"
    assert said in text_of(found)


DIFFERENCES: list[tuple[dict[int, Any], str]] = [
    (
        dict.fromkeys((1, 2), SHARED | {"versions": {"torch": "other"}}),
        "torch: expected 2.13, as rank 0 has it, got other on ranks 1-2. Install the same versions",
    ),
    (
        dict.fromkeys((1, 2), SHARED | {"settings": SHARED["settings"] | {"seed": "other"}}),
        "seed: expected 1, as rank 0 has it, got other on ranks 1-2. Start all ranks with the same command",
    ),
    (  # the first one
        dict.fromkeys((1, 3), SHARED | {"settings": {"seed": "1"}}) | {2: SHARED | {"versions": {"torch": "2.12"}}},
        "zero.dynamic_graph: expected False, as rank 0 has it, got nothing on ranks 1, 3.",
    ),
]


@pytest.mark.parametrize(("others", "said"), DIFFERENCES, ids=["versions", "settings", "both"])
def test_a_rank_that_differs_is_named_with_keys_and_values(others: dict[int, Any], said: str) -> None:
    for error in meet([0, 1, 2, 3], 4, shared=others):
        assert text_of(error).startswith(said)


def test_a_second_rank_of_one_number_is_refused() -> None:
    found = meet([0, 1, 1], 3)
    assert all("rank 1 came twice" in text_of(error) and "NODE_RANK" in text_of(error) for error in found)
    found = meet([0, 0], 2, timeout_s=0.7)
    assert any("rank 0 came twice" in text_of(error) and "NODE_RANK" in text_of(error) for error in found)


def test_ranks_that_expect_other_numbers_of_ranks() -> None:
    for error in meet([0, 1], 2, expected={1: 3}):
        assert "expected 2 ranks" in text_of(error) and "got 3 from rank 1 on node0" in text_of(error)


def test_a_store_that_knows_earlier_rounds() -> None:
    """torchrun's agent keeps its store: what ranks of an earlier round have left counts for nothing."""
    store = dist.HashStore()
    assert len(meet([0, 1], 2, store=store)[0]) == 2
    text_of(meet([0, 1], 3, store=store, timeout_s=0.5)[0])
    text_of(meet([1], 2, store=store, timeout_s=0.3)[0])  # knocked, and died
    for world in (3, 1, 2):
        assert sorted(meet(range(world), world, store=store)[0]) == list(range(world))


def test_a_rank_that_ends_before_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    hear = Rendezvous._hear

    def die(self: Rendezvous, key: str) -> None:
        if self._own.rank == 1:
            raise StartError("killed")
        hear(self, key)

    monkeypatch.setattr(Rendezvous, "_hear", die)
    found = meet([0, 1, 2], 3, timeout_s=0.5)
    assert "rank 1 on node0 (process 101) came, and ended before all had" in text_of(found[0])
    assert text_of(found[2]) == text_of(found[0])


# -- the store ----------------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_resolved() -> None:
    with pytest.raises(StartError) as caught:
        rendezvous.resolve("no-such-host.invalid", 1, wait_s=0.2)
    text = str(caught.value)
    assert "MASTER_ADDR" in text and "'no-such-host.invalid'" in text and socket.gethostname() in text


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"MASTER_PORT: expected a free port on .*, got {port}, on which another"):
            open_store("127.0.0.1", port, rank=0, timeout=timedelta(seconds=5), wait_s=2)


def test_an_address_where_nobody_listens_is_refused_in_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(StartError, match=f"expected rank 0 at 127.0.0.1:{port} .* found nobody there within 0.3 s"):
            open_store("127.0.0.1", port, rank=1, timeout=timedelta(seconds=5), wait_s=0.3)


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ELSEWHERE_S", 0.5)
    said = r"MASTER_ADDR: expected an address of the node of rank 0, .* got 192\.0\.2\.1"
    with pytest.raises(StartError, match=said):
        open_store("192.0.2.1", 1, rank=0, timeout=timedelta(seconds=5), wait_s=60)
