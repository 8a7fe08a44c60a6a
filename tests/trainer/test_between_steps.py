"""Weights that hooks read, write, copy, save and keep between steps: as under DDP."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm import one_sided
from lightning_zero.engine.passes import between
from tests.harness import on_ranks
from tests.trainer.toys import (
    FEATURES,
    Lit,
    Run,
    assert_same,
    assert_weights,
    fit,
    loader,
    seeded,
    strategy_of,
    trainer,
)

HOOKS = (
    *("configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    "on_before_zero_grad",
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_train_end", "on_fit_end"),
)


class Uses(Lit):
    """Calls ``act(self)`` in hooks, and notes what it returns."""

    def __init__(self, act: Callable[[Any], Any], hooks: tuple[str, ...]) -> None:
        super().__init__(width=6, depth=2)
        self.act, self.hooks = act, hooks
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)
        self.noted: list[Any] = []
        self.kept: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "act": None}

    def use(self, hook: str) -> None:
        if hook in self.hooks:
            self.noted.append((hook, self.act(self)))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.use("optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.use("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        self.use("configure_optimizers")
        return super().configure_optimizers()


def _calls(hook: str) -> Any:
    return lambda self, *_, **__: self.use(hook)


for _hook in HOOKS:
    if _hook not in vars(Uses):
        setattr(Uses, _hook, _calls(_hook))


def numbers(value: Any) -> Any:
    """Give what can be compared: norms in place of tensors."""
    if isinstance(value, Tensor):
        return value.detach().double().norm().item()
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    return [numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- what hooks do ----------------------------------------------------------------------------------------------------


def reads(m: Any) -> Any:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    norms = [p.norm().item() for p in m.parameters()]
    return [*norms, m.first.weight.detach().norm().item(), m.head.weight.data.sum().item(), *modes]


@torch.no_grad()
def averages(m: Any) -> None:
    for a, p in zip(m.average.parameters(), m.blocks.parameters(), strict=True):
        a.lerp_(p, 0.1)


@torch.no_grad()
def writes(m: Any) -> None:
    m.head.weight.mul_(1.01)
    m.blocks[0].up.weight.data.add_(0.01)
    m.first.bias.data = m.first.bias * 0.9 + 0.01
    nn.init.uniform_(m.blocks[1].norm.bias, 0.1, 0.1)


@torch.no_grad()
def swaps(m: Any) -> None:
    for a, p in zip(m.average.parameters(), m.blocks.parameters(), strict=True):
        before = p.clone()
        p.copy_(a)
        a.copy_(before)


@torch.no_grad()
def calls(m: Any) -> Any:
    """The module, a block, and layers of them, in the dtype of the weights."""
    x = torch.linspace(-1, 1, 6)
    whole = m(torch.linspace(-1, 1, 2 * FEATURES).view(2, FEATURES))
    assert whole.dtype is torch.float32
    return numbers([whole, m.blocks[1](x), m.blocks[0].up(x), m.average[0](x), m.average[1].down(m.average[1].up(x))])


def copies(m: Any) -> Any:
    part, state = copy.deepcopy(m.blocks), copy.deepcopy(m.state_dict())
    assert type(part[0].up.weight) is nn.Parameter
    listed = copy.deepcopy(list(m.head.parameters()))
    return numbers([part[0](torch.ones(6)), list(state.values()), listed])


def saves(m: Any) -> Any:
    """State dicts of all and of a part, which rank 0 alone writes; a pickled part."""
    whole, part, file = m.state_dict(), m.blocks[1].state_dict(), io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(whole, io.BytesIO())
    torch.save(m.head, file)
    file.seek(0)
    return numbers([list(whole.values()), list(part.values()), torch.load(file, weights_only=False).weight])


def loads(m: Any) -> None:
    best = copy.deepcopy(m.blocks.state_dict())
    m.blocks.load_state_dict({name: value * 0.95 for name, value in best.items()})
    m.load_state_dict(m.state_dict())


@torch.no_grad()
def swaps_data(m: Any, views: Any = lambda m: [p.data for p in m.blocks.parameters()]) -> Any:
    """By ``.data = ...`` in one use and back in the next. Views of before keep what they had."""
    params, seen = list(m.blocks.parameters()), []
    if m.kept is None:
        m.kept = views(m), [p.data for p in params]
        for p, a in zip(params, m.average.parameters(), strict=True):
            p.data = a.data * 0.99
    else:
        seen = numbers(m.kept)
        for p, before in zip(params, m.kept[1], strict=True):
            p.data = before
        m.kept = None
    return seen, numbers(params)


def swaps_data_beside_views(m: Any) -> Any:
    return swaps_data(m, lambda m: ([p.detach() for p in m.blocks.parameters()], m.blocks.state_dict()))


@torch.no_grad()
def writes_to_a_state_dict(m: Any) -> None:
    for value in m.blocks[0].state_dict().values():
        value.mul_(0.98)


def keeps(m: Any) -> Any:
    """Views of the first use are read, and written to, in all later ones: they follow the weights."""
    if m.kept is None:
        m.kept = [p.detach() for p in m.parameters()], m.head.weight.data, m.blocks[1].state_dict()
    m.kept[0][-1].mul_(0.99)
    return numbers(m.kept)


@torch.enable_grad()
def takes_gradients(m: Any) -> Any:
    params = list(m.head.parameters())
    return numbers(torch.autograd.grad(sum(p.square().sum() for p in params), params))


@torch.no_grad()
def uses_units_together(m: Any) -> Any:
    """In one operation each."""
    torch._foreach_lerp_(list(m.average.parameters()), list(m.blocks.parameters()), 0.1)
    for one, other in zip(m.blocks[0].parameters(), m.blocks[1].parameters(), strict=True):
        one.lerp_(other, 0.1)
    read = m.blocks[1].norm.bias.sum()  # shown already when the next operation needs it
    return (
        read.item(),
        torch.dot(m.blocks[1].norm.bias, m.blocks[0].norm.weight).item(),
        numbers(m.average.state_dict()),
    )


ACTS = (reads, averages, writes, swaps, calls, copies, saves, loads, writes_to_a_state_dict, takes_gradients)


def everything(m: Any) -> Any:
    return [act(m) for act in ACTS]


EACH = [everything, keeps, swaps_data, *(pytest.param(act, marks=pytest.mark.full) for act in ACTS)]
BY_NAME = {"ids": lambda act: act.__name__}
IN_STEPS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
AFTERWARDS = ("on_fit_end",)  # the run is over for the strategy: the module is whole, in memory of its own


def inside_gather(act: Any) -> Any:
    def gathered(m: Any) -> Any:
        with lightning_zero.gather(m):
            return act(m)

    return gathered


def assert_as(found: Run, expected: Run, what: str) -> None:
    assert [hook for hook, _ in found.module.noted] == [hook for hook, _ in expected.module.noted]
    for (hook, value), (_, other) in zip(found.module.noted, expected.module.noted, strict=True):
        says = lambda text, hook=hook: f"{what} {hook}: {text}"  # noqa: E731
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5, msg=says)
    assert_same(found, expected, what=what)


@on_ranks(2, timeout=180)  # four fits, whose hooks do everything
@pytest.mark.parametrize("act", EACH, **BY_NAME)
def test_hooks_use_weights_as_under_ddp(act: Any, tmp_path: Path) -> None:
    without = () if act is reads else (*IN_STEPS, *(() if act is everything else AFTERWARDS))
    make = functools.partial(Uses, act, tuple(hook for hook in HOOKS if hook not in without))
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    for row in ("zero3", "zero3_offload", "zero1"):
        # A unit is hidden when another is used, but not one that the same operation uses.
        settings = {"prefetch_bytes": 0} if row == "zero3" else {}
        assert_as(fit(strategy_of(row, tmp_path, **settings), tmp_path, seeded(make), count=12), expected, row)


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("act", [act for act in EACH if act not in (keeps, swaps_data)], **BY_NAME)
@pytest.mark.parametrize("row", ["zero3", *(pytest.param(row, marks=pytest.mark.full) for row in ("zero2", "zero0"))])
def test_hooks_see_masters_where_a_pass_computes_in_fewer_bits(row: str, act: Any, tmp_path: Path) -> None:
    """As inside of gather(), which shows masters at every stage."""

    hooks = tuple(hook for hook in HOOKS if hook not in (*IN_STEPS, *AFTERWARDS))
    settings = {"precision": {"fp32_modules": ["average.*"]}}
    runs = [
        fit(strategy_of(row, **settings), tmp_path, seeded(lambda do=do: Uses(do, hooks)), precision="bf16-mixed")
        for do in (act, inside_gather(act))
    ]
    assert_as(*runs, row)


def everything_but_writes_alone(m: Any) -> Any:
    """On rank 0, with views that it keeps."""
    if dist.get_rank():
        return None
    if m.kept is None:
        m.kept = [p.detach() for p in m.blocks.parameters()], m.head.state_dict()
    return [act(m) for act in (reads, calls, copies, saves, takes_gradients)], numbers(m.kept)


@torch.no_grad()
def averages_and_shows(m: Any) -> Any:
    """All ranks average, and rank 0 looks at weights before and after."""
    shown = reads(m) if dist.get_rank() == 0 else None
    averages(m)
    return shown, everything_but_writes_alone(m)


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("act", [everything_but_writes_alone, averages_and_shows], **BY_NAME)
def test_rank_0_uses_weights_alone_as_under_ddp(act: Any, tmp_path: Path) -> None:
    make = functools.partial(Uses, act, tuple(hook for hook in HOOKS if hook not in (*IN_STEPS, *AFTERWARDS)))
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    with mock.patch.multiple(one_sided, PATIENCE_S=0.3, KNOWN_S=0.1, LISTEN_S=0.05):
        for row in ("zero3", "zero3_nvme", "zero1"):
            settings = {"prefetch_bytes": 0} if row == "zero3" else {}
            assert_as(fit(strategy_of(row, tmp_path, **settings), tmp_path, seeded(make), count=12), expected, row)


class StepsEachSecondBatch(Uses):
    """By hand, so that a backward without a step comes before the hook."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@on_ranks(2)
