"""Reading and changing sharded parameters and gradients, and what refuses to be read or changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from tests.engine.support import Model, Sharded, Twin, assert_absent, assert_same, autocast, language_work
from tests.harness import on_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])


def trained(steps: int = 1, **config: Any) -> tuple[Sharded, Twin]:
    """A sharded module and its twin after a few steps, and a backward whose gradients are still there."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, precision=config.get("precision", "fp32"), each=config.get("stage", 3) >= 2)
    sharded = Sharded(module, **config)
    for step in range(steps + 1):
        for side in (sharded, twin):
            with autocast(config.get("precision", "fp32")):
                language_work(side, step)
            if step < steps:
                side.step()
                side.zero_grad()
    return sharded, twin


# -- gather -----------------------------------------------------------------------------------------------------------


@on_ranks(3, full=(1, 2))
@STAGES
@PRECISIONS
def test_what_is_written_inside_gather_is_kept(stage: int, precision: str) -> None:
    sharded, twin = trained(stage=stage, precision=precision)
    with sharded:
        with lightning_zero.gather(sharded.module), torch.no_grad():
            sharded.module.head.weight.mul_(3)
            sharded.module.blocks[1].norm.bias.fill_(0.125)
            sharded.module.embed.weight.data = torch.full_like(sharded.module.embed.weight, 0.3)
        masters = dict(zip(dict(twin.module.named_parameters()), twin.masters.values(), strict=True))
        masters["head.weight"].value.mul_(3)
        masters["blocks.1.norm.bias"].value.fill_(0.125)
        masters["embed.weight"].value.fill_(0.3)
        assert_same(sharded, twin)
        for side in (sharded, twin):
            side.step()
            side.zero_grad()
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
        with lightning_zero.gather(side.module):
            assert side.module.head.weight.unique().tolist() == [1.0]


