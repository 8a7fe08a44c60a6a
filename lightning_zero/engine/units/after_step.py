"""Keeps what a step leaves under way: offloaded steps, and gathers that bring compute parameters up to date.

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
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.engine.units.worker import StepJob, StepWorker
from lightning_zero.ranks.waits import goes_on_in_waits


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
        self._failed: Exception | None = None
        self._stale: deque[tuple[Unit, list[Bucket]]] = deque()  # refreshes to be issued, in the order of units
        self._issuing = False
        goes_on_in_waits(self)

    def use_threads(self, threads: int) -> None:
        """Run the steps that come with so many ``threads``, after those that are under way."""
        if threads != self._threads:
            self.close()
            self._threads, self._worker = threads, None

    def fail(self, error: Exception) -> None:
        """Raise ``error`` wherever something waits for steps, or begins a pass, from here on."""
        self._failed = error

    @property
    def has_failed(self) -> bool:
        return self._failed is not None

    def submit(self, jobs: Sequence[StepJob]) -> None:
        """Queue the steps of offloaded buckets."""
        if self._worker is None:
            self._worker = StepWorker(self._threads, self._streams.accelerator)
        self._worker.submit([job._replace(number=self._numbers[job.bucket]) for job in jobs], self._streams.mark())

    def masters_changed(self, changed: Collection[Bucket]) -> None:
        """Follow the masters of ``changed``, which are new or will be when their steps are over. On all ranks."""
        for unit in self._units:
            buckets = [b for b in unit.buckets if b in changed]
            refreshed = [b for b in buckets if b.gathers_after_step]
            # At once, though the refresh may be issued much later: a read in between must wait, and not find the old
            # values.
            for bucket in refreshed:
                bucket.show(gathered=False)
            if refreshed:
                self._stale.append((unit, refreshed))
            is_here = unit.reshards and unit.state is not State.SHARDED
            if buckets and is_here:
                # A step inside a pass: gathered values, in use or ahead of use, are those of before. The root is
                # gathered on all ranks as long as a pass is open, so all gather it again. Other units may be gathered
                # on some ranks only; they come back when they are needed, in an order that is agreed.
                unit.drop()
            if buckets:
                unit.forget_kept()
            if buckets and is_here and unit is self._units[0]:
                unit.unshard_begin()
        self.refresh()

    def refresh(self, needed: Unit | None = None) -> None:
        """Issue refreshes in the order of units: up to ``needed``, whose step it waits for, then while steps are over.

        How many are issued at a time differs between ranks. Their order does not, and that is what gathers on one group
        need: so ``needed`` is never issued before the units that come first.
        """
        if self._failed is not None:
            raise self._failed
        issuing, self._issuing = self._issuing, True
        try:
            behind = any(unit is needed for unit, _ in self._stale)
            while self._stale and (behind or self._stale[0][0].step_done):
                unit, buckets = self._stale[0]
                # Before the entry is taken off: after a step that failed, the next call must come here again and raise
                # too.
                for bucket in buckets:
                    bucket.awaited_step.wait()
                self._stale.popleft()
                unit.refresh_begin(buckets)
                behind = behind and unit is not needed
        finally:
            self._issuing = issuing

    @outside_autograd
    def go_on(self) -> bool:
        """Issue the refreshes whose steps are over. Returns whether some are left.

        Called while this rank waits for others (:class:`GoesOn`): one of them may wait for these gathers before it
        comes, because it reads a parameter, or because it waits for all that its device has to do.
        """
        if self._failed is not None or self._issuing:
            return False
        try:
            self.refresh()
        except Exception:
            return False  # raised again by the next call of those that wait for steps
        return bool(self._stale)

    def wait_for_steps(self) -> None:
        """Wait for offloaded steps: until then they own the gradients that they were given."""
        if self._failed is not None:
            raise self._failed
        if self._worker is not None:
            self._worker.wait()
        # Also for buckets that have no job on this rank: which buckets await a step decides what is gathered ahead, and
        # must be the same on all ranks.
        for bucket in self._numbers:
            bucket.awaited_step.wait()
            bucket.param_store.settle()  # in files they may follow later; whoever reads masters alone must hear of it

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
