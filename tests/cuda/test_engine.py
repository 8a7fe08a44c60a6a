"""The engine and the Trainer on two emulated GPUs, over NCCL: the plain twin's numbers, whoever is late."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import inspect
import os
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.gpu import exact
from benchmarks.gpu.check import Check
from benchmarks.gpu.output import Output
from benchmarks.gpu.plan import SIZES, tiny_parts
from lightning_zero import ZeroStrategy
from tests.engine.support import Model, Sharded, Twin, accumulate, assert_same, autocast, language_loss, tokens
from tests.harness import on_ranks, run, run_command
from tests.rows import PLACES
from tests.trainer.toys import fit

ROWS = [*(("none", stage) for stage in (0, 1, 2, 3)), *PLACES]


def offload(row: str, folder: Path) -> Any:
    return {"name": row, "nvme_path": str(folder)} if "nvme" in row else row


LATE = ctypes.CDLL(None)
EARLY = {"all late": 0, "other streams early": 1}  # what runs as late as the program allows, and what at once


@contextlib.contextmanager
def in_order(order: str) -> Iterator[None]:
    LATE.late_cuda_set_early(EARLY[order])
    try:
        yield
    finally:
        LATE.late_cuda_set_early(0)


def trains(row: str, stage: int, folder: Path, order: str, *, precision: str = "fp32", **settings: Any) -> None:
    """Nobody looks at values between steps, which would wait for what is late."""
    torch.default_generator.manual_seed(3)
    module = Model(depth=6 if settings else 2)
    twin = Twin(module, precision=precision, each=stage >= 2)
    losses: list[list[torch.Tensor]] = [[], []]
    settings |= {"stage": stage, "precision": precision, "offload": offload(row, folder)}
    with in_order(order), Sharded(module, **settings) as sharded:
        for side, found in zip((sharded, twin), losses, strict=True):
            for step in range(4):
                with autocast(precision):
                    found.append(accumulate(side, step, 2))
                side.clip(0.5)
                side.step()
                if step == 3:  # parameters are used, and changed again, before anything has run
                    with torch.no_grad(), autocast(precision):
                        found.append(language_loss(side.module, tokens(step)))
                    side.step()
                side.zero_grad()
        assert_same(sharded, twin, tolerance=1e-6)
        torch.testing.assert_close(*map(torch.stack, losses))


@on_ranks(2)
@pytest.mark.parametrize(("row", "stage", "precision", "order"), [
    *((*row, "fp32", order) for row in ROWS for order in EARLY),
    *((*row, "bf16", "all late") for row in PLACES),
])  # fmt: skip
def test_training_equals_the_twin(row: str, stage: int, precision: str, order: str, tmp_path: Path) -> None:
    trains(row, stage, tmp_path, order, precision=precision)


@on_ranks(2)
@pytest.mark.parametrize("order", EARLY)
@pytest.mark.parametrize(("row", "stage"), [("none", 3), ("cpu", 3)])
def test_training_with_inputs_on_the_host_equals_the_twin(row: str, stage: int, order: str, tmp_path: Path) -> None:
    trains(row, stage, tmp_path, order, activation_checkpointing="offload")


@on_ranks(1)
def test_inputs_on_the_host_serve_a_second_backward_and_no_change() -> None:
    with Sharded(Model(depth=1), stage=3, activation_checkpointing="offload", unit={"classes": ["Block"]}) as side:
        for step in range(4):  # the block before is that of another graph, which is gone
            accumulate(side, step, 2)
            language_loss(side.module, tokens(step))  # a graph that is dropped
    with Sharded(Model(depth=6), stage=3, activation_checkpointing="offload") as side, in_order("all late"):
        loss = language_loss(side.module, tokens(0))
        for _ in range(2):
            side.backward(loss, retain_graph=True)
        found = side.clip(1e9)
        side.zero_grad()
        side.backward(2 * language_loss(side.module, tokens(0)))
        torch.testing.assert_close(found, side.clip(1e9))

        def change(_: torch.nn.Module, inputs: Any, __: Any) -> None:
            inputs[0].detach().mul_(2)

        with (
            side.module.blocks[2].register_forward_hook(change),
            pytest.raises(RuntimeError, match=r"changed in place .*activation_checkpointing=blocks"),
        ):
            side.backward(language_loss(side.module, tokens(0)))
        side.engine.passes.abort()


# -- where the host waits ---------------------------------------------------------------------------------------------

NEVER = [
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaHostAlloc"),
    *("copies to the device, pageable", "copies to the host, pageable"),
]


@on_ranks(2)
@pytest.mark.parametrize(("row", "stage", "kept"), [
    *(("none", stage, "none") for stage in (0, 1, 3)),
    *(("none", stage, "offload") for stage in (0, 3)),
    *(("optimizer_cpu", 2, "none"), ("cpu", 3, "none"), ("cpu", 3, "offload"), ("nvme", 3, "none")),
])  # fmt: skip
def test_the_host_waits_for_events_of_offload_only(row: str, stage: int, kept: str, tmp_path: Path) -> None:
    count = LATE.late_cuda_count
    count.restype = ctypes.c_long
    batches = [tokens(step) for step in range(8)]
    settings = {"offload": offload(row, tmp_path), "activation_checkpointing": kept}
    with Sharded(Model(depth=6), stage=stage, **settings) as side:
        for step, batch in enumerate(batches):
            if step == 4:
                before = {name: count(name.encode()) for name in [*NEVER, "cudaEventSynchronize", "kernels"]}
            side.backward(language_loss(side.module, batch))
            side.clip(0.5)
            side.step()
            side.zero_grad()
        waits = {name: count(name.encode()) - number for name, number in before.items()}
    assert waits.pop("kernels") > 0
    events = waits.pop("cudaEventSynchronize")
    assert waits == dict.fromkeys(NEVER, 0)
    assert (events > 0) == (row != "none")


# -- the Trainer ------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("stage", "row", "then"),
    [("zero1", "none", ("zero3", "cpu")), ("zero3", "nvme", ("zero2", "none")), ("zero3", "cpu", ("zero3", "none"))],
)
def test_it_saves_and_goes_on(stage: str, row: str, then: tuple[str, str], background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "saves"

    def trained(stage: str, row: str, **settings: Any) -> list[float]:
        nvme = tmp_path / "nvme"
        nvme.mkdir(exist_ok=True)
        saves = {"name": "sharded" if background else "full", "background": background}
        strategy = ZeroStrategy(stage, offload=offload(row, nvme), checkpoint=saves)
        return fit(strategy, tmp_path, accelerator="gpu", max_epochs=2, **settings).losses

    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    losses = trained(stage, row, enable_checkpointing=True, callbacks=[saving])
    plain = fit("ddp", tmp_path, accelerator="gpu", max_epochs=2).losses
    assert losses == pytest.approx(plain, rel=1e-5)
    dist.barrier()
    assert trained(*then, ckpt_path=folder / "epoch=0.ckpt") == pytest.approx(losses[6:], rel=1e-5)


# -- each wait is needed ----------------------------------------------------------------------------------------------

DEVICE, COMM, UNITS, TIERS = (f"lightning_zero.{name}" for name in ("device", "comm", "engine.units", "tiers"))
SIDES = "other streams early"
ON_HOST = "accelerator.wait_on_host"
WITHOUT: list[tuple[str, str, int, dict[str, Any]]] = [
    (f"{DEVICE}.cuda:Cuda.wait", "self.current_stream().wait_event(event)", 2, {}),
    (f"{DEVICE}.cuda:Cuda.wait_on_host", "event.synchronize()", 1, {"row": "optimizer_cpu"}),
    (f"{DEVICE}.streams:Streams._on", "self.accelerator.wait(event)", 2, {"order": SIDES}),
    (f"{DEVICE}.streams:Streams.on_free_memory", "self.accelerator.wait(event)", 2, {"order": SIDES}),
    (f"{COMM}.reduction:Pending._wait_event", "self._streams.wait(self.event)", 2, {}),
    (f"{COMM}.communicator:Communicator._run", "self.streams.wait(event)", 2, {"stage": 2}),
    (f"{UNITS}.bucket:Bucket._transfers", "streams.wait(self._copied)", 2, {"row": "optimizer_cpu"}),
    (f"{UNITS}.grad_store:_wait", f"streams.{ON_HOST}(arrival)", 1, {"row": "optimizer_cpu"}),
    (f"{TIERS}.pinned:Landing._land", f"self.streams.{ON_HOST}(arrived)", 2, {"row": "optimizer_cpu"}),
    (f"{UNITS}.master_storage:HostStorage.open", f"self._tier.{ON_HOST}(self._reads)", 1, {"row": "optimizer_cpu"}),
    ("lightning_zero.checkpoint.sharded.items:Snapshot.stage", f"{ON_HOST}(arrived)", 1, {}),
    (f"{TIERS}.pinned:Sender.send", f"self._{ON_HOST}(self._sent[turn % 2])", 2, {"row": "optimizer_nvme"}),
    (f"{TIERS}.pinned:ReadAhead.take_buffer", f"self._{ON_HOST}(event)", 2, {"row": "nvme"}),
]


@contextlib.contextmanager
def without(target: str, line: str) -> Iterator[None]:
    """Inside, a function of the package does not have this line."""
    module, _, name = target.partition(":")
    function = inspect.unwrap(attrgetter(name)(importlib.import_module(module)))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{target} has another text now: {line}"
    source, before = source.replace(line, "pass"), function.__code__
    if "." in name:  # for super()
        source = "class Here:\n" + textwrap.indent(source, "    ")
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, {**function.__globals__}, made)
    function.__code__ = inspect.unwrap(vars(made["Here"])[function.__name__] if "." in name else made[name]).__code__
    try:
        yield
    finally:
        function.__code__ = before


def keeps(folder: Path, row: str, stage: int) -> None:
    """What a thread reads beside steps is what was there before them."""
    from tests.engine import test_gpu  # asks whether there is a GPU, behind which torch forks no more

    small = test_gpu.Model(width=32)
    with mock.patch.object(test_gpu, "Model", lambda width: copy.deepcopy(small)):
        test_gpu.kept_is_what_was_there(dist.get_rank(), dist.get_world_size(), f"zero{stage}", row)


@on_ranks(1)
@pytest.mark.parametrize(("row", "stage"), [("none", 1), ("none", 3), ("cpu", 3)])
def test_what_is_kept_is_what_was_there(row: str, stage: int, tmp_path: Path) -> None:
    keeps(tmp_path, row, stage)


def trains_without(
    target: str, line: str, folder: Path, row: str = "none", stage: int = 3, order: str = "all late"
) -> None:
    os.environ["LATE_CUDA_LOG"] = str(folder / "said")
    with without(target, line):
        if ":Snapshot." in target:
            keeps(folder, row, stage)
        else:
            trains(row, stage, folder, order)
    torch.cuda.synchronize()
    assert not (folder / "said").exists(), (folder / "said").read_text()


@pytest.mark.parametrize(("target", "line", "world", "settings"), WITHOUT, ids=[target for target, *_ in WITHOUT])
def test_each_wait_is_needed(target: str, line: str, world: int, settings: dict[str, Any], tmp_path: Path) -> None:
    for attempt in range(20):  # which of two threads comes first is not the same each time
        (folder := tmp_path / str(attempt)).mkdir()
        try:
            run(world, trains_without, target, line, folder, **settings)
        except AssertionError as error:
            print(str(error)[:300])
            return
    pytest.fail(f"nothing shows that {target} needs: {line}")


# -- the main job, and what `make gpu-check` asks of one GPU and of two ranks that share it ---------------------------


def test_the_main_job(tmp_path: Path) -> None:
    settings = ["experiment=tiny", "zero/precision=bf16", "trainer.max_steps=3", "trainer.val_check_interval=null"]
    device = ["trainer.accelerator=gpu", "trainer.devices=1"]
    done = run_command("python", "-m", "lightning_zero.train", *settings, *device, code=0, LIGHTNING_ZERO_RUNS=tmp_path)
    assert "validation bits per byte" in done.stdout
    assert [*tmp_path.glob("train/*/checkpoints/last.ckpt")]


@on_ranks(1)
def test_bits_are_the_same_while_streams_are_late() -> None:
    torch.use_deterministic_algorithms(True)  # new memory is filled, too
    try:
        on_time = exact.trained(SIZES["tiny"], "cuda", "zero3", "cpu")
        with in_order("other streams early"):
            for seed in range(2):
                with exact.late("cuda", seed):
                    assert torch.equal(exact.trained(SIZES["tiny"], "cuda", "zero3", "cpu"), on_time)
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_ranks_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls itself a host, or NCCL would refuse them."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")  # or it would set that itself
    check = Check(Output(tmp_path / "out"), "cuda", str(tmp_path), 150.0)
    check.run([replace(part, estimate_s=25.0) for part in tiny_parts() if part.fields.get("ranks") == 2])
    _, bits, trainer = check.output.records
    assert bits["status"] == trainer["status"] == "ok", check.output.records
    assert bits["late_runs"] > 0 and trainer["zero1_ms"] > 0
