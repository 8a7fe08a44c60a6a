"""Two machines with a network between them, which is cut: as root, with network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STALL_S = 15


def ip(*words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode == 0


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two namespaces, 10.77.0.1 and 10.77.0.2."""
    names = [f"zero{os.getpid()}-{i}" for i in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0 or not ip("netns", "add", names[0], check=False):
        pytest.skip("needs root, and ip netns")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "zv0", "netns", names[0], "type", "veth", "peer", "name", "zv1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"zv{i}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"zv{i}", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def start(machine: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555", "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    more = {"GLOO_SOCKET_IFNAME": f"zv{rank}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings = (
        *("experiment=tiny", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2"),
        *("trainer.max_steps=1000000", "trainer.enable_progress_bar=false"),
        *(f"hydra.run.dir=run{rank}", f"zero.stall_timeout_s={STALL_S}"),
    )
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, "-m", "lightning_zero.train", *settings],
        cwd=folder,
        env={**os.environ, **place, **more},
        stdout=(folder / f"out{rank}").open("w"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.full
def test_both_sides_of_a_cut_network_end_in_time_and_name_the_other(machines: list[str], tmp_path: Path) -> None:
    """Nobody hears that a connection is broken, and the store does not answer the far side. In the engine this is an
    error; in a barrier of others (a metric's, at the end of a validation) the process is ended.
    """
    ranks = [start(machine, rank, tmp_path) for rank, machine in enumerate(machines)]

    def out(rank: int) -> str:
        return (tmp_path / f"out{rank}").read_text()

    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run0/csv/metrics.csv")):  # it trains
            assert time.monotonic() < deadline and ranks[0].poll() is None, out(0) + out(1)
            time.sleep(0.5)
        ip("-n", machines[1], "link", "set", "zv1", "down")
        for process in ranks:
            assert process.wait(timeout=STALL_S + 100) not in (0, 2), out(0) + out(1)
        in_engine = f"zero.stall_timeout_s (now {STALL_S})"
        assert ("  rank 1: " if in_engine in out(0) else "ends: it has stood still for") in out(0), out(0)
        assert "(does not answer: it has ended or hangs)" in out(0) or "rank 1 (on " in out(0), out(0)
        assert "rank 0 (on " in out(1) and ("the network to it is cut" if in_engine in out(1) else "ends: ") in out(1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
