"""Random programs, the same every time; and that a broken engine is found out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from lightning_zero.engine.passes.grad_norms import GradNorms
from lightning_zero.engine.passes.gradients import BucketGrads
from lightning_zero.engine.passes.sharded_grads import ShardedGrads
from lightning_zero.engine.passes.writes import Writes
from lightning_zero.engine.units.after_step import AfterStep
from tests import harness
from tests.fuzz import fits
from tests.fuzz import programs as p
from tests.fuzz.programs import Model, Node, Program, script, source
from tests.fuzz.run import Runner
from tests.fuzz.strategies import programs

ENOUGH = 60  # programs, to find a mistake that is there

STILL = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.full)])
def test_random_programs_train_like_the_plain_twin(count: int) -> None:
    @settings(STILL, max_examples=count)
    @given(programs())
    def run(program: Program) -> None:
        verdict = runner.run(program)
        text = script(program, f"{verdict.kind}\n{verdict.text}", verdict.earlier)
        assert not verdict.failed, f"{verdict.signature}\nIt fails (`make fuzz` makes such ones small):\n\n{text}"

    with Runner() as runner:
        run()


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.full)])
def test_random_fits_are_as_under_ddp(count: int) -> None:
    for number in range(count):
        program = fits.draw(random.Random(f"1 {number}"))
        verdicts = harness.run(2, fits.run, program, timeout=120)
        assert verdicts == ["equal"] * 2, f"--program 1:{number}: {program}\n{verdicts}"


def gradients_are_sums() -> None:
    """They are not divided by the number of ranks."""
    store_grad = BucketGrads.store_grad

    def broken(self: BucketGrads, slot: int, grad: torch.Tensor) -> None:
        self.scale = 1.0
        store_grad(self, slot, grad)

    BucketGrads.store_grad = broken  # type: ignore[method-assign]


def writes_are_lost() -> None:
    Writes.take_over = lambda self, bucket: self.forget(bucket)  # type: ignore[method-assign]


def cleared_gradients_stay() -> None:
    ShardedGrads.forget_cleared = lambda self: None  # type: ignore[method-assign]


def forwards_do_not_wait_for_steps() -> None:
    AfterStep.sync_params = lambda self, unit: None  # type: ignore[method-assign]


def clipping_raises_in_lower_precision() -> None:
    """At all stages: there the engine at stage 0 is what others are compared with."""
    total = GradNorms.total

    def broken(self: GradNorms, *args: Any, **kwargs: Any) -> Any:
        if any(bucket.dtypes.compute is not torch.float32 for bucket in self._reducer.grads):
            raise AttributeError("no such thing")
        return total(self, *args, **kwargs)

    GradNorms.total = broken  # type: ignore[method-assign]


# With what every program begins, so that it is not long until the mistake matters.
STEP, LINE = (p.Forward(), p.Backward(), p.Step()), Model(body=(Node(kind="Line"),))
BROKEN = {
    gradients_are_sums: STEP,
    writes_are_lost: (p.Write(how="in place"), *STEP),
    cleared_gradients_stay: (*STEP, *STEP),
    forwards_do_not_wait_for_steps: STEP,
}


@pytest.mark.sample
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_engine_is_found_out(broken: Callable[[], Any]) -> None:
    with Runner(before=broken) as runner:

        @settings(STILL, max_examples=ENOUGH)
        @given(programs())
        def run(program: Program) -> None:
            program = dataclasses.replace(program, actions=BROKEN[broken] + program.actions)
            assert not runner.run(program).failed, "as it should"

        with pytest.raises(AssertionError, match="as it should"):
            run()


def test_what_both_engines_raise_is_no_refusal_of_torch() -> None:
    actions = (p.Forward(), p.Backward(), p.Step(clip=1.0))
    program = Program(model=LINE, actions=actions, settings=p.Settings(precision="bf16"))
    with Runner(before=clipping_raises_in_lower_precision) as runner:
        assert runner.run(program).kind == "unknown refusal"


@settings(STILL, max_examples=50)
@given(programs())
def test_a_program_is_printed_as_it_is(program: Program) -> None:
    text = source(program)
    assert eval(text, vars(p)) == program
    assert max(map(len, text.splitlines())) <= 150
    compile(script(program, "what\nwent wrong", (program,)), "script", "exec")


def test_a_program_that_is_printed_runs(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    program = Program(model=LINE, actions=STEP)
    space: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(SystemExit) as ended:
        exec(compile(script(program, "nothing"), "script", "exec"), space)
    assert not ended.value.code and capfd.readouterr().out.startswith("equal")