def test_rank_0_uses_weights_alone_after_a_batch_without_a_step(tmp_path: Path) -> None:
    make = functools.partial(StepsEachSecondBatch, everything_but_writes_alone, ("on_train_batch_end",))
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    with mock.patch.multiple(one_sided, PATIENCE_S=0.3, KNOWN_S=0.1, LISTEN_S=0.05):
        assert_as(fit("zero3", tmp_path, seeded(make), count=12), expected, "zero3")


def after_the_others(m: Any) -> Any:
    """A rank that is slow, and another one in each use, while the other does not wait for it."""
    if len(m.noted) % 2 == dist.get_rank():
        time.sleep(0.3)
    return reads(m), writes(m), calls(m), keeps(m)


@on_ranks(2)
def test_ranks_that_do_not_wait_for_each_other_use_and_write_weights_as_under_ddp(tmp_path: Path) -> None:
    make = functools.partial(Uses, after_the_others, ("on_train_batch_end", "on_validation_start"))
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    with mock.patch.multiple(one_sided, PATIENCE_S=0.1, KNOWN_S=0.1, LISTEN_S=0.05):
        for row in ("zero3", "zero3_offload"):
            assert_as(fit(strategy_of(row, tmp_path), tmp_path, seeded(make), count=12), expected, row)


