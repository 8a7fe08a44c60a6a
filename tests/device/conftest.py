"""One process in which the machine of these tests runs: it patches torch, and makes process groups."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.device.simulate import Case, Found, train


def _prepare() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what came with the fork is not looked at again


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Calls a function in that process; functions and arguments are sent by their names and values."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        pool.submit(int).result()  # its thread belongs to no test
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


@pytest.fixture(scope="session")
def trained(elsewhere: Callable[..., Any]) -> Callable[..., Found]:
    """What :func:`train` finds; each case is trained once."""
    known: dict[str, Found] = {}

    def find(case: Case, mutations: Sequence[tuple[str, Any]] = (), **options: Any) -> Found:
        key = repr((case, mutations, options))
        if key not in known:
            known[key] = elsewhere(train, case, mutations, **options)
        return known[key]

    return find
