"""After a run the module is whole again, on any rank alone; what is written to it is what the next run starts from."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of, engines
from lightning_zero.engine.units.describe import bucket_shapes, describe_units
from lightning_zero.engine.whole import whole_params
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import COPY_ALIGN, copy_nbytes
from lightning_zero.settings import ConfigError, Precision, ZeroConfig
from lightning_zero.trainer.interruptions import Interruptions
from tests.harness import assert_gone, on_ranks
from tests.trainer import toys
from tests.trainer.toys import Lit, Samples, assert_weights, fit, loader, seeded, strategy_of, trainer

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("row", ["zero0", "zero1", "zero2_offload", "zero3_nvme"])
def test_next_fit_starts_from_what_was_written(row: str, tmp_path: Path) -> None:
    def body(strategy: Any, name: str) -> Any:
        of, module = trainer(strategy, tmp_path, max_epochs=1), seeded(toys.WithBatchNorm)
        of.fit(module, loader())
        before = values(module)
        with torch.no_grad():
            module.head.weight.mul_(2.0)
            module.blocks[0].up.weight.data.fill_(0.01)
            module.blocks[1].down.bias.data = torch.full_like(module.blocks[1].down.bias, 0.5)
        of.save_checkpoint(tmp_path / f"{name}.ckpt")
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["state_dict"]
        assert torch.equal(state["head.weight"], 2 * before["head.weight"])
        of.test(module, loader(), verbose=False)
        assert torch.equal(module.blocks[1].down.bias, torch.full((8,), 0.5))
        module.head.bias.data.add_(1.0)
        of.fit_loop.max_epochs = 2
        of.fit(module, loader())
        return toys.record(of, module), values(module)

    expected, whole = body("ddp", "ddp")
    found, own = body(strategy_of(row, tmp_path), row)
    toys.assert_same(found, expected, tolerance=0)
    assert_weights(own, whole, tolerance=0)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_parameters_of_another_shape_are_taken_over_by_the_next_fit(row: str, tmp_path: Path) -> None:
    """As transformers' ``resize_token_embeddings`` gives them: by ``.data``, with first values of each rank's own."""

    def body(strategy: Any) -> Any:
        run = fit(strategy, tmp_path, seeded(Lit), max_epochs=1)
        for layer, shape in ((run.module.head, (2, 8)), (run.module.first, (8, 4))):
            layer.weight.data = torch.full(shape, 0.1 + (layer is run.module.head) * dist.get_rank())
        run.module.head.bias.data = torch.zeros(2)
        return fit(strategy, tmp_path, run.module, max_epochs=1)

    toys.assert_same(body(row), body("ddp"))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("row", ["zero0", "zero3"])
def test_of_values_that_differ_between_ranks_those_of_rank_0_count(row: str, tmp_path: Path) -> None:
    """As DDP broadcasts them. A parameter that rank 1 alone has written to is as rank 0 has it."""

    def body(strategy: Any) -> Any:
        run = fit(strategy, tmp_path, seeded(Lit), max_epochs=1)
        module = run.module
        module.head.weight.data.fill_(0.1 + dist.get_rank())
        module.head.bias.data = torch.full_like(module.head.bias, float(dist.get_rank()))
        if dist.get_rank() == 1:
            module.first.weight.data.fill_(7.0)
        again = fit(strategy, tmp_path, module, max_epochs=1)
        return toys.record(again.trainer, module), values(module)

    found, own = body(row)
    expected, whole = body("ddp")
    toys.assert_same(found, expected)
    assert_weights(own, whole)


@pytest.mark.sample
@on_ranks(2)
def test_a_step_of_a_runs_optimizer_after_it_is_refused(tmp_path: Path) -> None:
    run = fit("zero3", tmp_path, seeded(Lit), max_epochs=1)
    run.module(Samples()[0][0][None]).sum().backward()
    with pytest.raises(RuntimeError, match="between runs: the module is whole"):
        run.trainer.optimizers[0].step()
    run.trainer.test(run.module, loader(), verbose=False)


NO_ROOM = mock.patch.object(whole_params, "available_host_memory", lambda: 1000)


class Wide(Lit):
    """1 MiB in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 1024)