@on_ranks(2)
@STAGES
def test_changes_to_gradients_inside_gather_are_kept(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        with lightning_zero.gather(sharded.module, grads=True):
            sharded.module.head.weight.grad.mul_(0.5)
            sharded.module.blocks[0].up.bias.grad = None
        params = dict(twin.module.named_parameters())
        twin.grads[params["head.weight"]].mul_(0.5)
        del twin.grads[params["blocks.0.up.bias"]]
        assert_same(sharded, twin, grads=True)
        for side in (sharded, twin):
            side.step()
        assert_same(sharded, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_loaded_in_a_step_comes_after_what_was_written_before(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        state = side.engine.state_dict(only_rank_0=False)
        with side.engine.step_scope():
            with torch.no_grad():
                for param in side.module.parameters():
                    param.mul_(0.5)
            side.engine.load_state_dict(state)
        found = side.engine.state_dict(only_rank_0=False)
        assert all(torch.equal(found[name], value) for name, value in state.items())


@on_ranks(2)
def test_gather_of_one_parameter_or_submodule_and_nested() -> None:
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


@on_ranks(2)
def test_an_exception_inside_gather_drops_what_was_written() -> None:
    with Sharded(Model()) as side:
        with pytest.raises(ZeroDivisionError), lightning_zero.gather(side.module):
            side.module.head.weight.data.fill_(7)
            raise ZeroDivisionError
        assert_absent(side.module.head.weight)
        with lightning_zero.gather(side.module):
            assert not (side.module.head.weight == 7).any()


@on_ranks(1, 2)
def test_gather_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="sharded module"), lightning_zero.gather(nn.Linear(2, 2)):
        pass


@on_ranks(2)
@STAGES
def test_gradients_that_were_cleared_or_zeroed_show_so(stage: int) -> None:
    sharded, _ = trained(stage=stage)
    with sharded:
        sharded.optimizer.zero_grad(set_to_none=False)
        assert lightning_zero.grad_norm(sharded.module).item() == 0
        with lightning_zero.gather(sharded.module, grads=True):
            assert all(p.grad is not None and not p.grad.any() for p in sharded.module.parameters())
        sharded.optimizer.zero_grad()
        with lightning_zero.gather(sharded.module, grads=True):
            assert all(p.grad is None for p in sharded.module.parameters())
        assert lightning_zero.grad_norm(sharded.module).item() == 0


# -- placeholders -----------------------------------------------------------------------------------------------------


@on_ranks(2)
@PRECISIONS
def test_sharded_parameters_tell_the_truth_about_everything_but_values(precision: str) -> None:
    plain = Model()
    with Sharded(Model(), precision=precision) as side:
        for (name, param), other in zip(side.module.named_parameters(), plain.parameters(), strict=True):
            assert param.shape == other.shape and param.ndim == other.ndim and param.numel() == other.numel(), name
            assert param.requires_grad and param.device.type == "cpu" and param.is_leaf and len(param) == len(other)
            assert isinstance(param, nn.Parameter) and param in {param} and param.grad is None
            assert torch.zeros_like(param).shape == torch.randn(other.shape).view_as(param).shape == other.shape
            assert param.type() == torch.empty(0, dtype=param.dtype).type() and not param.is_shared()
            assert "sharded" in repr(param) and "sharded" in f"{param}"
            assert_absent(param)
        assert sum(p.numel() for p in side.module.parameters()) == sum(p.numel() for p in plain.parameters())


READS_AND_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1.0),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "xavier": lambda p: nn.init.xavier_uniform_(p),
    "data": lambda p: p.data,
    "T": lambda p: p.T,
    "norm": lambda p: p.norm(),
    "item": lambda p: p[0, 0].item(),
    "cat": lambda p: torch.cat([torch.ones(p.shape), p]),
    "foreach": lambda p: torch._foreach_add_([torch.ones(p.shape)], [p]),
    "numpy": lambda p: p.detach().numpy(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "clone": lambda p: p.clone(),
    "type": lambda p: p.type(torch.float64),
    "type by name": lambda p: p.type(dtype=torch.float64),
    "deepcopy": copy.deepcopy,
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(READS_AND_WRITES))
def test_reads_and_writes_between_steps_are_refused_by_name(name: str) -> None:
    with Sharded(Model()) as side:
        weight = side.module.blocks[1].up.weight
        for _ in range(2):
            message = r"blocks\.1\.up\.weight is sharded.*gather"
            with torch.no_grad(), pytest.raises(RuntimeError, match=message):
                READS_AND_WRITES[name](weight)
            language_work(side, 0)
            side.step()
            side.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", ["none", "optimizer_cpu"])
def test_parameters_that_are_on_their_way_after_a_step_are_waited_for(stage: int, offload: str) -> None:
    sharded, twin = trained(stage=stage, offload=offload)
    with sharded:
        for side in (sharded, twin):
            side.step()
        for own, other in zip(sharded.module.parameters(), twin.module.parameters(), strict=True):
            assert torch.equal(own, other) and torch.equal(own.data, other)


@on_ranks(2)
@STAGES
@PRECISIONS
def test_copies_conversions_and_state_dicts_are_refused(stage: int, precision: str) -> None:
    sharded, _ = trained(stage=stage, precision=precision)
    module = sharded.module
    plain = stage == 0 and precision != "bf16"
    with sharded:
        for what, call in (
            ("converting", lambda: module.to(torch.float64)),
            ("converting", module.half),
            ("deepcopy", lambda: copy.deepcopy(module)),
            ("state_dict", module.state_dict),
            ("state_dict", lambda: module.load_state_dict({})),
        ):
            if plain and call == module.state_dict:
                assert module.state_dict()["head.weight"].isfinite().all()
                continue
            with pytest.raises(RuntimeError, match=rf"{what}.*gather"):
                call()
        with lightning_zero.gather(module):
            copied = copy.deepcopy(module)
            state = module.state_dict()
            module.load_state_dict({key: value * 2 for key, value in state.items()})
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())
        copied.to(torch.float64)
        with lightning_zero.gather(module):
            for own, other in zip(module.parameters(), copied.parameters(), strict=True):
                assert torch.equal(own, 2 * other.to(own.dtype))


@on_ranks(2)
def test_state_dicts_of_submodules_are_refused_too() -> None:
    with Sharded(Model()) as side:
        for call in (
            side.module.blocks.state_dict,
            lambda: copy.deepcopy(side.module.blocks[0]),
            side.module.head.half,
        ):
            with pytest.raises(RuntimeError, match="gather"):
                call()


