"""Periods, plans and cursors."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_zero.planning.schedule import MAX_PLAN, Cursor, Entry, Plan, compile_plan, find_period

UNITS = 5
histories = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=25)
nbytes = st.lists(st.integers(1, 100), min_size=UNITS, max_size=UNITS)


@given(histories)
def test_period_is_the_shortest_that_repeats(history: list[int]) -> None:
    n = len(history)
    by_definition = next(p for p in range(1, n + 1) if n % p == 0 and history == history[:p] * (n // p))
    assert find_period(history) == by_definition and find_period([]) == 0


@given(histories, nbytes, st.integers(0, 300))
def test_a_cursor_follows_the_history_it_was_compiled_from(history: list[int], sizes: list[int], keep: int) -> None:
    cursor = Cursor(compile_plan(history, sizes, keep))
    gathered: set[int] = set()
    for unit in history:
        if unit not in gathered:
            steps = cursor.up_to(unit)
            assert steps == [unit]  # nothing is skipped, nothing gathered for nothing
            gathered.add(unit)
        if cursor.used(unit):
            gathered.remove(unit)
    assert not gathered
    assert cursor.rest() == []


@given(histories, nbytes)
def test_without_a_budget_only_uses_in_a_row_are_joined(history: list[int], sizes: list[int]) -> None:
    plan = compile_plan(history, sizes, 0)
    joined = [unit for i, unit in enumerate(history) if i == 0 or history[i - 1] != unit]
    assert [e.unit for e in plan.entries] == joined


@given(histories, nbytes, st.integers(0, 300))
def test_kept_units_stay_within_their_budget(history: list[int], sizes: list[int], keep: int) -> None:
    plan = compile_plan(history, sizes, keep)
    closed = [e.unit for e in compile_plan(history, sizes, 0).entries]
    for entry in plan.entries:
        closed.remove(entry.unit)
    assert sum(sizes[unit] for unit in closed) <= keep


def test_the_last_units_of_a_forward_are_kept_first() -> None:
    forward_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    plan = compile_plan(forward_and_back, [10] * 4, keep_bytes=10)
    assert plan.entries == (Entry(0), Entry(1), Entry(2, 2), Entry(3, 2), Entry(1), Entry(0))


@given(histories, st.integers(1, 4))
def test_a_cyclic_plan_holds_one_period_and_follows_any_number_of_them(history: list[int], times: int) -> None:
    plan = compile_plan(history * 2, [1] * UNITS, cyclic=True)
    period = [e.unit for e in plan.entries]
    assert period == history[: find_period(history * 2)]
    cursor = Cursor(plan)
    for unit in period * times:
        assert cursor.up_to(unit) == [unit]


def test_a_cyclic_cursor_finishes_its_round_for_a_unit_that_it_has_passed() -> None:
    cursor = Cursor(Plan((Entry(0), Entry(1), Entry(2)), cyclic=True))
    assert cursor.up_to(0) == [0]
    assert cursor.up_to(0) == [1, 2, 0]


@given(histories, st.integers(0, UNITS - 1), st.integers(0, 25))
def test_a_cursor_issues_everything_before_what_is_demanded(history: list[int], unit: int, start: int) -> None:
    plan = compile_plan(history, [1] * UNITS)
    order = [e.unit for e in plan.entries]
    assume(start <= len(order))
    cursor = Cursor(plan, position=start)
    end = order.index(unit, start) + 1 if unit in order[start:] else None
    assert cursor.up_to(unit) == (order[start:end] if end else None)
    assert cursor.rest() == order[end or start :]


@given(histories, st.integers(0, 25))
def test_ahead_takes_what_is_admitted_and_stops_at_the_first_that_is_not(history: list[int], room: int) -> None:
    plan = compile_plan(history, [1] * UNITS)
    cursor = Cursor(plan)
    asked: list[int] = []

    def admit(unit: int) -> bool:
        asked.append(unit)
        return len(asked) <= room

    order = [e.unit for e in plan.entries]
    assert cursor.ahead(admit) == order[:room]
    assert cursor.peek() == (order[room] if room < len(order) else None)
    assert asked == order[: room + 1]


def test_a_plan_has_a_largest_length() -> None:
    plan = compile_plan([0, 1] * MAX_PLAN, [1, 1])
    assert len(plan.entries) == MAX_PLAN