@on_ranks(2)
def test_views_keep_what_was_there_when_data_is_assigned(tmp_path: Path) -> None:
    hooks = ("on_train_batch_start", "on_validation_start", "on_validation_epoch_end")
    make = functools.partial(Uses, swaps_data_beside_views, hooks)
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    for settings in ({}, {"prefetch_bytes": 0}):
        found = fit(strategy_of("zero3_offload", **settings), tmp_path, seeded(make), count=12)
        assert_as(found, expected, f"{settings}")


class KeepsState(Lit):
    """Reads the optimizer's state after step 2, loads it after step 4, and halves it after step 5."""

    differs = False  # ranks load other states

    def on_train_batch_end(self, *_: Any) -> None:
        wrapper, optimizer = self.optimizers(), self.trainer.optimizers[0]
        if self.global_step == 2:
            self.kept = copy.deepcopy(wrapper.state_dict())
            self.losses += [v.float().norm().item() for entry in self.kept["state"].values() for v in entry.values()]
        if self.global_step == 4:
            optimizer.load_state_dict(self.kept)
        if self.global_step == 5:
            state = copy.deepcopy(optimizer.state_dict())
            for entry in state["state"].values():
                entry["exp_avg"] /= 2 + self.differs * dist.get_rank()
            optimizer.load_state_dict(state)


