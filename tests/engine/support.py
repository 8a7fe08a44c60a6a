"""Training a sharded module beside its twin, what is compared, and matrices of settings."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.ranks import watchdog
from tests.engine.sides import TRUE, MakeOptimizer, Sharded, Twin, Work, adamw, sgd, step_and_clear
from tests.engine.works import accumulate, autocast, language_loss, language_work, tokens
from tests.models import Model
from tests.selection import pairwise_places

# What tests of other folders take from here, beside what is made here.
__all__ = ["TRUE", "Model", "Sharded", "Twin", "accumulate", "adamw", "autocast"]
__all__ += ["language_loss", "language_work", "sgd", "tokens"]


def places_posted_often() -> contextlib.AbstractContextManager[Any]:
    """Engines made inside tell the others at once where they are."""
    return mock.patch.object(watchdog, "EVERY_S", 0.05)


class Seen:
    """What a twin holds now, by parameter: values of masters, and gradients."""

    def __init__(self, twin: Twin) -> None:
        self.values = [master.value.clone() for master in twin.masters.values()]
        self.grads = [None if param not in twin.grads else twin.grads[param].clone() for param in twin.masters]


def assert_same(
    sharded: Sharded, twin: Twin | Seen, *, grads: bool = False, tolerance: float = 0.0, what: str = ""
) -> None:
    """Master parameters (and gradients) are equal: to the bit, or within ``tolerance``."""
    seen = Seen(twin) if isinstance(twin, Twin) else twin
    with lightning_zero.gather(sharded.module, grads=grads):
        own_params = sharded.module.named_parameters()
        for (name, own), value, grad in zip(own_params, seen.values, seen.grads, strict=True):
            assert own.dtype == value.dtype or not own.requires_grad
            _assert_equal(own.detach().to(value.dtype), value, tolerance, f"{what}{name}")
            if grads:
                assert (own.grad is None) == (grad is None), f"{what}{name}: {own.grad} but twin {grad}"
                if own.grad is not None:
                    _assert_equal(own.grad, grad, tolerance, f"{what}gradient of {name}")


def _assert_equal(own: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    if tolerance:
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")
    elif not torch.equal(own, expected):
        gap = (own.double() - expected.double()).abs().max().item() if own.numel() else 0.0
        raise AssertionError(f"{what}: differs by {gap:.3g}\n{own}\n{expected}")


def assert_equal(found: Any, expected: Any, what: str = "", *, tolerance: float = 0.0) -> None:
    """Tensors in dicts and sequences are equal: dtypes, and values to the bit or within ``tolerance``."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, f"{what}: {found.dtype}, {expected.dtype}"
        _assert_equal(found, expected, tolerance, what)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{what}: {found.keys()}, {expected.keys()}"
        for key in expected:
            assert_equal(found[key], expected[key], f"{what}/{key}", tolerance=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{what}/{place}", tolerance=tolerance)
    else:
        assert found == expected, f"{what}: {found}, {expected}"


def assert_absent(param: nn.Parameter) -> None:
    """The values of a sharded parameter are not here, and a read says so."""
    with pytest.raises(RuntimeError, match="is sharded.*gather"):
        param.sum()


ALL_STAGES = (0, 1, 2, 3)
OUTER_STAGES = (0, 3)
STAGES = pytest.mark.parametrize("stage", ALL_STAGES)
IN_STAGES = pytest.mark.parametrize("stages", [OUTER_STAGES, pytest.param((1, 2), marks=pytest.mark.full)], ids=str)
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])


def check(
    build: Callable[[], nn.Module],
    work: Work,
    *,
    stage: int | Sequence[int] = 3,
    plain: bool | Sequence[bool] = False,
    steps: int = 2,
    precision: str = "fp32",
    optimizer: MakeOptimizer = adamw,
    tolerance: float = 0.0,
    **config: Any,
) -> None:
    """Train a twin, and beside it the module at each stage: results, gradients and parameters agree at each step.

    Args:
        work: forwards and backwards of one step, with ``side.module`` and ``side.backward``; what it returns is
            compared too.
        stage: one, or several.
        plain: whether the engine has to notice backwards; of several values each stage has one, and the last has all.
    """
    history = functools.partial(_twin_history, build, work, steps, optimizer=optimizer, precision=precision)
    expected: dict[bool, list[tuple[Any, Seen, Seen]]] = {}
    *stages, last = (stage,) if isinstance(stage, int) else stage
    noticed = (plain,) if isinstance(plain, bool) else plain
    for at, notices in [(at, noticed[at % len(noticed)]) for at in stages] + [(last, notices) for notices in noticed]:
        each = at >= 2
        if each not in expected:
            found, accumulates = history(each=each)
            expected.update({each: found} if accumulates else {False: found, True: found})
        try:
            torch.default_generator.manual_seed(3)
            sharded = Sharded(
                build(), stage=at, plain=notices, precision=precision, optimizer=optimizer, **copy.deepcopy(config)
            )
            with sharded:
                _assert_history(sharded, work, expected[each], tolerance)
        except BaseException as error:
            error.add_note(f"at stage {at}, where backwards are {'noticed' if notices else 'told'}")
            raise


def _twin_history(
    build: Callable[[], nn.Module], work: Work, steps: int, **settings: Any
) -> tuple[list[tuple[Any, Seen, Seen]], bool]:
    """Of each step of a twin the result, what there is after its work, and after the optimizer's step.

    Beside it: whether there was a backward in ``no_sync``, whose gradients stages average in different ways.
    """
    torch.default_generator.manual_seed(3)
    twin = Twin(build(), **settings)
    found = []
    for step in range(steps):
        with autocast(twin.precision):
            result = work(twin, step)
        result = result.detach().clone() if isinstance(result, Tensor) else result
        worked = Seen(twin)
        step_and_clear(twin)
        found.append((result, worked, Seen(twin)))
    return found, twin.accumulates


def _assert_history(sharded: Sharded, work: Work, expected: Sequence[tuple[Any, Seen, Seen]], tolerance: float) -> None:
    for step, (result, worked, stepped) in enumerate(expected):
        with autocast(sharded.precision):
            own = work(sharded, step)
        if isinstance(own, Tensor):
            _assert_equal(own.detach(), result, tolerance, f"step {step}: result")
        assert_same(sharded, worked, grads=True, tolerance=tolerance, what=f"step {step}, after backward: ")
        step_and_clear(sharded)
        if step == len(expected) - 1:  # before, a gather would bring parameters that a step has left behind up to date
            assert_same(sharded, stepped, tolerance=tolerance, what=f"step {step}, after the optimizer: ")


# -- matrices of settings ---------------------------------------------------------------------------------------------


def pairwise_selection(cases: Sequence[Any]) -> list[Any]:
    """A few of ``cases`` (named tuples) in which every pair of settings occurs."""
    return [cases[place] for place in pairwise_places([case._asdict() for case in cases])]


def in_pairs(cases_of_all: Sequence[Any]) -> Any:
    """Parametrizes a test by its ``case``: pairs of settings always run, the full matrix where it is asked for."""
    selected = pairwise_selection(cases_of_all)
    return cases(selected, [case for case in cases_of_all if case not in selected])


def cases(selected: Sequence[Any], more: Sequence[Any]) -> Any:
    """Parametrizes a test by its ``case``; ``more`` are of the full tier."""
    given = [*selected, *(pytest.param(case, marks=pytest.mark.full) for case in more)]
    return pytest.mark.parametrize("case", given, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
