"""Tensor parallelism beside one process that has the whole model and the whole batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor, parallel
from torch.distributed.tensor import Shard as SplitAlong

import lightning_zero
from lightning_zero.engine import Engine
from lightning_zero.engine.whole.state_dicts import load_optimizer_state, optimizer_state
from lightning_zero.mesh.local_leaves import split_of
from lightning_zero.mesh.plans import device_mesh
from lightning_zero.mesh.split import Run, Split
from lightning_zero.settings import ConfigError, ZeroConfig, make_config
from lightning_zero.trainer.steps import differing_replicas, fingerprints
from tests import models
from tests.engine.optimizers import Marked
from tests.engine.sides import MakeOptimizer, Sharded, adamw, sgd
from tests.engine.test_offload import offload
from tests.engine.works import autocast
from tests.harness import on_ranks
from tests.models import Model

WIDTH, VOCABULARY, ROWS, STEPS = 16, 32, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True, True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


PLAN = {
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
    **{f"blocks.*.0.{name}": "colwise" for name in "qkv"},
    "blocks.*.0.o": "rowwise",
    "blocks.*.1.up": "colwise",
    "blocks.*.1.down": "rowwise",
}


def parallelized(module: nn.Module, mesh: Any) -> None:
    """As users of Lightning's ModelParallelStrategy write it."""
    styles = {
        "embedding_rowwise": parallel.RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": parallel.ColwiseParallel(output_layouts=Replicate()),
        "colwise": parallel.ColwiseParallel(),
        "rowwise": parallel.RowwiseParallel(),
    }
    parallel.parallelize_module(module, mesh, {name: styles[style] for name, style in PLAN.items()})


def net(*, tied: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = Model(depth=0)
    module.embed, module.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    module.blocks.extend(nn.Sequential(Attention(), Mlp()) for _ in range(2))
    if tied:
        module.head.weight = module.embed.weight
    return module


def batch(step: int, rows: slice = slice(None)) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, 7), generator=torch.Generator().manual_seed(step))[rows]


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def parts_of(engine: Engine, values: dict[str, Tensor]) -> dict[str, Tensor]:
    infos = {fqn: info for unit in engine.units for info in unit.infos for fqn in info.fqns}
    return {name: infos[name].part_of_saved(value) for name, value in values.items()}


def own_rows(parts: int) -> slice:
    size = ROWS * parts // dist.get_world_size()
    return slice(dist.get_rank() // parts * size, (dist.get_rank() // parts + 1) * size)


Found = dict[str, Any]


def trained(
    module: nn.Module,
    optimizer: Any,
    rows: slice,
    *,
    micro: int = 1,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    data: Callable[[int, slice], Tensor] = batch,
) -> Found:
    """Train with clipping in force. ``norms``: of each gradient of the first step, and of all in each step."""
    found: Found = {"losses": [], "norms": []}
    for step in range(STEPS):
        for number in range(micro):
            value = loss(module, data(10 * step + number, rows)) / micro
            value.backward()
            found["losses"].append(value.detach())
        if step == 0:
            grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
            found["norms"] += [grad.norm() for grad in grads.values()]
            found["grads"] = {name: grad.clone() for name, grad in grads.items()}
        found["norms"].append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found | {"losses": torch.stack(found["losses"]), "norms": torch.stack(found["norms"])}


def alone(make: Callable[[], nn.Module], optimizer: MakeOptimizer = sgd, **how: Any) -> tuple[nn.Module, Any, Found]:
    """A module that one process has trained with the whole batch, its optimizer, and what was found."""
    module = make()
    steps = optimizer(module.parameters())
    return module, steps, trained(module, steps, slice(None), **how)


def assert_alike(
    engine: Engine, ours: Found, expected: nn.Module, found: Found, *, rtol: float = 2e-6, atol: float = 0.0
) -> None:
    """Ranks that have trained ``ours`` have the losses, norms and weights of one process."""
    losses = ours["losses"].clone()
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), found["losses"], rtol=1e-6, atol=atol)
    torch.testing.assert_close(ours["norms"], found["norms"], rtol=rtol, atol=1e-7)
    torch.testing.assert_close(engine.state_dict(only_rank_0=False), expected.state_dict(), rtol=0, atol=2e-6)


def damped_adam(params: Any) -> torch.optim.Optimizer:
    """Without whole steps where a gradient is nothing but roundings."""
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


