"""The package stays small: no figure of ``make structure`` is over its budget."""

from __future__ import annotations

from tests.harness import on_ranks
from tests.structure import BUDGETS, PACKAGE, figures_of_sources, figures_of_step, ours, traced_step


def over_budget(figures: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (now, BUDGETS[name]) for name, now in figures.items() if now > BUDGETS[name]}


def test_figures_of_the_sources_keep_their_budgets() -> None:
    assert not over_budget(figures_of_sources()), "take something out, or say in the commit what the lines buy"


@on_ranks(2)
def test_a_step_keeps_its_budgets() -> None:
    figures = figures_of_step(traced_step(ours, PACKAGE))
    assert figures["calls of a step"] > 100, "nothing was traced"
    assert not over_budget(figures)