# -- gradients --------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@STAGES
def test_gradients_cannot_be_used_by_mistake(stage: int) -> None:
    sharded, _ = trained(stage=stage)
    module = sharded.module
    weight = module.head.weight
    with sharded:
        assert weight.grad is not None and weight.grad.shape == weight.shape
        for use in (
            lambda: weight.grad.mul_(weight.grad),
            lambda: weight.grad.add_(1),
            lambda: weight.grad.pow_(2),
            lambda: weight.grad.copy_(torch.zeros_like(weight)),
        ):
            with pytest.raises(RuntimeError, match=r"gradient of \S+ is sharded.*gather"):
                use()
        assert "head.weight" in repr(weight.grad)


@on_ranks(2)
def test_norms_and_clipping_inside_gather_are_torchs() -> None:
    sharded, _ = trained(stage=3)
    module = sharded.module
    with sharded:
        before = lightning_zero.grad_norm(module)
        with lightning_zero.gather(module, grads=True):
            for use in (
                lambda: lightning_zero.grad_norm(module),
                lambda: lightning_zero.clip_grad_norm_(module, 0.1),
            ):
                with pytest.raises(RuntimeError, match="a whole tensor here.*clip_grad_norm_"):
                    use()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            torch.testing.assert_close(norm, before)
        assert lightning_zero.grad_norm(module) == pytest.approx(0.1, rel=1e-4)


@on_ranks(2)
def test_a_gradient_that_was_assigned_is_refused_at_the_step() -> None:
    sharded, _ = trained()
    with sharded:
        sharded.module.head.weight.grad = torch.zeros_like(sharded.module.head.weight)
        with pytest.raises(RuntimeError, match=r"head\.weight\.grad was assigned by hand.*gather"):
            sharded.step()
        sharded.module.head.weight.grad = None
        sharded.step()


@on_ranks(2, full=(3,))
@STAGES
def test_zeroed_gradients_are_gradients_and_cleared_ones_are_not(stage: int) -> None:
    """``zero_grad(set_to_none=False)``: decay and momentum go on; and partly cleared gradients."""
    sharded, twin = trained(stage=stage)
    params = dict(twin.module.named_parameters())
    with sharded:
        for step in range(1, 4):
            sharded.optimizer.zero_grad(set_to_none=False)
            for grad in twin.grads.values():
                grad.zero_()
            if step == 2:
                for side in (sharded, twin):
                    side.module.embed.weight.grad = None
                twin.grads.pop(params["embed.weight"])
            if step != 3:
                for side in (sharded, twin):
                    language_work(side, step)
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
            assert_same(sharded, twin)


@on_ranks(2)
@STAGES
def test_zeroing_some_parameters_between_backwards(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    params = dict(twin.module.named_parameters())
    with sharded:
        sharded.module.blocks[0].up.weight.grad = None
        sharded.module.head.zero_grad()
        for name in ("blocks.0.up.weight", "head.weight", "head.bias"):
            twin.grads.pop(params[name])
        for side in (sharded, twin):
            language_work(side, 7)
        assert_same(sharded, twin, grads=True)


# -- whole state dicts ------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1, 3))
@STAGES
@PRECISIONS
def test_module_state_dict_holds_full_values_on_rank_0(stage: int, precision: str) -> None:
    sharded, twin = trained(stage=stage, precision=precision)
    with sharded:
        state = sharded.engine.state_dict()
        if dist.get_rank():
            assert state == {}
        else:
            for name, master in zip(state, twin.masters.values(), strict=True):
                assert torch.equal(state[name], master.value), name
        everywhere = sharded.engine.state_dict(only_rank_0=False)
        sharded.engine.load_state_dict({k: v * 2 for k, v in everywhere.items()})
        for master in twin.masters.values():
            master.value.mul_(2)
        assert_same(sharded, twin)


@on_ranks(2)
def test_loading_reports_keys_like_torch() -> None:
    with Sharded(Model()) as side:
        state = side.engine.state_dict(only_rank_0=False)
        state["other"] = state.pop("head.bias")
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            side.engine.load_state_dict(state)
        keys = side.engine.load_state_dict(state, strict=False)
        assert keys.missing_keys == ["head.bias"] and keys.unexpected_keys == ["other"]


@on_ranks(2)
def test_tied_parameters_share_one_tensor_in_the_state_dict() -> None:
    module = Model()
    module.head.weight = module.embed.weight
    with Sharded(module) as side:
        state = side.engine.state_dict(only_rank_0=False)
        assert state["head.weight"] is state["embed.weight"]