@contextlib.contextmanager
def sharded(module: nn.Module, make: Any = sgd, **settings: Any) -> Iterator[tuple[Engine, Any]]:
    """The engine and the optimizer of ``module``, which is sharded inside."""
    engine = lightning_zero.shard(module, **settings)
    optimizer = make(module.parameters())
    engine.add_optimizer(optimizer)
    yield engine, optimizer
    engine.release()


@on_ranks(4, full=(2,), timeout=240.0)
@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("parts", "tied"),
    [(2, False), (4, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, True), (4, False)))],
)
def test_every_stage_and_row_equals_one_process(parts: int, tied: bool, micro: int, tmp_path: Path) -> None:
    if dist.get_world_size() < parts:
        return
    places = [("none", 0), ("none", 1), ("none", 2), ("none", 3)]
    places += [("optimizer_cpu", 1), ("cpu", 3), ("optimizer_cpu", 3), ("nvme", 3)]
    make = sgd if tied else damped_adam
    units: dict[str, Any] = {"unit": {"classes": ["Linear"]}, "activation_checkpointing": "blocks"}
    if tied:
        units = {"unit": {"classes": ["Attention", "Mlp"]}}
    expected, steps, found = alone(functools.partial(net, tied=tied), make, micro=micro)
    sums = []
    for row, stage in places:
        module = net(tied=tied, seed=dist.get_rank())  # all take the values of rank 0
        settings = units | offload(row, tmp_path) | {"tensor_parallel": parts, "tensor_plan": PLAN}
        with sharded(module, make, stage=stage, **settings) as (engine, optimizer):
            ours = trained(module, optimizer, own_rows(parts), micro=micro)
            assert_alike(engine, ours, expected, found)
            torch.testing.assert_close(ours["grads"], parts_of(engine, found["grads"]), rtol=1e-5, atol=1e-6)
            states = optimizer_state(engine, optimizer, only_rank_0=False)["state"]
            torch.testing.assert_close(states, steps.state_dict()["state"], rtol=1e-4, atol=2e-6)
            sums.append(fingerprints(engine).tolist())
            assert not differing_replicas(engine).any()
    assert all(other == sums[0] for other in sums)


@on_ranks(4)
def test_stages_in_bf16_have_the_same_digits_near_those_of_one_process() -> None:
    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        with autocast("bf16"):
            return loss_of(module, tokens)

    expected, _, found = alone(net, loss=loss)
    settings = {"tensor_parallel": 2, "tensor_plan": PLAN, "precision": "bf16"}
    weights = []
    for stage, row in ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")):
        module = net()
        with sharded(module, stage=stage, offload=row, **settings) as (engine, optimizer):
            losses = trained(module, optimizer, own_rows(2), loss=loss)["losses"]
            dist.all_reduce(losses)
            torch.testing.assert_close(losses / 4, found["losses"], rtol=1e-2, atol=0)
            weights.append(engine.state_dict(only_rank_0=False))
            torch.testing.assert_close(weights[-1], weights[0], rtol=0, atol=0)
    torch.testing.assert_close(weights[0], expected.state_dict(), rtol=0, atol=5e-3)


@on_ranks(4, full=(2,))
@pytest.mark.parametrize("make", [adamw, pytest.param(functools.partial(Marked, lr=0.01), marks=pytest.mark.full)])
def test_state_of_one_process_goes_on_in_parts(make: Any) -> None:
    @contextlib.contextmanager
    def loaded(**settings: Any) -> Iterator[tuple[nn.Module, Engine, Any]]:
        module = net(seed=7)
        with sharded(module, make, **settings) as (engine, optimizer):
            engine.load_state_dict(weights)
            load_optimizer_state(engine, optimizer, state)
            yield module, engine, optimizer

    expected, steps, _ = alone(net, make)
    weights, state = copy.deepcopy(expected.state_dict()), copy.deepcopy(steps.state_dict())
    found = trained(expected, steps, slice(None))
    with loaded(stage=2) as (_, engine, _):
        whole = fingerprints(engine).sum(0)
    for stage, later in ((0, ("zero3", "cpu")), (3, ("zero1", None))):
        with loaded(stage=stage, tensor_parallel=2, tensor_plan=PLAN) as (module, engine, optimizer):
            assert torch.equal(fingerprints(engine).sum(0), whole)
            assert_alike(engine, trained(module, optimizer, own_rows(2)), expected, found)
            engine.restage(*later)
            torch.testing.assert_close(engine.state_dict(only_rank_0=False), expected.state_dict(), rtol=0, atol=2e-6)