@on_ranks(2)
def test_optimizers_state_is_read_and_loaded_as_under_ddp(tmp_path: Path) -> None:
    make = functools.partial(KeepsState, optimizer="adamw")
    expected = fit("ddp", tmp_path, seeded(make), count=32)
    for row in ("zero3", "zero3_offload", "zero1"):
        assert_same(fit(strategy_of(row, tmp_path), tmp_path, seeded(make), count=32), expected, what=row)
    module = seeded(make)
    module.differs = True
    with pytest.raises(RuntimeError, match=r"loading state/0/exp_avg, .*: expected the same values on all ranks"):
        fit("zero3", tmp_path, module, count=32)


class StepsTwice(Uses):
    """By hand, with uses after each step."""

    automatic_optimization = False
    weight = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            penalty = self.head.weight.square().sum()  # autograd saves values that the step computes with
            self.manual_backward(self.loss(batch) + self.weight * penalty)
            optimizer.step()
            with torch.no_grad():
                self.noted.append(("step", self.act(self)))


class Penalized(StepsTwice):
    weight = 1.0


AFTER_A_STEP = [act for act in ACTS if act not in (calls, takes_gradients)]


def everything_after_a_step(m: Any) -> Any:
    return [act(m) for act in (*AFTER_A_STEP, uses_units_together)]


@on_ranks(2)
@pytest.mark.parametrize(
    "act", [everything_after_a_step, *(pytest.param(act, marks=pytest.mark.full) for act in AFTER_A_STEP)], **BY_NAME
)
def test_a_step_by_hand_sees_masters_after_an_optimizer_has_stepped(act: Any, tmp_path: Path) -> None:
    def run(strategy: Any, do: Any, kind: type[StepsTwice] = StepsTwice, precision: str = "bf16-mixed") -> Run:
        return fit(strategy, tmp_path, seeded(lambda: kind(do, ())), count=8, precision=precision)

    settings = {"precision": {"fp32_modules": ["average.*"]}}
    for row in ("zero3", "zero1", "zero3_offload"):
        assert_as(*(run(strategy_of(row, **settings), do) for do in (act, inside_gather(act))), row)
    expected, found = run("ddp", act, Penalized, "32-true"), run(strategy_of("zero3", **settings), act, Penalized)
    assert_weights(found.weights, expected.weights, tolerance=2e-2)


@on_ranks(2)
def test_an_operation_has_all_its_units_however_little_room_there_is(tmp_path: Path) -> None:
    make = functools.partial(Uses, uses_units_together, ("on_train_start", "on_train_batch_end"))
    expected = fit("ddp", tmp_path, seeded(make), count=12)
    for prefetch_bytes in (0, 500):
        found = fit(strategy_of("zero3", prefetch_bytes=prefetch_bytes), tmp_path, seeded(make), count=12)
        assert_as(found, expected, f"{prefetch_bytes} bytes")