def mapped(but: set[int]) -> list[dict[str, int]]:
    """Give this process's maps of whole modules, ``but`` those of other inodes: inode, and bytes by kind."""
    found = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head, _, rest = part.partition("\n")
        if "memfd:lightning_zero" in head:
            sizes = {k: int(v) * 1024 for k, v in re.findall(r"^(\w+): +(\d+) kB", rest, re.MULTILINE)}
            found.append({"inode": int(head.split()[4]), "private": "p" in head.split()[1], **sizes})
    return [entry for entry in found if entry["inode"] not in but]


@on_ranks(2)
def test_ranks_of_a_host_share_one_copy(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    others = {entry["inode"] for entry in mapped(set())}  # of runs that another test keeps
    run = fit("zero3", tmp_path, seeded(Wide), max_epochs=1)
    module, engine = run.module, engine_of(run.module)
    nbytes = sum(round_up(p.nbytes, COPY_ALIGN) for p in module.parameters())
    units = describe_units(seeded(Wide), ZeroConfig(), Precision.fp32)
    planned = copy_nbytes(nbytes for shape in bucket_shapes(units) for nbytes in shape.built_nbytes)
    assert engine.host_copy.nbytes == nbytes == planned
    module(Samples()[0][0][None])
    float(module.wide.weight.sum())
    maps = mapped(others)
    inodes = engine.comm.gather_checked({entry["inode"] for entry in maps}, "inodes")
    assert len(inodes[0]) == 1 and inodes[0] == inodes[1]  # one file, of which there is one copy of each page
    own = next(entry for entry in maps if entry["private"])
    assert own["Size"] >= nbytes and own["Anonymous"] == 0
    engine.comm.gather_checked(None, "read")
    if dist.get_rank() == 1:
        module.wide.weight.data[0, 0] = 5.0
        page = os.sysconf("SC_PAGE_SIZE")
        assert next(entry for entry in mapped(others) if entry["private"])["Anonymous"] == page
    engine.comm.gather_checked(None, "written")
    assert (module.wide.weight[0, 0] == 5.0) == (dist.get_rank() == 1)
    assert set(os.listdir("/dev/shm")) <= before
    module.wide.weight.data.copy_(run.weights["wide.weight"])
    run.trainer.test(module, loader(), verbose=False)
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(module, loader())
    assert len(mapped(others)) == 2  # those of before are gone


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("asked", [None, False])
def test_module_without_room_for_a_copy_stays_sharded(asked: bool | None, tmp_path: Path) -> None:
    of = trainer(ZeroStrategy("zero3", gather_after_fit=asked), tmp_path, max_epochs=1)
    module, tells = seeded(Lit), toys.on_rank_0(pytest.warns(UserWarning, match="stays sharded after this run"))
    with NO_ROOM, tells if asked is None else contextlib.nullcontext():
        of.fit(module, loader())
    for call in (module.state_dict, module.half, lambda: copy.deepcopy(module), lambda: module.head.weight.sum()):
        with pytest.raises(RuntimeError, match=r"lightning_zero\.gather\(model\)") as caught:
            call()
        assert "engine" not in str(caught.value)
    with lightning_zero.gather(module):
        module.state_dict()
    of.save_checkpoint(tmp_path / "saved.ckpt")


@pytest.mark.parametrize("call", ["fit", "test"])
def test_gather_after_fit_without_room_is_refused_before_a_process_starts(call: str, tmp_path: Path) -> None:
    strategy = ZeroStrategy("zero3", gather_after_fit=True)
    of = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, default_root_dir=tmp_path)
    launches = mock.patch.object(of.strategy.launcher, "launch", side_effect=AssertionError("processes start"))
    says = (
        r"^gather_after_fit=True: expected room for a whole copy of the module, [\d,]+ bytes, on this host, got "
        r"1,000 bytes that are available \(90% of them may be used\)\. Set gather_after_fit=None"
    )
    with launches, NO_ROOM, pytest.raises(ConfigError, match=says):
        getattr(of, call)(Lit())


