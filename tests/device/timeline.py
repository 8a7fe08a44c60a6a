"""When work ends that many parties do for each other: a model of a schedule, in seconds. Arithmetic only.

A *party* does its tasks one after the other: a stream, a thread, the disk's queue. A task begins when the one before it
and all that it comes after are over, and then waits for its *resource*, which serves one task at a time, the one that
came first. So two streams share a link, and two threads the memory of their host.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """Something that takes time, or is only an order (0 seconds).

    Attributes:
        after: numbers of tasks that come before it, beside the one before it of its party.
        resource: what it needs for itself while it goes on; "" for nothing.
    """

    party: int
    seconds: float = 0.0
    resource: str = ""
    after: tuple[int, ...] = ()


def ends(tasks: Sequence[Task]) -> list[float]:
    """The moment at which each task is over, from the first one's beginning.

    Args:
        tasks: each comes after tasks of lower numbers only.
    """
    waiting = [0] * len(tasks)  # for how many others each still waits
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[int, int] = {}  # of a party
    for number, task in enumerate(tasks):
        before = {*task.after, *((last[task.party],) if task.party in last else ())}
        waiting[number] = len(before)
        for other in before:
            followers[other].append(number)
        last[task.party] = number
    ready = [0.0] * len(tasks)
    over = [0.0] * len(tasks)
    free: dict[str, float] = {}  # when a resource has served all that came so far
    queue = [(0.0, number) for number, count in enumerate(waiting) if not count]
    # The task that is ready first is taken first. What it makes ready is ready later, so each resource serves in order.
    while queue:
        came, number = heapq.heappop(queue)
        task = tasks[number]
        begins = max(came, free.get(task.resource, 0.0)) if task.resource else came
        over[number] = begins + task.seconds
        if task.resource:
            free[task.resource] = over[number]
        for other in followers[number]:
            ready[other] = max(ready[other], over[number])
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(queue, (ready[other], other))
    return over


def busy(tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds that each resource works: the longest is the least time that any schedule takes."""
    names = {task.resource for task in tasks} - {""}
    return {name: sum(task.seconds for task in tasks if task.resource == name) for name in names}
