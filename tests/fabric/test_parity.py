"""A loop of Fabric's gives under a ZeRO strategy what it gives under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from tests.fabric.toys import Run, assert_equal, fabric, make, sgd, step, train, weights
from tests.harness import on_ranks
from tests.trainer.toys import FEATURES, assert_weights, loader

pytestmark = pytest.mark.full

PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero3_offload", "zero3_offload_optimizer")


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_training_is_that_of_ddp_to_the_bit(preset: str) -> None:
    assert_equal(train(preset, epochs=2), train("ddp", epochs=2))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3_offload"])
@pytest.mark.parametrize("clip", [{"max_norm": 0.05}, {"max_norm": 0.1, "norm_type": float("inf")}, {"clip_val": 1e-3}])
def test_accumulation_and_clipping_are_those_of_ddp(preset: str, clip: dict[str, Any]) -> None:
    for every in (1, 3):
        found = train(preset, every=every, clip=clip, optimizer=sgd)
        expected = train("ddp", every=every, clip=clip, optimizer=sgd)
        assert_equal(found, expected, tolerance=1e-5)
        assert len(found.norms) == (0 if "clip_val" in clip else 6 // every)
    free = train(preset, every=3, optimizer=sgd)
    assert any(not torch.equal(w, weights(free)[n]) for n, w in weights(found).items())  # it has clipped


@on_ranks(2)
def test_no_backward_sync_sends_nothing() -> None:
    """Where gradients rest replicated; and all is sent by the last backward."""
    run = train("zero1")
    comm = engine_of(run.model.module).comm
    x, y = next(iter(loader()))

    def messages(synchronize: bool) -> int:
        before = comm.counts.total()
        with run.fabric.no_backward_sync(run.model, enabled=not synchronize):
            run.fabric.backward(nn.functional.mse_loss(run.model(x), y))
        return comm.counts.total() - before

    assert messages(False) == 0
    assert messages(True) > 0


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_are_those_of_ddp(preset: str, precision: str) -> None:
    found, expected = train(preset, precision=precision), train("ddp", precision=precision)
    tolerance = 1e-12 if precision == "64-true" else 0.03
    assert_equal(found, expected, tolerance=tolerance)
    x = torch.ones(2, FEATURES)
    outputs = [run.model(x) for run in (found, expected)]
    assert outputs[0].dtype == outputs[1].dtype == torch.float32  # what fabric.setup returned converts outputs


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3_offload"])
def test_two_models_with_an_optimizer_each_train_as_under_ddp(preset: str) -> None:
    """A GAN: a backward of one through the other, and one that stops before it."""

    def play(strategy: str) -> tuple[list[float], list[dict[str, Tensor]]]:
        of = fabric(strategy)
        torch.manual_seed(5)
        plain = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, FEATURES)), make()]
        generates, judges = (Run(of, *of.setup(m, sgd(m.parameters()))) for m in plain)
        for number in range(4):
            noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + of.global_rank))
            fake, critic = generates.model(noise), judges.model
            loss = critic(fake.detach()).square().mean() + critic(torch.ones(4, FEATURES)).sub(1).square().mean()
            step(judges, loss)
            step(generates, critic(fake).sub(1).square().mean())
            judges.optimizer.zero_grad()
        return judges.losses + generates.losses, [weights(generates), weights(judges)]

    found, expected = play(preset), play("ddp")
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert_weights(ours, theirs, tolerance=1e-6)  # a fused step rounds a few last elements otherwise


@on_ranks(2)
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-6), ("bf16-mixed", 0.03)])
def test_two_optimizers_of_one_model_step_as_under_ddp(precision: Any, tolerance: float) -> None:
    """The module is set up first. With a scheduler that holds an optimizer, a closure, and a method that is marked."""

    def play(strategy: str) -> Run:
        of = fabric(strategy, precision=precision)
        model = of.setup_module(make())
        model.mark_forward_method("loss")
        body, head = [*model.first.parameters(), *model.blocks.parameters()], model.head.parameters()
        optimizers = of.setup_optimizers(sgd(body), torch.optim.Adam(head, 1e-2, fused=True))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0].optimizer, 0.5)
        run = Run(of, model, optimizers)
        for x, y in loader():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = model.loss(x, y)
                of.backward(loss)
                return loss

            run.losses.append(float(optimizers[0].step(closure)))
            run.norms.append(float(of.clip_gradients(model, optimizers[1], max_norm=0.1)))
            optimizers[1].step()
            schedule.step()
            with torch.inference_mode():  # changes nothing
                run.norms.append(float(model.loss(x, y)))
        return run

    assert_equal(play("zero3"), play("ddp"), tolerance=tolerance)


@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3_offload"])
def test_optimizers_set_up_first_or_of_parameters_in_no_module_step_as_under_ddp(preset: str, tmp_path: Path) -> None:
    """The temperature of SAC is a parameter in no module, whose gradients the program reduces by itself."""

    def play(strategy: str) -> Run:
        of, plain = fabric(strategy), make()
        heat = nn.Parameter(torch.zeros(1))
        optimizers = of.setup_optimizers(sgd(plain.parameters()), torch.optim.Adam([heat], 0.1))
        run = Run(of, of.setup_module(plain), optimizers[0])
        for x, y in loader():
            outputs = run.model(x)
            step(run, nn.functional.mse_loss(outputs, y) * heat.exp().detach())
            optimizers[1].zero_grad()
            of.backward(heat.exp().sum() * (outputs.detach().mean() - 0.3))
            heat.grad = of.all_reduce(heat.grad)
            run.norms.append(float(of.clip_gradients(run.model, optimizers[1], max_norm=0.1)))
            optimizers[1].step()
        path = tmp_path / f"{strategy}.ckpt"
        of.save(path, {"model": run.model, "heat": optimizers[1]})
        of.load(path, {"model": run.model, "heat": optimizers[1]})
        run.losses.append(float(optimizers[1].state_dict()["state"][0]["exp_avg_sq"]))
        run.losses.append(float(torch.load(path)["heat"]["state"][0]["exp_avg_sq"]))
        return run

    assert_equal(play(preset), play("ddp"), tolerance=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("empty", [None, True])
def test_module_made_inside_of_init_module_learns(empty: bool | None) -> None:
    """On meta they get their values when they are set up; the optimizer may be made before."""
    of = fabric("zero3", precision="bf16-true")
    torch.manual_seed(1)
    with of.init_module(empty_init=empty):
        plain = make()
    assert plain.head.weight.dtype == torch.bfloat16
    assert plain.head.weight.is_meta == bool(empty)
    run = Run(of, *of.setup(plain, torch.optim.SGD(plain.parameters(), 0.05)))
    x, y = next(iter(loader()))
    for _ in range(3):
        step(run, nn.functional.mse_loss(run.model(x), y))
    assert run.losses[2] < run.losses[0]


@pytest.mark.sample
@on_ranks(2)
def test_collectives_of_fabric_give_what_ddps_give() -> None:
    of = fabric("zero3")
    rank = of.global_rank
    assert of.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert of.all_reduce({"a": torch.tensor(float(rank))})["a"] == 0.5
    assert of.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == 1.0
    assert of.all_gather(torch.tensor([rank])).tolist() == [[0], [1]]
    assert of.strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not of.strategy.reduce_boolean_decision(rank == 0)
    assert len(of.setup_dataloaders(loader()).sampler) == 12
    of.barrier("here")
    with of.rank_zero_first():
        pass