@on_ranks(2)
def test_module_stays_sharded_if_memory_cannot_be_had(tmp_path: Path) -> None:
    of, module = trainer("zero3", tmp_path, max_epochs=1), seeded(Lit)
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        of.fit(module, loader())
    engine = engine_of(module)
    assert engine.host_copy is None
    of.test(module, loader(), verbose=False)
    assert engine.host_copy.is_shown
    of.fit_loop.max_epochs = 2
    with mock.patch.object(whole_params.os, "open", side_effect=OSError(13, "Permission denied")):
        of.fit(module, loader())
    assert engine.host_copy is None


@pytest.mark.sample
@on_ranks(2, full=(1,))
def test_module_is_whole_after_an_exception_of_an_evaluation_and_sharded_after_one_of_a_fit(tmp_path: Path) -> None:
    """On one rank it is whole again after both."""
    run = fit("zero3", tmp_path, seeded(lambda: toys.Fails(1, ())), max_epochs=1, count=8)
    run.module.test_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.trainer.test(run.module, loader(), verbose=False)
    assert_weights(values(run.module), run.weights, tolerance=0)  # nothing has changed: it is whole again
    run.trainer.fit_loop.max_epochs, run.module.ranks = 2, (0, 1)
    with pytest.raises(KeyError, match="planned"):
        run.trainer.fit(run.module, loader())
    if dist.get_world_size() == 1:
        assert type(run.module.head.weight) is nn.Parameter and run.module.head.weight.isfinite().all()
    else:
        with pytest.raises(RuntimeError, match=r"lightning_zero\.gather\(model\)"):
            run.module.state_dict()


@on_ranks(2)
def test_exception_at_the_end_of_training_waits_for_nobody(tmp_path: Path) -> None:
    """The table at the end is of rank 0 alone, which then waits for nobody."""
    messages: list[str] = []

    def save(interruptions: Interruptions, *, last: bool = False) -> None:
        if last:
            comm: Any = interruptions._comm
            comm.gather_checked = lambda value, what, **_: messages.append(what) or [value]
            raise OSError("no space left")

    strategy = ZeroStrategy("zero3")
    with mock.patch.object(Interruptions, "at_boundary", save), pytest.raises(OSError, match="no space left"):
        fit(strategy, tmp_path, max_steps=2, enable_model_summary=True)
    assert not messages


def train_and_test(row: str, averages: bool, folder: Path) -> list[weakref.ref[Any]]:
    """References to what a run was made of. A function of its own: ``save_hyperparameters`` has the frames that it
    looks through keep their variables."""
    callbacks = [EMAWeightAveraging()] if averages else []
    run = fit(strategy_of(row, folder), folder, Lit(optimizer="adamw"), max_steps=2, callbacks=callbacks)
    run.trainer.test(run.module, loader(), verbose=False)
    of, engine = run.trainer, engine_of(run.module)
    assert engine is not None
    return [weakref.ref(o) for o in (of, run.module, of.strategy, *of.optimizers, engine, *engine.buckets, *callbacks)]


@pytest.mark.sample
@on_ranks(2, full=(1,))
@pytest.mark.parametrize("row", ["zero0", "zero3", "zero1 optimizer_nvme", "zero3_nvme"])
@pytest.mark.parametrize("averages", [False, True])
def test_engine_module_and_threads_go_with_their_trainer(row: str, averages: bool, tmp_path: Path) -> None:
    before, threads = len(engines()), []
    for _ in range(4):
        assert_gone(train_and_test(row, averages, tmp_path))
        assert len(engines()) == before and not list(tmp_path.rglob(f"*{dist.get_rank()}.bin"))
        threads.append(len(os.listdir("/proc/self/task")))  # those of C++ among them
    # Process groups are used again. Threads that have done their work (a backward's, say) may take a while to end.
    deadline = time.monotonic() + 30
    while (left := len(os.listdir("/proc/self/task"))) > threads[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left <= threads[1], (threads, left)


@on_ranks(1, 2)
def test_files_of_a_run_before_are_not_in_the_way(tmp_path: Path) -> None:
    """Also before Python has collected it."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            fit(strategy_of("zero3_nvme", tmp_path), tmp_path, Lit(optimizer="adamw"), max_steps=1)
    finally:
        gc.enable()
