"""What a step leaves under way: steps of offloaded buckets, and gathers that bring compute parameters up to date.

::

    main   : step() | refresh 0 | refresh 1 ...... | forward 0 | forward 1
    worker :        [step 0][step 1][step 2]
    gather :                [AG 0]  [AG 1]  [AG 2]

A *refresh* is the gather of a bucket whose compute parameters are replicated and whose masters are not (stages 1 and
2, and offload). It follows its bucket's step, and all ranks issue refreshes in the order of units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from lightning_zero.comm.streams import Streams
from lightning_zero.engine.steps.worker import StepJob, StepWorker
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import State, Unit


class AfterStep:
    """The steps and refreshes of one engine that are not over.

    Args:
        threads: of the thread that runs steps, for torch's kernels.
    """

    def __init__(self, units: Sequence[Unit], streams: Streams, threads: int) -> None:
        self._units = units
        self._streams = streams
        self._threads = threads
        self._numbers = {bucket: number for number, bucket in enumerate(b for unit in units for b in unit.buckets)}
        self._worker: StepWorker | None = None
        self._stale: deque[tuple[Unit, list[Bucket]]] = deque()  # refreshes to be issued, in the order of units

    def submit(self, jobs: Sequence[StepJob]) -> None:
        """Queue the steps of offloaded buckets."""
        if self._worker is None:
            self._worker = StepWorker(self._threads, self._streams.accelerator)
        self._worker.submit([job._replace(number=self._numbers[job.bucket]) for job in jobs], self._streams.mark())

    def masters_changed(self, changed: Collection[Bucket]) -> None:
        """On all ranks: the masters of ``changed`` are new, or will be when their steps are over."""
        for unit in self._units:
            buckets = [b for b in unit.buckets if b in changed]
            refreshed = [b for b in buckets if b.gathers_after_step]
            for bucket in refreshed:
                bucket.show(gathered=False)
            if refreshed:
                self._stale.append((unit, refreshed))
            if buckets and unit.reshards and unit.state is not State.SHARDED:
                unit.drop()  # a step inside a pass: what is gathered, in use or ahead, is old
                unit.unshard_begin()
        self.refresh()

    def refresh(self, needed: Unit | None = None) -> None:
        """Issue refreshes in the order of units, which is the same on all ranks: up to ``needed``, waiting for its
        step, and on from there as far as steps are done."""
        behind = any(unit is needed for unit, _ in self._stale)
        while self._stale and (behind or self._stale[0][0].step_done):
            unit, buckets = self._stale[0]
            for bucket in buckets:
                bucket.step.wait()  # before it counts as refreshed: one that failed must not pass for done
            self._stale.popleft()
            unit.refresh_begin(buckets)
            behind = behind and unit is not needed

    def wait_for_steps(self) -> None:
        """Wait for offloaded steps: until then they own the gradients that they were given."""
        if self._worker is not None:
            self._worker.wait()
        for bucket in self._numbers:  # without a worker too: what awaits its step must be the same on all ranks
            bucket.step.wait()

    def flush(self) -> None:
        """Wait for offloaded steps, and issue the refreshes that follow them."""
        self.wait_for_steps()
        self.refresh_all()

    def refresh_all(self) -> None:
        """Issue the refreshes that are left, each after its step."""
        while self._stale:
            self.refresh(self._stale[0][0])

    def settle(self) -> None:
        """Wait for steps, refreshes and all other gathers: masters may be read and changed from here on."""
        self.flush()
        for unit in self._units:
            unit.unshard_wait()

    def close(self) -> None:
        """End the thread, after what it was given."""
        if self._worker is not None:
            self._worker.close()