class Scaled(nn.Module):
    """Heads are normed and scaled between two split layers: what is whole has a part of its gradient on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.LayerNorm(4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


STYLES = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}


@on_ranks(4)
def test_gradients_of_whole_parameters_of_a_ranks_own_heads_are_summed() -> None:
    torch.manual_seed(0)
    expected, x = Scaled(), torch.randn(4, WIDTH)
    expected(x).square().mean().backward()
    norms = {name: param.grad.norm() for name, param in expected.named_parameters() if param.grad is not None}
    for stage in (0, 3):
        module = copy.deepcopy(expected)
        module.zero_grad()
        with sharded(module, stage=stage, tensor_parallel=2, tensor_plan=STYLES):
            module(x[own_rows(2)]).square().mean().backward()
            found = {name: param.grad.norm() for name, param in module.named_parameters() if param.grad is not None}
            torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_meshes_that_are_not_the_runs_are_refused() -> None:
    mesh = device_mesh("cpu", 2)

    def split(module: nn.Module, along: str = "tensor_parallel") -> nn.Module:
        return parallel.parallelize_module(
            module, mesh[along], {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        )

    slopes = Scaled()
    slopes.register_buffer("slopes", distribute_tensor(torch.ones(4), mesh["tensor_parallel"], [SplitAlong(0)]))
    of_run = Scaled()
    engine = lightning_zero.shard(of_run, tensor_parallel=2, tensor_plan=STYLES)
    with (
        pytest.raises(RuntimeError, match="from_rank=.: expected parameters that a rank has whole"),
        lightning_zero.gather(of_run, from_rank=0),
    ):
        pass
    engine.release()
    for module, settings, words in (
        (split(Scaled(), "data_parallel"), {}, r"up.weight is a DTensor over ranks \[[01], [23]\] .*self.device_mesh"),
        (split(Scaled()), {"tensor_plan": STYLES}, "^tensor_plan: expected none for a module that configure_model"),
        (
            split(Scaled()),
            {"expert_parallel": 4},
            "^tensor_parallel=2, expert_parallel=4: expected one of the two with DTensors",
        ),
        (of_run, {"tensor_parallel": 1}, r"an earlier run has split the module by .*tensor_parallel.: 2"),
        (of_run, {"tensor_parallel": 1, "expert_parallel": 2}, "an earlier run has split the module"),
        (of_run, {"tensor_parallel": 4, "tensor_plan": STYLES}, "an earlier run has split the module"),
        (split(slopes), {}, r"buffer slopes is split: expected a whole one"),
        (Scaled(), {"tensor_plan": {"norm": "colwise"}}, "expected colwise for nn.Linear or nn.Embedding, .*norm"),
    ):
        with pytest.raises(ConfigError, match=words):
            lightning_zero.shard(module, **{"tensor_parallel": 2, **settings})


@on_ranks(4)
def test_writes_to_split_parameters_are_compared_between_ranks_of_one_part() -> None:
    def halve(block: Any, *_: Any) -> None:
        block[0].q.weight.data.mul_(0.5)

    def differ(block: Any, *_: Any) -> None:
        block[0].k.weight.data.add_(float(dist.get_rank() == 3))

    expected, module = net(), net()
    with sharded(module, stage=3, tensor_parallel=2, tensor_plan=PLAN) as (engine, _):
        for one, rows in ((expected, slice(None)), (module, own_rows(2))):
            one.blocks[0].register_forward_hook(halve)
            loss_of(one, batch(0, rows)).backward()
        torch.testing.assert_close(engine.state_dict(only_rank_0=False), expected.state_dict(), rtol=0, atol=0)
        module.blocks[1].register_forward_hook(differ)
        with pytest.raises(RuntimeError, match=r"blocks.1.0.k.weight: written to in a step, with other values"):
            loss_of(module, batch(0, own_rows(2))).backward()


@on_ranks(2)
def test_module_on_meta_gets_the_values_of_the_whole_module() -> None:
    """Those of ``reset_parameters``, which depend on the sizes of the whole matrix."""
    found = []
    for settings in ({}, {"tensor_parallel": 2, "tensor_plan": PLAN}):
        with torch.device("meta"):
            module = net()
        torch.manual_seed(3)
        with sharded(module, stage=3, unit={"classes": ["Attention", "Mlp"]}, **settings) as (engine, _):
            found.append(engine.state_dict(only_rank_0=False))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@on_ranks(2)
def test_module_that_its_user_has_split_keeps_its_styles() -> None:
    """Also norms whose activations are split along the sequence: their gradients are partial on each rank."""
    expected, _, found = alone(net)
    along = parallel.PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=SplitAlong(1), use_local_output=False
    )
    styles = {
        "norm": parallel.SequenceParallel(use_local_output=False),
        "up": parallel.ColwiseParallel(input_layouts=SplitAlong(1)),
        "down": parallel.RowwiseParallel(),
    }
    for stage in (0, 3):
        module = net(seed=dist.get_rank())
        mesh = device_mesh("cpu", 2)["tensor_parallel"]
        for attention, mlp in module.blocks:
            parallel.parallelize_module(mlp, mesh, {"norm": along})  # its hook is the first
            parallel.parallelize_module(mlp, mesh, styles)
            parallel.parallelize_module(
                attention, mesh, {n: parallel.ColwiseParallel() for n in "qkv"} | {"o": parallel.RowwiseParallel()}
            )
        with sharded(module, stage=stage, tensor_parallel=2) as (engine, optimizer):
            assert split_of(module.blocks[0][0].q.weight) is not None
            assert_alike(engine, trained(module, optimizer, own_rows(2)), expected, found)


@pytest.mark.parametrize(("settings", "words"), [
    *(
        (settings, "zero.tensor_parallel=2: expected 1 with zero")  # what is not proved with parts
        for settings in (
            {"sequence_parallel": 2},
            {"compile": "blocks"},
            {"stage": 1, "optimizer": {"state_dtype": "bf16"}, "precision": "bf16"},
            {"gather_after_fit": True},
            {"hybrid_shard": "node"},
            {"precision": "float8"},
        )
    ),
    ({"tensor_parallel": 1, "tensor_plan": PLAN}, "zero.tensor_plan: expected none with zero.tensor_parallel=1"),
    ({"tensor_plan": {"head": "columns"}}, r"zero.tensor_plan: expected a mapping of names to one of colwise, row"),
], ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(ZeroConfig(), **{"tensor_parallel": 2, **settings})


@on_ranks(2)
def test_modules_that_cannot_be_split_are_refused_on_all_ranks() -> None:
    compiled = net()
    compiled.blocks[0][1].compile(backend="eager")
    for module, settings, words in (
        (net(), {}, "expected a model of transformers .* or a tensor_plan, got none"),
        (net(), {"tensor_plan": {"layers.*.q": "colwise"}}, r"^tensor_plan: .*got 'layers.\*.q', which splits"),
        (
            net(tied=True),
            {"tensor_plan": {"head": "colwise_gather_output"}},
            "expected one split of the tied parameter weight of Embedding and Linear",
        ),
        (net(), {"tensor_plan": PLAN, "tensor_parallel": 3}, r"^tensor_parallel: .* divides the 2 rank\(s\)"),
        (compiled, {"tensor_plan": PLAN}, "^tensor_parallel: expected split layers .* got a compiled Mlp that"),
    ):
        with pytest.raises(ConfigError, match=words):
            lightning_zero.shard(module, **{"tensor_parallel": 2, **settings})
    module = net()
    with sharded(module, tensor_parallel=2, tensor_plan=PLAN) as (engine, _):
        module.head.compile(backend="eager")
        with pytest.raises(ConfigError, match="got a compiled Model that holds split layers"):
            module.compile(backend="eager")
        matrices = [p for p in module.parameters() if p.dim() == 2]
        with pytest.raises(ConfigError, match="zero.tensor_parallel=2: expected 1 with Muon, which steps whole"):
            engine.add_optimizer(torch.optim.Muon(matrices))


@on_ranks(2, full=(4,))
def test_experts_on_their_ranks_equal_one_process() -> None:
    """The mixture of the example. In the last step all tokens go to one expert, so that other ranks have none."""
    example = load_example("expert_parallel")

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), example.MixtureOfExperts(8, 4), nn.Linear(8, 1))

    def data(step: int, rows: slice) -> Tensor:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return (x[:1].expand(8, 4) if step == 10 * (STEPS - 1) else x)[rows]

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return (module(x).squeeze(1) - x.prod(1)).square().mean()

    world = dist.get_world_size()
    rows = slice(8 // world * dist.get_rank(), 8 // world * (dist.get_rank() + 1))
    expected, steps, found = alone(make, loss=loss, data=data)
    for stage, size in itertools.product(range(4), {2, world}):
        module = make()
        module[1].split(device_mesh("cpu", size, "expert_parallel")["expert_parallel"])
        with sharded(module, stage=stage, expert_parallel=size) as (engine, optimizer):
            assert module[1].experts.up.shape[0] == 4 // size
            ours = trained(module, optimizer, rows, loss=loss, data=data)
            assert_alike(engine, ours, expected, found, rtol=1e-5, atol=1e-7)
            state = optimizer_state(engine, optimizer, only_rank_0=False)["state"]
            torch.testing.assert_close(state, steps.state_dict()["state"], rtol=1e-5, atol=1e-6)
            assert not differing_replicas(engine).any()


def load_example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


of_transformers = functools.partial(models.of_transformers, use_cache=False)


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize("kind, tensor, expert", [("llama", 2, 1), *itertools.product(["qwen3_moe"], [1, 2], [2, 4])])
def test_plans_of_transformers_equal_one_process(kind: str, tensor: int, expert: int) -> None:
    """Also without gradients, where their layers take another way; the router's gradient among all."""
    make = functools.partial(of_transformers, kind, tie_word_embeddings=kind == "llama")

    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            without = module(input_ids=tokens, labels=tokens).loss
        value: Tensor = module(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(without, value.detach(), rtol=1e-6, atol=0)
        return value

    expected, _, found = alone(make, loss=loss, micro=2)
    for stage in (0, 3):
        module = make(seed=dist.get_rank())  # all take the values of rank 0
        settings = {"tensor_parallel": tensor, "expert_parallel": expert}
        with sharded(module, stage=stage, **settings) as (engine, optimizer):
            assert sum(split_of(param) is not None for param in module.parameters()) >= (13 if tensor > 1 else 4)
            ours = trained(module, optimizer, own_rows(tensor), loss=loss, micro=2)
            assert_alike(engine, ours, expected, found, rtol=1e-5)
    with pytest.raises(ConfigError, match="expected a number that divides num_key_value_heads=2 of"):
        lightning_zero.shard(of_transformers(kind), tensor_parallel=4)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_boxes_and_reads_of_a_part_are_those_of_its_slices(dim: int) -> None:
    whole = torch.arange(4 * 6 * 8).view(4, 6, 8)
    size = whole.shape[dim]
    for cut in (((Run(0, 3),), (Run(3, size - 3),)), ((Run(0, 1), Run(2, 1)), (Run(1, 1), Run(3, size - 3)))):
        for number in range(2):
            split = Split(tuple(whole.shape), dim, cut, number, "tensor_parallel")
            part = split.cut(whole)
            flat = part.reshape(-1)
            for start, stop in itertools.combinations((0, 1, 5, 17, len(flat) // 2, len(flat)), 2):
                expected = flat[start:stop]
                stop = min(stop, len(flat))
                found = [whole.view(-1)[p.whole_start :][: p.numel] for p in split.pieces(start, stop)]
                assert torch.equal(torch.cat(found), expected)
                assert torch.equal(split.read(lambda low, high: whole.view(-1)[low:high], start, stop), expected)
                assert torch.equal(split.positions(start, stop, torch.device("cpu")), expected)
                covered = torch.zeros(stop - start, dtype=torch.bool)
                for box, first in split.boxes(start, stop):
                    at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                    assert torch.equal(whole[at].reshape(-1), flat[first : first + box.numel])
                    assert not covered[first - start : first - start + box.numel].any()
                    covered[first - start : first - start + box.numel] = True
                assert covered.all()
        assert torch.equal(split.join([replace(split, part=n).cut(whole) for n in range(2)]), whole)


@on_ranks(4)
def test_nodes_hold_no_replicas_where_parameters_are_split() -> None:
    settings: dict[str, Any] = {"stage": 3, "precision": "bf16", "tensor_plan": PLAN}
    for parts, node_ranks in ((2, 2), (4, 2), (2, 1)):  # small enough for replicas
        with Sharded(net(), node=f"node {dist.get_rank() // node_ranks}", tensor_parallel=parts, **settings) as side:
            assert side.engine.comm.ranks.topology.shard_groups == ((0, 1, 2, 3),)
