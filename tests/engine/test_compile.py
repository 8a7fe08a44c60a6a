"""torch.compile over sharded modules: every form gives what the twin gives, with one graph for a class of block."""

from __future__ import annotations

import copy
import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch.fx import GraphModule

import lightning_zero
from lightning_zero.settings import ConfigError
from tests.engine.sides import Sharded, Twin, beside_twin, sgd, step_and_clear
from tests.engine.support import assert_same, pairwise_selection
from tests.engine.works import accumulate, autocast, loss_at, tokens, train_both
from tests.harness import on_ranks, run
from tests.models import Model


class Counting:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def blocks(self) -> int:
        """Graphs that hold the work of a block."""
        return sum(any("tanh" in str(node.target) for node in graph.graph.nodes) for graph in self.graphs)


def _each_block(module: nn.Module, **settings: Any) -> None:
    for block in module.blocks:
        block.compile(**settings)


def _each_forward(module: nn.Module, **settings: Any) -> None:
    for block in module.blocks:
        block.forward = torch.compile(block.forward, **settings)


def _wrapped(module: nn.Module, **settings: Any) -> None:
    module.blocks = nn.ModuleList(torch.compile(block, **settings) for block in module.blocks)


COUNT = Counting()
register_backend(COUNT, name="counting")  # for settings, where a backend is a name
FORMS: dict[str, Callable[..., None]] = {
    "blocks": _each_block,
    "forwards": _each_forward,
    "wrapped": _wrapped,
    "root": nn.Module.compile,
}
VALUES = {
    "form": (*FORMS, "setting"),
    "later": (False, True),  # after sharding
    "fullgraph": (False, True),
    "stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer_cpu", "cpu"),
    "precision": ("fp32", "bf16", "bf16_true"),
    "recompute": ("none", "blocks"),
}
Case = namedtuple("Case", VALUES)


def possible(case: Case) -> bool:
    if (case.form == "setting" and not case.later) or (case.form == "wrapped" and case.later):
        return False
    if case.form == "root" and case.fullgraph:
        return False  # refused
    if case.form == "forwards" and case.later and case.recompute != "none":
        return False  # what is compiled then is the checkpoint, not what it computes
    return case.offload == "none" or case.stage == 3 or (case.offload == "optimizer_cpu" and case.stage > 0)


MATRIX = list(filter(possible, map(Case._make, itertools.product(*VALUES.values()))))


def _side(module: nn.Module, case: Case) -> Sharded:
    """``module`` sharded and compiled as ``case`` says."""
    _forget()
    settings: dict[str, Any] = {"offload": case.offload, "activation_checkpointing": case.recompute}
    if case.form == "setting":
        settings["compile"] = {"name": "blocks", "arguments": {"backend": "counting"}}
    elif not case.later:
        FORMS[case.form](module, backend=COUNT, fullgraph=case.fullgraph)
    sharded = Sharded(module, stage=case.stage, precision=case.precision, **settings)
    if case.later and case.form != "setting":
        FORMS[case.form](module, backend=COUNT, fullgraph=case.fullgraph)
    return sharded


def _forget() -> None:
    torch._dynamo.reset()
    COUNT.graphs.clear()


def _check(case: Case) -> None:
    torch.manual_seed(3)
    module = Model(depth=4)
    twin = Twin(module, precision=case.precision, each=case.stage >= 2)
    with _side(module, case) as sharded:
        found = []
        for step in range(3):
            with autocast(case.precision):
                assert torch.equal(*(accumulate(side, step, 2) for side in (sharded, twin))), step
                with torch.no_grad():
                    assert torch.equal(*(loss_at(side.module, step, 5) for side in (sharded, twin)))
            step_and_clear(sharded, twin)
            assert_same(sharded, twin, what=f"step {step}: ")
            found.append(len(COUNT.graphs))
        assert COUNT.blocks() == 2  # one for all blocks with gradients, and one without
        assert found[1:] == found[:1] * 2, found


@pytest.mark.sample
@pytest.mark.parametrize("case", pairwise_selection(MATRIX), ids=lambda case: "-".join(map(str, case)))
def test_compiled_training_equals_the_plain_twin(case: Case) -> None:
    run(2, _check, case)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_graphs_with_a_backward_of_their_own(backend: str, stage: int, recompute: str) -> None:
    """A compiled backward reads weights that its forward has saved, after they were dropped in between."""
    torch._dynamo.reset()
    compiled = {"name": "blocks", "arguments": {"backend": backend}}
    sharded, twin = beside_twin(stage=stage, optimizer=sgd, compile=compiled, activation_checkpointing=recompute)
    for block in twin.module.blocks:
        block.compile(backend=backend)
    with sharded:
        for step in range(3):
            train_both((sharded, twin), [step])
            assert_same(sharded, twin, tolerance=1e-6 if backend == "inductor" else 0.0, what=f"step {step}: ")


