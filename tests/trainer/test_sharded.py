"""Checkpoints that are folders: every setting loads what every other one has saved, and what is saved is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

from lightning_zero import ZeroStrategy, presets
from lightning_zero.checkpoint import verify
from lightning_zero.checkpoint.sharded import save as saving
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.config import ConfigError
from lightning_zero.pretrained.stored import StoredTensor
from tests.harness import on_ranks, run
from tests.trainer.test_hierarchy import TwoNodes
from tests.trainer.toys import (
    Lit,
    assert_weights,
    fit,
    loader,
    optimizer_states,
    seeded,
    some_of,
    trainer,
    weights,
)

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


class Odd(Lit):
    """Tied weights, a frozen part, a buffer, a parameter that is not row-major, one number, an empty parameter, and a
    step count of its own for what trains seldom."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"width": 16, "optimizer": "adamw", "scheduler": "step", **kwargs})
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.scale + self.turned.sum() * 0.1 + self.empty.sum()
        if self.training:
            self.seen += 1
        return out

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "lr": 0.01}, {"params": trained[3:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def odd() -> Odd:
    module: Odd = seeded(Odd)
    return module


def other_weights() -> Odd:
    """What is loaded into: equal to nothing that was saved."""
    module: Odd = seeded(Odd, seed=11)
    return module


def sharded(name: str = "zero3", folder: Path | None = None, **settings: Any) -> ZeroStrategy:
    """The strategy of a preset that saves folders."""
    if folder is not None:
        (folder / "disk").mkdir(exist_ok=True)
        os.environ["LIGHTNING_ZERO_NVME_PATH"] = str(folder / "disk")  # the pool restores it
    row = presets.PRESETS[name]
    return ZeroStrategy(row.stage, **{"offload": row.offload, "checkpoint": "sharded", **settings})


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "zero3_nvme"])
def test_resumed_training_is_the_uninterrupted_one_to_the_bit(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    whole = fit(sharded(name, tmp_path), tmp_path, odd(), max_epochs=3, **settings)
    first = fit(sharded(name, tmp_path), tmp_path, odd(), max_epochs=2, **settings)
    path = tmp_path / "two.ckpt"
    first.trainer.save_checkpoint(path)
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    rest = fit(sharded(name, tmp_path), tmp_path, other_weights(), max_epochs=3, ckpt_path=path, **settings)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)
    assert rest.trainer.global_step == whole.trainer.global_step


def _strategy(name: str, root: Path) -> Any:
    if name == "ddp":
        return name
    return sharded(name.removesuffix(" full"), root, **({"checkpoint": "full"} if name.endswith(" full") else {}))


def _save(name: str, root: Path) -> dict[str, Any]:
    """Two epochs, saved; and what a third would give."""
    batch_size = 12 // dist.get_world_size()
    whole = fit(_strategy(name, root), root, odd(), max_epochs=3, batch_size=batch_size)
    saved = fit(_strategy(name, root), root, odd(), max_epochs=2, batch_size=batch_size)
    saved.trainer.save_checkpoint(root / "saved.ckpt")
    return {"weights": whole.weights, "losses": _mean_over_ranks(whole.losses[-2:]), "saved": saved.weights}


def _resume(name: str, root: Path, expected: dict[str, Any]) -> None:
    batch_size = 12 // dist.get_world_size()
    path = root / "saved.ckpt"
    found = fit(_strategy(name, root), root, other_weights(), max_epochs=3, batch_size=batch_size, ckpt_path=path)
    torch.testing.assert_close(_mean_over_ranks(found.losses), expected["losses"], rtol=1e-5, atol=1e-6)
    assert_weights(found.weights, expected["weights"], what=name)
    of = trainer(_strategy(name, root), root)
    of.test(other_weights(), loader(), ckpt_path=path, verbose=False)
    assert_weights(weights(of), expected["saved"], tolerance=0, what=name)


def _mean_over_ranks(losses: list[float]) -> Tensor:
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