def restages(m: Any) -> Any:
    """With views that were kept before."""
    stage = {2: 1, 3: 3, 4: 2}.get(m.trainer.global_step)
    if m.kept is None:
        m.kept = [p.detach() for p in m.parameters()]
    elif stage is not None and hasattr(m.trainer.strategy, "restage"):
        m.trainer.strategy.restage(stage=stage)
    return numbers(m.kept), reads(m)


def saves_with_room_on_the_host_alone(m: Any) -> Any:
    """Make two state dicts, of which the first is copied to the host while a unit and the root at most are gathered."""
    if not isinstance(m.trainer.strategy, lightning_zero.ZeroStrategy):
        return [numbers(list(m.state_dict().values()))] * 2
    used = m.trainer.strategy.engine.passes.between
    comm, shown = mock.Mock(wraps=used._comm, device=mock.Mock(type="cuda"), streams=mock.Mock()), []
    comm.streams.accelerator.free_nbytes.return_value = 1000

    def show(unit: Any) -> None:
        type(used)._show(used, unit)
        shown.append(sum(memory.full.nbytes for memory in used.memory.values()))

    says = pytest.warns(UserWarning, match="Its tensors are copies on the host: writes to them do not change")
    with mock.patch.multiple(used, _comm=comm, _show=show), says if used._comm.rank == 0 else contextlib.nullcontext():
        state = m.state_dict()
        assert max(shown) <= 2 * shown[0]  # the root and one unit
    values = numbers(list(state.values()))
    state["head.weight"].zero_()  # changes no parameter
    whole = m.state_dict(prefix="a.")
    weight = whole["a.head.weight"]
    assert weight.untyped_storage().nbytes() > weight.nbytes, "a copy"
    return [values, numbers(list(whole.values()))]


@on_ranks(2)
def test_a_state_dict_for_which_devices_have_no_room_is_made_on_the_host(tmp_path: Path) -> None:
    act, hooks = saves_with_room_on_the_host_alone, ("on_train_batch_end", "on_validation_epoch_end")
    runs = [
        fit(strategy, tmp_path, seeded(lambda: Uses(act, hooks)), count=8)
        for strategy in (strategy_of("zero3", prefetch_bytes=0), "ddp")
    ]
    assert_as(*runs, "zero3")


@on_ranks(2)
def test_views_follow_weights_over_a_change_of_the_stage(tmp_path: Path) -> None:
    runs = [
        fit(strategy, tmp_path, seeded(lambda: Uses(restages, ("on_train_batch_end",))), count=12)
        for strategy in (strategy_of("zero3"), "ddp")
    ]
    assert_as(*runs, "zero3")


def copies_and_saves(m: Any) -> Any:
    return saves(m), numbers(list(copy.deepcopy(m.blocks).parameters()))


def copies_saves_and_loads(m: Any) -> Any:
    return copies_and_saves(m), loads(m)