def has_own(module: nn.Module) -> bool:
    return any({"forward", "compile"} & set(vars(inner)) for inner in module.modules())


@on_ranks(1)
@pytest.mark.parametrize("later", [False, True])
def test_release_gives_the_modules_back_as_they_were(later: bool) -> None:
    _forget()
    module = Model(depth=2)
    first, second = module.blocks
    if not later:
        first.compile(backend=COUNT)
    side = Sharded(module, stage=3, activation_checkpointing="blocks")
    if later:
        first.compile(backend=COUNT)
    with pytest.raises(TypeError):
        second.compile(unknown=True)
    assert first._compiled_call_impl is None
    side.engine.release()
    assert first._compiled_call_impl is not None and second._compiled_call_impl is None and not has_own(module)
    module(tokens(0))
    assert COUNT.blocks() == 1


@on_ranks(1)
def test_a_copy_is_plain() -> None:
    module = Model(depth=2)
    with _side(module, Case("setting", True, False, 3, "cpu", "fp32", "none")):
        with lightning_zero.gather(module):
            copied = copy.deepcopy(module)
            expected = loss_at(module, 0)
        made = len(COUNT.graphs)
        assert torch.equal(loss_at(copied, 0), expected)
        assert len(COUNT.graphs) == made and not has_own(copied)


@on_ranks(2)
def test_cuda_graphs_are_refused_where_parameters_come_and_go() -> None:
    module = Model(depth=2)
    with Sharded(module, stage=3):
        for target in (module, module.blocks[1]):
            with pytest.raises(ConfigError, match="compiled with CUDA graphs.*max-autotune-no-cudagraphs"):
                target.compile(mode="reduce-overhead")
        assert "forward" not in vars(module.blocks[1])
    with pytest.raises(ConfigError, match=r"^compile\['arguments'\]: .*fixed addresses.*'max-autotune'"):
        lightning_zero.shard(Model(), compile={"name": "blocks", "arguments": {"mode": "max-autotune"}})


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("form", ["blocks", "forwards", "wrapped"])
def test_cuda_graphs_of_before_are_refused_where_parameters_move(form: str) -> None:
    def build(mode: str) -> nn.Module:
        module = Model()
        FORMS[form](module, mode=mode)
        return module

    with pytest.raises(ConfigError, match=r"blocks.0 is compiled with CUDA graphs.*max-autotune-no-cudagraphs"):
        Sharded(build("reduce-overhead"), stage=3)
    for kept, stage in (("reduce-overhead", 2), ("max-autotune-no-cudagraphs", 3)):
        Sharded(build(kept), stage=stage).engine.release()


@on_ranks(1)
def test_one_graph_around_units_is_refused() -> None:
    """Units are gathered between graphs."""
    module = Model(depth=2)
    module.compile(backend="eager", fullgraph=True)
    with pytest.raises(ConfigError, match=r"Model is compiled with fullgraph=True, and holds units.*block\.compile"):
        lightning_zero.shard(module, device="cpu")
    with Sharded(Model(depth=2), stage=3) as side:
        for around in (side.module, side.module.blocks):
            with pytest.raises(ConfigError, match=r"fullgraph=True, and holds units"):
                around.compile(backend="eager", fullgraph=True)
            assert around._compiled_call_impl is None
        assert not any("forward" in vars(inner) for inner in side.module.modules())


@on_ranks(1)
def test_what_has_no_effect_is_refused() -> None:
    eager = {"name": "blocks", "arguments": {"backend": "eager"}}
    for settings, says in (
        ({"arguments": {"dynamic": True}}, r"^compile\['arguments'\] has no effect with compile='none'"),
        (
            {"name": "blocks", "arguments": {"mod": "default"}},
            r"^compile\['arguments'\]\['mod'\]: .*Write compile\['arguments'\]\['mode'\]",
        ),
        (eager, r"^compile='blocks': the model has no blocks"),
    ):
        with pytest.raises(ConfigError, match=says):
            lightning_zero.shard(nn.Linear(3, 3), compile=settings, device="cpu")


@on_ranks(1)
def test_a_scripted_module_is_refused_and_a_traced_one_trains() -> None:
    for form, refused in ((torch.jit.script, True), (lambda m: torch.jit.trace(m, torch.ones(1, 4)), False)):
        module = nn.Sequential(nn.Linear(4, 4), form(nn.Linear(4, 4)))
        if refused:
            with pytest.raises(ConfigError, match=r"1: expected .* torch.jit.script .* Leave torch.jit.script out"):
                lightning_zero.shard(module, stage=3, device="cpu")
            continue
        engine = lightning_zero.shard(module, stage=3, device="cpu")
        module(torch.ones(1, 4)).sum().backward()
        engine.release()