WAYS = [  # each row of stage or offload once
    (("zero1", 3), ("zero3_nvme", 2)),
    (("zero3_nvme", 2), ("zero2_offload", 1)),
    (("zero0", 2), ("zero3_offload", 3)),
    (("ddp", 2), ("zero3", 3)),
    (("zero3 full", 2), ("zero2", 3)),
    (("zero3", 3), ("zero3 full", 2)),
]
WHO = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme", "zero3 full"]
MORE = [
    ((a, n), (b, m))
    for a in WHO
    for b in WHO
    for n, m in ((1, 3), (3, 2), (2, 1))
    if " full" not in a and ((a, n), (b, m)) not in WAYS
]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [*WAYS, *(pytest.param(*way, marks=pytest.mark.full) for way in MORE)],
    ids=lambda who: f"{who[0]}-{who[1]}ranks",
)
def test_training_goes_on_with_other_settings_on_other_ranks(
    saved_by: tuple[str, int], loaded_by: tuple[str, int], tmp_path: Path
) -> None:
    expected = run(saved_by[1], _save, saved_by[0], tmp_path)[0]
    run(loaded_by[1], _resume, loaded_by[0], tmp_path, expected)


@on_ranks(2)
@pytest.mark.parametrize("precision", some_of(("bf16-mixed", "16-mixed", "bf16-true"), "16-mixed"))
def test_precisions(precision: Any, tmp_path: Path) -> None:
    """The loss scale goes on too, and another precision loads."""
    settings: dict[str, Any] = {"precision": precision}
    whole = fit(sharded(), tmp_path, odd(), max_epochs=3, **settings)
    fit(sharded(), tmp_path, odd(), max_epochs=2, **settings).trainer.save_checkpoint(tmp_path / "two.ckpt")
    rest = fit(sharded(), tmp_path, other_weights(), max_epochs=3, ckpt_path=tmp_path / "two.ckpt", **settings)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)
    other = fit(sharded("zero1"), tmp_path, other_weights(), max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    torch.testing.assert_close(other.losses, whole.losses[-len(rest.losses) :], rtol=0.05, atol=0.02)


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero1", "zero3_nvme"])
def test_averages(name: str, tmp_path: Path) -> None:
    def body(epochs: int, **settings: Any) -> Any:
        module = seeded(Odd, seed=settings.pop("seed", 3))
        callbacks = [EMAWeightAveraging(decay=0.8)]
        return fit(sharded(name, tmp_path), tmp_path, module, max_epochs=epochs, callbacks=callbacks, **settings)

    class Saves(Callback):
        def on_train_epoch_end(self, of: Any, module: Any) -> None:
            of.save_checkpoint(tmp_path / f"{of.current_epoch}.ckpt")

    fit(
        sharded(name, tmp_path), tmp_path, odd(), max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.8), Saves()]
    )  # fmt: skip
    whole = body(3)
    rest = body(3, ckpt_path=tmp_path / "1.ckpt", seed=11)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)
    folder = ShardedFolder(tmp_path / "1.ckpt")
    averaged, current = (folder.tensor(f"{top}.scale").whole() for top in ("state_dict", "current_model_state"))
    assert averaged != current


