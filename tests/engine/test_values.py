"""Reading and changing whole values, gradients and states, and what refuses to be read or changed."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.engine.units.bucket import Shown
from lightning_zero.engine.whole.values import OnRank0
from tests.engine.sides import Sharded, load_state, state_of, step_and_clear
from tests.engine.support import PRECISIONS, STAGES, assert_absent, assert_equal, assert_same
from tests.engine.works import autocast, floats, language_work, loss_at, tokens, train, trained
from tests.harness import on_ranks
from tests.models import VOCABULARY, WIDTH, Model

pytestmark = pytest.mark.sample  # the full tier has all cases


# -- gather -----------------------------------------------------------------------------------------------------------


@on_ranks(3, full=(1, 2))
@STAGES
@PRECISIONS
def test_what_is_written_inside_gather_is_kept(stage: int, precision: str) -> None:
    sharded, twin = trained(stage=stage, precision=precision)
    module, master_of = sharded.module, lambda name: twin.masters[twin.module.get_parameter(name)].value
    with sharded:
        with lightning_zero.gather(module), torch.no_grad():
            module.head.weight.mul_(3)
            module.blocks[1].norm.bias.fill_(0.125)
            module.embed.weight.data = torch.full_like(module.embed.weight, 0.3)
            assert_equal({**sharded.engine.state_dict(only_rank_0=False)}, {**module.state_dict()})
            with pytest.raises(RuntimeError, match=r"outside of gather.*module\.load_state_dict"):
                sharded.engine.load_state_dict({})
        master_of("head.weight").mul_(3)
        master_of("blocks.1.norm.bias").fill_(0.125)
        master_of("embed.weight").fill_(0.3)
        assert_same(sharded, twin)
        step_and_clear(sharded, twin)
        assert_same(sharded, twin)
        for side in (sharded, twin):
            with autocast(precision):
                language_work(side, 9)
        assert_same(sharded, twin, grads=True)


@on_ranks(2, full=(3,))
@STAGES
def test_the_values_of_one_rank_count_where_it_is_named(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        with lightning_zero.gather(side.module, from_rank=1), torch.no_grad():
            side.module.head.weight.fill_(float(dist.get_rank()))
        assert side.engine.state_dict(only_rank_0=False)["head.weight"].unique().tolist() == [1.0]


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_other_values_on_some_ranks_inside_gather_are_refused(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    rank, own = dist.get_rank(), "head.weight: written to inside gather.*from_rank=0"
    with sharded:
        head = sharded.module.head
        with pytest.raises(RuntimeError, match=own), lightning_zero.gather(head), torch.no_grad():
            head.weight.fill_(rank + 1.0)
        with pytest.raises(RuntimeError, match=own), lightning_zero.gather(head):
            if rank == 0:
                head.weight.data = torch.zeros_like(head.weight)
        with pytest.raises(RuntimeError, match=own), lightning_zero.gather(head, grads=True):
            head.weight.grad.fill_(rank + 1.0)
        assert_same(sharded, twin, grads=True)
        with lightning_zero.gather(head, grads=True, from_rank=1):
            head.weight.grad.fill_(rank + 1.0)
        twin.grads[twin.module.head.weight].fill_(2.0)
        assert_same(sharded, twin, grads=True)


@on_ranks(2)
@STAGES
@pytest.mark.mainly(lambda stage: stage == 3)
def test_what_is_loaded_in_a_step_comes_after_what_was_written_before(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        state = side.engine.state_dict(only_rank_0=False)
        with side.engine.step_scope():
            with torch.no_grad():
                for param in side.module.parameters():
                    param.mul_(0.5)
            side.engine.load_state_dict(state)
            assert torch.equal(side.module.head.weight, state["head.weight"])
            assert side.engine.units[0].buckets[0].shown is Shown.GATHERED  # as long as the step lasts
        assert_equal(side.engine.state_dict(only_rank_0=False), state)


@on_ranks(2)
def test_gather_takes_a_parameter_several_or_a_submodule_and_nests() -> None:
    with Sharded(Model()) as side:
        block = side.module.blocks[1]
        with lightning_zero.gather(block.up.weight):
            assert block.up.weight.isfinite().all()
            with lightning_zero.gather(side.module):
                assert all(p.isfinite().all() for p in side.module.parameters())
            assert block.up.weight.isfinite().all()
        assert_absent(block.up.weight)
        with lightning_zero.gather(list(block.parameters())):
            assert all(p.isfinite().all() for p in block.parameters())
    with pytest.raises(ValueError, match="sharded module"), lightning_zero.gather(nn.Linear(2, 2)):
        pass


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("argument", [{"from_rank": 0}, {"grads": True}], ids=str)
def test_arguments_of_a_nested_gather_are_refused(stage: int, argument: dict[str, int]) -> None:
    with Sharded(Model(), stage=stage) as side:
        weight = side.module.head.weight
        with lightning_zero.gather(side.module):
            before = weight.detach().clone()
            with pytest.raises(RuntimeError, match="cannot be nested"), lightning_zero.gather(weight, **argument):
                weight.data.fill_(7.0)
            assert torch.equal(weight, before)
        with lightning_zero.gather(weight, **argument):  # alone it works
            assert torch.equal(weight, before)
        train(side, range(1))


@on_ranks(2)
@STAGES
def test_a_frozen_part_that_came_later_is_left_as_it_is(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        with lightning_zero.gather(side.module):
            side.module.teacher = copy.deepcopy(side.module.head).requires_grad_(False)
            expected = side.module.head.weight.clone()
        language_work(side, 0)
        assert lightning_zero.grad_norm(side.module) > 0
        with lightning_zero.gather(side.module):
            assert torch.equal(side.module.teacher.weight, expected)
        side.step()


@on_ranks(2)
def test_an_exception_inside_gather_drops_what_was_written() -> None:
    with Sharded(Model()) as side:
        with pytest.raises(ZeroDivisionError), lightning_zero.gather(side.module.head):
            side.module.head.weight.data.fill_(7)
            with lightning_zero.gather(side.module.embed):
                raise ZeroDivisionError
        assert_absent(side.module.head.weight)
        with lightning_zero.gather(side.module):
            assert not (side.module.head.weight == 7).any()


@on_ranks(2)
@STAGES
def test_other_parameters_inside_gather_are_refused(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        module, weight = side.module, side.module.head.weight
        with (
            pytest.raises(RuntimeError, match=r"head\.weight was replaced.*assign=False"),
            lightning_zero.gather(module),
        ):
            module.head.weight = nn.Parameter(torch.zeros_like(module.head.weight))
        module.head.weight = weight
        train(side, range(1))


# -- copies of modules ------------------------------------------------------------------------------------------------


@on_ranks(2)
@STAGES
@PRECISIONS
def test_copies_conversions_and_state_dicts_are_refused_outside_of_gather(stage: int, precision: str) -> None:
    sharded, _ = trained(stage=stage, precision=precision)
    module, block = sharded.module, sharded.module.blocks[0]
    with sharded:
        calls: list[Callable[[], Any]] = [
            lambda: module.to(torch.float64),
            module.half,
            block.half,
            block.up.double,
            lambda: copy.deepcopy(module),
            lambda: copy.deepcopy(module.blocks),
            lambda: module.load_state_dict({}),
            lambda: block.load_state_dict({}, strict=False),
        ]
        if stage == 0 and precision != "bf16":
            assert module.state_dict()["head.weight"].isfinite().all()
        else:
            calls += [module.state_dict, block.state_dict]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"(converting|deepcopy|state_dict).*gather"):
                call()
        with lightning_zero.gather(module):
            copied = copy.deepcopy(module)
            module.load_state_dict({key: value * 2 for key, value in module.state_dict().items()})
            block.load_state_dict({key: value * 2 for key, value in block.state_dict().items()})
        copied.to(torch.float64)
        with lightning_zero.gather(module):
            for (name, param), other in zip(module.named_parameters(), copied.parameters(), strict=True):
                times = 4 if name.startswith("blocks.0.") else 2
                assert torch.equal(param, times * other.to(param.dtype)), name


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_made_inside_gather_is_plain(stage: int, precision: str) -> None:
    doubles = lambda module, args, output: output * 2  # noqa: E731
    with Sharded(Model(), stage=stage, precision=precision) as side:
        handle = side.module.blocks[0].register_forward_hook(doubles)  # the user's own hooks are copied
        with lightning_zero.gather(side.module):
            block, whole = copy.deepcopy(side.module.blocks[0]), copy.deepcopy(side.module)
            values = [p.detach().clone() for p in side.module.parameters()]
        handle.remove()
        for copied in (block, whole):
            assert all(set(inner._forward_hooks.values()) <= {doubles} for inner in copied.modules())
        assert len(block._forward_hooks) == 1
        side.engine.comm.counts.clear()
        loss_at(whole, 0).backward()
        block(floats(0, 4, WIDTH)).sum().backward()
        assert not side.engine.comm.counts and not side.engine.passes.in_backward
        assert all(type(p.grad) is Tensor for p in (*whole.parameters(), *block.parameters()))
        copy.deepcopy(whole).double().load_state_dict(whole.state_dict())
        train(side, range(1))
        assert all(torch.equal(p, v) for p, v in zip(whole.parameters(), values, strict=True))


@on_ranks(2)
@STAGES
@pytest.mark.parametrize(("checkpointing", "precision"), [("none", "bf16"), ("blocks", "fp32")])
def test_a_module_is_plain_inside_gather(stage: int, checkpointing: str, precision: str) -> None:
    """It can be pickled and scripted, and what comes of it needs nothing of ours, also not its norms."""
    module = nn.Sequential(Model(), nn.LayerNorm(VOCABULARY, elementwise_affine=False))
    with Sharded(module, stage=stage, activation_checkpointing=checkpointing, precision=precision) as side:
        train(side, range(1))
        engine = side.engine
        with pytest.raises(RuntimeError, match=r"pickling.*gather"):
            torch.save(module, io.BytesIO())
        engine.comm.counts.clear()
        with lightning_zero.gather(module):
            assert engine_of(module) is engine
            assert all(type(p) is nn.Parameter for p in module.parameters())
            file = io.BytesIO()
            torch.save(module, file)
            scripted, traced = torch.jit.script(module), torch.jit.trace(module, tokens(0))
            expected = module(tokens(0))  # on this rank alone
            assert all(torch.equal(other(tokens(0)), expected) for other in (scripted, traced))
            if dist.get_rank() == 0:
                module(tokens(1))
        assert b"lightning_zero" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(tokens(0)), expected)
        train(side, range(1, 3))
        loss_at(loaded, 0).backward()
        assert all(p.grad is not None for p in loaded.parameters())


# -- placeholders -----------------------------------------------------------------------------------------------------


@on_ranks(2)
@PRECISIONS
def test_sharded_parameters_tell_the_truth_about_everything_but_values(precision: str) -> None:
    def told(p: nn.Parameter) -> list[Any]:
        return [p.shape, p.ndim, p.numel(), len(p), p.requires_grad, p.device.type, p.is_leaf, p.grad, p.is_shared()]

    plain = Model()
    with Sharded(Model(), precision=precision) as side:
        for (name, param), other in zip(side.module.named_parameters(), plain.parameters(), strict=True):
            assert told(param) == told(other), name
            assert isinstance(param, nn.Parameter) and param in {param}
            assert torch.zeros_like(param).shape == torch.randn(other.shape).view_as(param).shape == other.shape
            assert param.type() == torch.empty(0, dtype=param.dtype).type()
            if precision == "bf16" and "norm" in name:
                assert torch.equal(param, other), "in fp32, and replicated"
                continue
            assert "sharded" in repr(param) and "sharded" in f"{param}"
            assert_absent(param)


READS_AND_WRITES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.fill_(1.0),
    lambda p: p.copy_(torch.ones(p.shape)),
    lambda p: nn.init.xavier_uniform_(p),
    lambda p: p.data,
    lambda p: p[0, 0].item(),
    lambda p: torch.cat([torch.ones(p.shape), p]),
    lambda p: torch._foreach_add_([torch.ones(p.shape)], [p]),
    lambda p: p.detach().numpy(),
    lambda p: nn.utils.parameters_to_vector([p]),
    lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    lambda p: p.type(torch.float64),
    copy.deepcopy,
]


@on_ranks(2)
def test_reads_and_writes_between_steps_are_refused_by_name() -> None:
    with Sharded(Model()) as side:
        weight = side.module.blocks[1].up.weight
        for step in range(2):
            for use in READS_AND_WRITES:
                with torch.no_grad(), pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight is sharded.*gather"):
                    use(weight)
            train(side, [step])


# -- gradients --------------------------------------------------------------------------------------------------------


@on_ranks(2)
@STAGES
def test_changes_to_gradients_inside_gather_are_kept(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        with lightning_zero.gather(sharded.module, grads=True):
            sharded.module.head.weight.grad.mul_(0.5)
            sharded.module.blocks[0].up.bias.grad = None
        twin.grads[twin.module.head.weight].mul_(0.5)
        del twin.grads[twin.module.blocks[0].up.bias]
        assert_same(sharded, twin, grads=True)
        for side in (sharded, twin):
            side.step()
        assert_same(sharded, twin)


@on_ranks(2)
def test_norms_and_clipping_inside_gather_are_torch_s() -> None:
    sharded, _ = trained(stage=3)
    with sharded:
        before = lightning_zero.grad_norm(sharded.module)
        with lightning_zero.gather(sharded.module, grads=True):
            for use in (lightning_zero.grad_norm, lambda module: lightning_zero.clip_grad_norm_(module, 0.1)):
                with pytest.raises(RuntimeError, match="a whole tensor here.*clip_grad_norm_"):
                    use(sharded.module)
            norm = torch.nn.utils.clip_grad_norm_(sharded.module.parameters(), 0.1)
            torch.testing.assert_close(norm, before)
        assert lightning_zero.grad_norm(sharded.module) == pytest.approx(0.1, rel=1e-4)


@on_ranks(2, full=(3,))
@STAGES
def test_zeroed_gradients_are_gradients_and_cleared_ones_are_not(stage: int) -> None:
    """``zero_grad(set_to_none=False)``: decay and momentum go on; and partly cleared gradients."""
    sharded, twin = trained(stage=stage)

    def clear(*names: str) -> None:
        for name in names:
            sharded.module.get_parameter(name).grad = None
            twin.grads.pop(twin.module.get_parameter(name))

    with sharded:
        for step in range(1, 4):
            sharded.optimizer.zero_grad(set_to_none=False)
            for grad in twin.grads.values():
                grad.zero_()
            assert lightning_zero.grad_norm(sharded.module).item() == 0
            if step == 2:
                clear("embed.weight")
            for side in (sharded, twin) if step != 3 else ():
                language_work(side, step)
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
            assert_same(sharded, twin)
        clear("blocks.0.up.weight", "head.weight", "head.bias")
        for side in (sharded, twin):
            language_work(side, 7)
        assert_same(sharded, twin, grads=True)
        sharded.optimizer.zero_grad()
        with lightning_zero.gather(sharded.module, grads=True):
            assert all(p.grad is None for p in sharded.module.parameters())
        assert lightning_zero.grad_norm(sharded.module).item() == 0


# -- whole state dicts ------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1, 3))
@STAGES
@PRECISIONS
def test_state_that_is_taken_out_or_loaded_is_not_shared_with_the_engine(stage: int, precision: str) -> None:
    whole = lambda: (side.engine.state_dict(only_rank_0=False), state_of(side))  # noqa: E731
    with Sharded(Model(), stage=stage, precision=precision) as side, autocast(precision):
        elsewhere = {type(value) is OnRank0 for value in side.engine.state_dict().values()}
        assert elsewhere == {dist.get_rank() > 0}
        train(side, range(2))
        weights, state = whole()
        kept = copy.deepcopy((weights, state))
        train(side, range(2, 4))
        assert_equal((weights, state), kept)
        side.engine.load_state_dict(weights)
        load_state(side, state)
        assert_equal(whole(), kept)
        train(side, range(4, 6))
        assert_equal((weights, state), kept)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (0, "bf16"), (1, "bf16"), (3, "fp32")])
def test_code_of_state_dicts_may_pass_parameters_on_but_not_use_them(stage: int, precision: str) -> None:
    """Where gathered values are the masters, it may."""
    with Sharded(Model(), stage=stage, precision=precision) as side:
        head, whole = side.module.head, lambda: side.engine.state_dict(only_rank_0=False)
        before = whole()
        refused = pytest.raises(RuntimeError, match=r"head\.(weight|bias): .*gather\(module\)")
        for change in (Tensor.detach, Tensor.clone, Tensor.half, lambda value: value.detach().norm()):
            hook = head._register_state_dict_hook(lambda m, state, *_: state.update(new=change(m.weight)))  # noqa: B023
            allowed = (stage, precision) == (1, "fp32") or change is Tensor.detach
            with contextlib.nullcontext() if allowed else refused:
                assert_equal({k: v for k, v in whole().items() if k != "new"}, {**before})
            hook.remove()
        for write in (lambda m, _: nn.init.ones_(m.bias), lambda m, _: setattr(m.weight, "data", m.weight * 2)):
            with refused:
                hook = head.register_load_state_dict_post_hook(lambda m, keys: [write(m, keys), None][1])  # noqa: B023
                side.engine.load_state_dict(before)
            hook.remove()
        missing = {key: value for key, value in before.items() if key != "head.bias"}
        head.register_load_state_dict_pre_hook(lambda m, state, *_: state.setdefault("head.bias", m.bias.detach()))
        side.engine.load_state_dict(missing)
        assert_equal(whole(), before)


@on_ranks(2)
def test_loading_reports_keys_like_torch() -> None:
    with Sharded(Model()) as side:
        state = side.engine.state_dict(only_rank_0=False)
        state["other"] = state.pop("head.bias")
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            side.engine.load_state_dict(state)
        other = {**state, "head.weight": state["head.weight"] + dist.get_rank()}
        with pytest.raises(RuntimeError, match=r"loading head\.weight: expected the same values on all ranks"):
            side.engine.load_state_dict(other, strict=False)
        keys = side.engine.load_state_dict(state, strict=False)
        assert keys.missing_keys == ["head.bias"] and keys.unexpected_keys == ["other"]