class CopiesInSteps(Uses):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.noted.append(("before a forward", self.act(self)))
        loss = super().training_step(batch, batch_idx)
        self.noted.append(("after it", saves(self)))
        return loss

    def on_after_backward(self) -> None:
        found = copies_and_saves(self)
        self.noted.append(("after its backward", found))
        if isinstance(self.trainer.strategy, lightning_zero.ZeroStrategy):
            assert found == inside_gather(copies_and_saves)(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.noted.append(("validation_step", self.act(self)))
        super().validation_step(batch, batch_idx)


class CopiesByHand(Uses):
    """Before a step, after it, and after a forward without a backward."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.noted.append(("before", self.act(self)))
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.noted.append(("after", self.act(self)))
        self.loss(batch)
        self.noted.append(("in the end", self.act(self)))


def keeps_states(m: Any) -> Any:
    if m.kept is None:
        m.kept = m.blocks.state_dict(), m.head.state_dict()
    return numbers(m.kept), [value.clone().norm().item() for value in m.state_dict().values()]


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("act", [copies_saves_and_loads, keeps_states], **BY_NAME)
@pytest.mark.parametrize("kind", [CopiesInSteps, pytest.param(CopiesByHand, marks=pytest.mark.full)])
def test_steps_copy_save_and_load_weights(kind: Any, act: Any, tmp_path: Path) -> None:
    def run(strategy: Any, do: Any, **settings: Any) -> Run:
        hooks = ("on_train_batch_end", "on_validation_start", "on_train_end") if kind is CopiesByHand else ()
        return fit(strategy, tmp_path, seeded(lambda: kind(do, hooks)), count=8, **settings)

    expected = run("ddp", act)
    for row in ("zero3", "zero3_offload", "zero2", "zero0"):
        assert_as(run(strategy_of(row, tmp_path), act), expected, row)
        if act is not keeps_states and row in ("zero3", "zero0"):
            settings = {"precision": {"fp32_modules": ["average.*"]}}
            runs = [
                run(strategy_of(row, tmp_path, **settings), do, precision="bf16-mixed")
                for do in (act, inside_gather(act))
            ]
            assert_as(*runs, row)


@torch.no_grad()
def writes_and_raises(m: Any) -> None:
    m.head.weight.fill_(0.1)
    m.blocks[0].up.weight.data.fill_(0.2)
    m(torch.ones(2, FEATURES + 1))


def catches(m: Any) -> None:
    with pytest.raises(RuntimeError):
        writes_and_raises(m)


@on_ranks(2)
@pytest.mark.parametrize("act", [writes_and_raises, catches], **BY_NAME)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_is_written_before_an_exception_is_there_after_it(act: Any, precision: str, tmp_path: Path) -> None:
    found = []
    for row in ("ddp", "zero3", "zero1"):
        strategy = row if row == "ddp" else strategy_of(row)
        of, module = (
            trainer(strategy, tmp_path, precision=precision),
            seeded(lambda: Uses(act, ("on_train_batch_end",))),
        )
        with contextlib.nullcontext() if act is catches else pytest.raises(RuntimeError, match="shapes cannot be"):
            of.fit(module, loader(count=4))
        of.save_checkpoint(path := tmp_path / f"{row}.ckpt")
        found.append(torch.load(path, weights_only=False)["state_dict"])
    for state in found[1:]:
        assert_weights(state, found[0], tolerance=1e-5 if precision == "32-true" else 1e-2)


# -- what is refused --------------------------------------------------------------------------------------------------


@torch.no_grad()
def writes_its_own(m: Any) -> None:
    m.head.weight.add_(dist.get_rank() + 1.0)


def assigns(m: Any) -> None:
    m.load_state_dict({name: torch.ones_like(value) for name, value in m.state_dict().items()}, assign=True)


def reads_in_a_thread(m: Any) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(reads, m).result()


def saves_without_room(m: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(between, "available_host_memory", lambda: 6000 * (1 + dist.get_rank()))
        m.head.state_dict()  # fits
        copy.deepcopy(m)


class WritesToAView(Uses):
    """In a step, whose result replaces what the view shows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kept is not None:
            self.kept.mul_(0.5)
        return super().training_step(batch, batch_idx)


def keeps_one(m: Any) -> None:
    m.kept = m.head.weight.detach()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "act", "says"),
    [
        (Uses, writes_its_own, r"^head\.weight: written to between steps, with other values on some ranks"),
        (Uses, assigns, r"load_state_dict\(assign=True\) of a sharded module"),
        (Uses, reads_in_a_thread, r"'norm' of first.weight between steps in a thread of its own"),
        (Uses, saves_without_room, r"copy.deepcopy\(\): expected room .* bytes, on the host of rank 0"),
        (WritesToAView, keeps_one, r"unit \(root\): a view of a parameter .* was written to in a step"),
    ],
    ids=["values of each rank", "assign", "a thread", "no room", "a view in a step"],
)
def test_what_cannot_work_is_named_on_all_ranks(kind: Any, act: Any, says: str, tmp_path: Path) -> None:
    module = seeded(lambda: kind(act, ("on_train_batch_end",)))
    with pytest.raises(RuntimeError, match=says):
        fit("zero3", tmp_path, module)