class TwoOptimizers(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()

    def configure_optimizers(self) -> Any:
        rest = [*self.first.parameters(), self.turned, self.scale, self.empty]
        parts = list(self.blocks[0].parameters())
        return [
            torch.optim.AdamW(rest, lr=0.01),
            torch.optim.SGD([{"params": parts[:2]}, {"params": parts[2:], "momentum": 0.5}], lr=0.01),
        ]


@on_ranks(2)
def test_two_optimizers(tmp_path: Path) -> None:
    whole = fit(sharded(), tmp_path, seeded(TwoOptimizers), max_epochs=3)
    fit(sharded(), tmp_path, seeded(TwoOptimizers), max_epochs=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    module = seeded(TwoOptimizers, seed=11)
    rest = fit(sharded("zero1"), tmp_path, module, max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    torch.testing.assert_close(rest.losses, whole.losses[-len(rest.losses) :], rtol=1e-6, atol=0)
    assert_weights(rest.weights, whole.weights, tolerance=1e-6)
    groups = optimizer_states(rest.trainer)[1]["param_groups"]
    assert [group["momentum"] for group in groups] == [0, 0.5]


def _hybrid(folder: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "NODE_RANK": str(dist.get_rank() // 2)}
    found = []
    for hybrid_shard in ("node", "flat"):
        strategy = sharded(comm={"hybrid_shard": hybrid_shard}, cluster_environment=TwoNodes())
        result = fit(strategy, folder, seeded(lambda: Odd(width=64)), max_epochs=2, devices=2, num_nodes=2)
        result.trainer.save_checkpoint(folder / f"{hybrid_shard}.ckpt")
        found.append(result)
        strategy.engine.release()
    names = [sorted(p.name for p in (folder / f"{name}.ckpt").glob("*.distcp")) for name in ("node", "flat")]
    assert names[0] == ["__0_0.distcp", "__1_0.distcp"]  # one replica, and each of its ranks
    assert len(names[1]) == 4
    for name, result in zip(("flat", "node"), found, strict=True):  # each loads the other's
        strategy = sharded(comm={"hybrid_shard": name}, cluster_environment=TwoNodes())
        of = trainer(strategy, folder, devices=2, num_nodes=2)
        path = folder / f"{'node' if name == 'flat' else 'flat'}.ckpt"
        of.test(seeded(lambda: Odd(width=64), seed=11), loader(), ckpt_path=path, verbose=False)
        assert_weights(weights(of), result.weights, tolerance=0)
        strategy.engine.release()


def test_of_replicas_one_writes(tmp_path: Path) -> None:
    run(4, _hybrid, tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_going_on_with_values_on_rank_0_alone(checkpoint: str, tmp_path: Path) -> None:
    """As scripts do that load a model on one rank and send it to the others."""
    strategy = partial(sharded, checkpoint=checkpoint, stall_timeout_s=20)
    whole = fit(strategy(), tmp_path, seeded(Lit), max_epochs=3)
    fit(strategy(), tmp_path, seeded(Lit), max_epochs=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = Lit()
    rest = fit(strategy(), tmp_path, module, max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    assert rest.losses == whole.losses[-len(rest.losses) :]


# -- what is in the folder --------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_every_element_is_written_once(name: str, tmp_path: Path) -> None:
    saved = fit(sharded(name), tmp_path, seeded(lambda: Odd(width=64)))
    saved.trainer.save_checkpoint(tmp_path / "a.ckpt")
    folder = ShardedFolder(tmp_path / "a.ckpt")
    places = {(i.relative_path, i.offset) for i in folder.index.storage_data.values()}
    tied = [folder.index.state_dict_metadata[f"state_dict.blocks.{n}.up.weight"] for n in (0, 1)]
    assert tied[0] == tied[1]
    aliases = len(tied[0].chunks)  # the tied weight is in the file once, under two names
    assert len(places) == len(folder.index.storage_data) - aliases
    for key, value in saved.weights.items():
        assert torch.equal(folder.tensor(f"state_dict.{key}").whole(), value)
    sizes = [(tmp_path / "a.ckpt" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.5 * max(sizes)  # also where nothing is sharded


class Frozen(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_frozen_parameters_can_be_left_out(checkpoint: str, tmp_path: Path) -> None:
    def strategy() -> ZeroStrategy:
        return ZeroStrategy("zero3", checkpoint={"name": checkpoint, "exclude_frozen": True})

    whole = fit(strategy(), tmp_path, seeded(Frozen), max_epochs=3)
    saved = fit(strategy(), tmp_path, seeded(Frozen), max_epochs=2)
    path = tmp_path / "adapter.ckpt"
    saved.trainer.save_checkpoint(path)
    keys = (
        {k.removeprefix("state_dict.") for k in ShardedFolder(path).keys if k.startswith("state_dict.")}
        if checkpoint == "sharded"
        else set(torch.load(path)["state_dict"])
    )
    assert keys == {"head.weight", "head.bias", "seen"}
    module = seeded(Frozen)
    with torch.no_grad():
        module.head.weight.zero_()
    rest = fit(strategy(), tmp_path, module, max_epochs=3, ckpt_path=path)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)
    thawed = seeded(Odd, seed=5)
    with pytest.raises(RuntimeError, match=r"got .*adapter\.ckpt: it lacks turned"):
        trainer(strategy(), tmp_path).test(thawed, loader(), ckpt_path=path, verbose=False)


@on_ranks(2)
def test_averages_of_adapters(tmp_path: Path) -> None:
    def body(epochs: int, **settings: Any) -> Any:
        strategy = ZeroStrategy("zero3", checkpoint={"name": "sharded", "exclude_frozen": True})
        callbacks = [EMAWeightAveraging(decay=0.8), Keeps()]
        return fit(strategy, tmp_path, seeded(Frozen), max_epochs=epochs, callbacks=callbacks, **settings)

    class Keeps(Callback):
        def on_train_epoch_end(self, of: Any, module: Any) -> None:
            of.save_checkpoint(tmp_path / f"{of.max_epochs} {of.current_epoch}.ckpt")

    whole = body(3)
    body(2)
    rest = body(3, ckpt_path=tmp_path / "2 1.ckpt")
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)


# -- hooks ------------------------------------------------------------------------------------------------------------


class EditsCheckpoint(Lit):
    """What hooks see and change counts."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"]["head.weight"].shape == self.head.weight.shape
        checkpoint["mine"] = {"number": 5, "tensor": torch.ones(3)}
        checkpoint["state_dict"]["head.bias"] = torch.full((1,), 7.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"]["number"] == 5 and checkpoint["mine"]["tensor"].sum() == 3
        state = checkpoint["state_dict"]
        assert isinstance(state["first.weight"], StoredTensor)
        state["first.weight"] = state["first.weight"] * 0 + 2


@on_ranks(2)
def test_what_hooks_put_in_counts(tmp_path: Path) -> None:
    fit(sharded(), tmp_path, seeded(EditsCheckpoint)).trainer.save_checkpoint(tmp_path / "edited.ckpt")
    of = trainer(sharded(), tmp_path)
    of.test(seeded(EditsCheckpoint, seed=4), loader(), ckpt_path=tmp_path / "edited.ckpt", verbose=False)
    found = weights(of)
    assert (found["head.bias"] == 7).all() and (found["first.weight"] == 2).all()


@on_ranks(2)
def test_hooks_that_want_values_are_told(tmp_path: Path) -> None:
    class Reads(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["norm"] = checkpoint["state_dict"]["head.weight"].norm()

    with pytest.raises(RuntimeError, match=r"no rank holds all of a tensor.*zero/checkpoint=full"):
        fit(sharded(), tmp_path, seeded(Reads)).trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


class OwnState(Lit):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, value: Any) -> None:
        self.value = value


@on_ranks(2)
def test_what_modules_have_of_their_own_comes_back_as_it_was(tmp_path: Path) -> None:
    for number, value in enumerate([{}, {0: torch.ones(2)}, {"a": [torch.ones(1), {}]}, (torch.ones(1), 2), None]):
        path = tmp_path / f"{number}.ckpt"
        fit(sharded(), tmp_path, seeded(lambda value=value: OwnState(value))).trainer.save_checkpoint(path)
        module = seeded(lambda: OwnState("another"))
        trainer(sharded(), tmp_path).test(module, loader(), ckpt_path=path, verbose=False)
        assert str(module.value) == str(value)


class RateInTensor(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01))


@on_ranks(2)
def test_nothing_is_read_when_all_is_loaded(tmp_path: Path) -> None:
    """A job removes the folder it went on from."""

    class Removes(RateInTensor):
        def on_train_start(self) -> None:
            dist.barrier()
            shutil.rmtree(tmp_path / "two.ckpt", ignore_errors=True)

    whole = fit(sharded(), tmp_path, seeded(RateInTensor), max_epochs=3)
    fit(sharded(), tmp_path, seeded(RateInTensor), max_epochs=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    rest = fit(sharded(), tmp_path, seeded(Removes, seed=4), max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)


# -- when it is saved and removed -------------------------------------------------------------------------------------


@on_ranks(2)
def test_model_checkpoint(tmp_path: Path) -> None:
    """Keeps the newest; the best, ``last`` and weights only; the file of a run before gives way to the folder."""
    one: dict[str, Any] = {"enable_version_counter": False}
    for strategy in ("zero3", sharded(), sharded()):
        saves = [
            ModelCheckpoint(tmp_path / "top", every_n_train_steps=2, filename="{step}", save_last=True, **one),
            ModelCheckpoint(tmp_path / "weights", save_weights_only=True, filename="only", **one),
        ]
        of = fit(strategy, tmp_path, enable_checkpointing=True, callbacks=saves).trainer
        dist.barrier()
    assert sorted(p.name for p in (tmp_path / "top").iterdir()) == ["last.ckpt", "step=12.ckpt"]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["only.ckpt"]
    assert all(path.is_dir() for path in (tmp_path / "top").iterdir())
    again = fit(sharded(), tmp_path, seeded(Lit, seed=4), max_epochs=3, ckpt_path=tmp_path / "top" / "last.ckpt")
    assert again.trainer.global_step == 18
    with pytest.raises(KeyError, match="weights_only"):
        fit(sharded(), tmp_path, max_epochs=3, ckpt_path=tmp_path / "weights" / "only.ckpt")
    test = trainer(sharded("zero1"), tmp_path)
    test.test(seeded(Lit, seed=4), loader(), ckpt_path=tmp_path / "weights" / "only.ckpt", verbose=False)
    assert_weights(weights(test), weights(of), tolerance=0)


@on_ranks(2)
def test_saving_without_training_and_before_any_run(tmp_path: Path) -> None:
    of = trainer(sharded(), tmp_path)
    of.validate(seeded(Lit), loader(), verbose=False)
    of.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    test = trainer("zero1", tmp_path)
    test.test(seeded(Lit, seed=4), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_weights(weights(test), seeded(Lit).state_dict(), tolerance=0)


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_on_all(rank: int, tmp_path: Path) -> None:
    of = fit(sharded(), tmp_path, odd()).trainer
    of.save_checkpoint(tmp_path / "a.ckpt")
    before, write = weights(of), saving._RankFile._write

    def fails(*args: Any) -> Any:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return write(*args)

    saving._RankFile._write = fails
    try:
        with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt.*No space left"):
            of.save_checkpoint(tmp_path / "a.ckpt")
    finally:
        saving._RankFile._write = write
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    test = trainer(sharded(), tmp_path)
    test.test(other_weights(), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_weights(weights(test), before, tolerance=0)
    of.save_checkpoint(tmp_path / "b.ckpt")


class Runs:
    """Writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _pickled(value: Any) -> bytes:
    import pickle

    return pickle.dumps(value)


DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no index": (lambda path, _: (path / ".metadata").unlink(), r"bad\.ckpt: it has no \.metadata"),
    "half an index": (
        lambda path, _: (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:500]),
        r"\.metadata: it cannot be read",
    ),
    "an index that runs code": (
        lambda path, ran: (path / ".metadata").write_bytes(_pickled(Runs(ran))),
        r"\.metadata: it cannot be read: .*pathlib\.Path\.touch|\.metadata: it cannot be read: .*getattr",
    ),
    "an index that changes a class": (  # the opcodes: a class of an index, a state, BUILD
        lambda path, _: (path / ".metadata").write_bytes(
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVmixed\nI1\nstb."
        ),
        r"\.metadata: it cannot be read: .*it changes a type",
    ),
    "another pickle": (
        lambda path, _: (path / ".metadata").write_bytes(_pickled({"a": 1})),
        r"\.metadata: it holds no index but a dict",
    ),
    "no meta.pt": (lambda path, _: (path / "meta.pt").unlink(), r"bad\.ckpt: it has no meta\.pt"),
    "meta.pt runs code": (
        lambda path, ran: torch.save({**torch.load(path / "meta.pt"), "extra": Runs(ran)}, path / "meta.pt"),
        r"meta\.pt with pathlib\.Path\.touch|meta\.pt with .*getattr",
    ),
    "a value runs code": (lambda path, ran: _put_value(path, Runs(ran)), r"bad\.ckpt with .*(touch|getattr)"),
    "no shard": (lambda path, _: (path / "__1_0.distcp").unlink(), r"__1_0\.distcp: this file of it is missing"),
    "half a shard": (
        lambda path, _: os.truncate(path / "__1_0.distcp", 900),
        r"__1_0\.distcp: this file of it has 900 bytes, fewer than the",
    ),
    "an empty folder": (lambda path, _: (shutil.rmtree(path), path.mkdir()), r"bad\.ckpt: it has no \.metadata"),
}


def _put_value(path: Path, value: Any) -> None:
    """In the place of a learning rate."""
    folder = ShardedFolder(path)
    (place,) = (i for k, i in folder.index.storage_data.items() if k.fqn == "optimizer_0.param_groups.0.lr")
    torch.save(value, path / "evil.distcp")
    place.relative_path, place.offset, place.length = "evil.distcp", 0, (path / "evil.distcp").stat().st_size
    (path / ".metadata").write_bytes(_pickled(folder.index))


@on_ranks(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_on_all_ranks(damage: str, tmp_path: Path) -> None:
    change, says = DAMAGES[damage]
    of = fit(sharded(), tmp_path, odd(), max_epochs=1).trainer
    of.save_checkpoint(tmp_path / "bad.ckpt")
    if dist.get_rank() == 0:
        change(tmp_path / "bad.ckpt", tmp_path / "ran")
    dist.barrier()
    before = weights(of)
    for weights_only in (None, True):
        with pytest.raises(ConfigError, match=says):
            of.fit(of.lightning_module, loader(), ckpt_path=tmp_path / "bad.ckpt", weights_only=weights_only)
    assert not (tmp_path / "ran").exists()
    assert_weights(weights(of), before, tolerance=0)


@pytest.mark.sample
@on_ranks(2)
def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """In a tensor, it would load in silence."""
    of = fit(sharded(), tmp_path, odd(), max_epochs=1).trainer
    path = tmp_path / "bad.ckpt"
    of.save_checkpoint(path)
    strategy = sharded(checkpoint={"name": "sharded", "verify": True})
    trainer(strategy, tmp_path).test(other_weights(), loader(), ckpt_path=path, verbose=False)
    if dist.get_rank() == 0:
        assert verify.main([str(path)]) == 0
        index = ShardedFolder(path).index
        place = next(i for k, i in index.storage_data.items() if k.fqn == "state_dict.first.weight")
        data = bytearray((path / place.relative_path).read_bytes())
        data[place.offset + 720] ^= 1
        (path / place.relative_path).write_bytes(data)
        assert verify.main([str(path)]) == 1
    dist.barrier()
    strategy = sharded(checkpoint={"name": "sharded", "verify": True})
    with pytest.raises(
        ConfigError, match=r"bad\.ckpt as it was written, got other values in .*state_dict\.first\.weight"
    ):
        trainer(strategy, tmp_path).test(other_weights(), loader(), ckpt_path=path, verbose=False)


@on_ranks(2)
def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    fit(sharded(), tmp_path, odd(), max_epochs=1).trainer.save_checkpoint(tmp_path / "odd.ckpt")
    cases = {"missing, unexpected": Lit, "shapes": lambda: Odd(width=6)}
    for make in cases.values():
        of = fit(sharded(), tmp_path, seeded(make), max_epochs=1).trainer
        before, module = weights(of), of.lightning_module
        with pytest.raises(RuntimeError, match=r"got .*odd\.ckpt: (the model lacks turned|first\.weight has shape)"):
            of.test(module, loader(), ckpt_path=tmp_path / "odd.ckpt", verbose=False)
        assert_weights(weights(of), before, tolerance=0)


@on_ranks(2)
def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    fit(sharded(), tmp_path, odd(), max_epochs=1).trainer.save_checkpoint(tmp_path / "odd.ckpt")

    class Swapped(Odd):
        def configure_optimizers(self) -> Any:
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.AdamW(
                [{"params": [trained[-1], *trained[1:3]]}, {"params": [trained[0], *trained[3:-1]]}]
            )

    class One(Odd):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    for make, says in ((Swapped, r"odd\.ckpt: its optimizer has no"), (One, r"param groups of \[3, ")):
        with pytest.raises(ConfigError, match=says):
            fit(sharded(), tmp_path, seeded(make), max_epochs=2, ckpt_path=tmp_path / "odd.ckpt")


@on_ranks(1)
def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    says = r"zero/checkpoint=sharded: expected no CheckpointIO, got AsyncCheckpointIO"
    with pytest.raises(ConfigError, match=says):
        sharded(checkpoint_io=AsyncCheckpointIO())
    with pytest.raises(ConfigError, match=says):
        trainer(sharded(), tmp_path, plugins=[AsyncCheckpointIO()])
    of = fit(sharded(), tmp_path).trainer
    with pytest.raises(ConfigError, match=r"expected no storage_options, .* got \{'a': 1\}"):
        of.save_checkpoint(tmp_path / "a.ckpt", storage_options={"a": 1})
    with pytest.raises(ConfigError, match="a file system that is mounted, got s3://"):
        of.save_checkpoint("s3://bucket/a.ckpt")
