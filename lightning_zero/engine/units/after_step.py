"""Keeps what a step leaves under way: offloaded steps, and gathers that bring compute parameters up to date.

::

    main   : step() | refresh 0 | refresh 1 ...... | forward 0 | forward 1
    worker :        [step 0][step 1][step 2]
    gather :                [AG 0]  [AG 1]  [AG 2]

``step()`` takes the hyperparameters and the gradients as they are, and returns. A bucket's next gather waits for that
bucket's step alone. The next backward, and everything that looks at values, wait for all steps. At most three buckets
of state in files are in memory at a time: one that is read, one that is stepped, and one that is written.

A *refresh* is the gather of a bucket whose compute parameters are replicated and whose masters are not (stages 1 and
2, and offload). It follows its bucket's step, and all ranks issue refreshes in the order of units.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from lightning_zero.comm.streams import Streams
from lightning_zero.device import recording
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import Home
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.ranks.waits import goes_on_in_waits


class StepJob(NamedTuple):
    """The step of one bucket. ``run`` does the arithmetic while the bucket's home is open."""

    bucket: Bucket
    run: Callable[[], None]
    number: int = 0  # place of the bucket in the forward


def default_threads(share: int) -> int:
    """Threads of a rank's offloaded step, of its ``share`` of the cores. From three cores on, transfers get one."""
    return max(1, share - 1) if share > 2 else share


class _Queued(NamedTuple):
    job: StepJob
    future: Future[None]


class StepWorker:
    """Runs jobs in a thread of its own. Of the jobs that wait it takes the one that the next forward needs first."""

    def __init__(self, threads: int, accelerator: Accelerator) -> None:
        self._threads, self._accelerator = threads, accelerator
        self._pool = ThreadPoolExecutor(1, "lightning_zero-step")
        self._waiting: list[_Queued] = []
        self._running = False
        self._last: Future[None] | None = None
        self._error: BaseException | None = None  # the first; kept for ever
        self._lock = threading.Lock()

    def submit(self, jobs: Iterable[StepJob], event: Any) -> None:
        """Queue jobs; each ends the step that its bucket awaits.

        Args:
            event: on a GPU, behind the kernels that may still read what the steps change there.
        """
        # Asked for in the caller's thread, before the worker can see the job: when this returns, every gather of these
        # buckets waits for its step.
        queued = [_Queued(job, job.bucket.awaited_step.ask(event)) for job in jobs]
        if not queued:
            return
        # One lock for the queue and ``_running``: otherwise the worker could stop between a look at an empty queue and
        # the end, while this thread queues a job and takes the worker for running. Nobody would run that job.
        with self._lock:
            self._waiting = sorted([*self._waiting, *queued], key=lambda q: q.job.number)
            if self._error is None and not self._running:
                try:
                    self._last = self._pool.submit(self._run)
                    self._running = True
                except BaseException as error:  # no thread can be started
                    self._error = error
        if self._error is not None:
            self._fail(self._error)

    def _take(self) -> _Queued | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _run(self) -> None:
        """Run jobs until none waits.

        The bucket that is being read is stepped next, even if a job with a lower number is queued meanwhile. So no more
        than three buckets are in memory: one that is read, one that is stepped, and one that is written.
        """
        current: _Queued | None = None
        following: _Queued | None = None
        done: Home | None = None
        # Errors of every kind, wherever in this thread: the main thread waits for the futures, and would wait for ever.
        try:
            # Here and not in the pool's initializer: the pool ends after an error of that, and says it to nobody.
            set_own_threads(self._threads)  # a setting of each thread, as is the device
            self._accelerator.bind_thread()
            current = self._take()
            while current is not None:
                home = current.job.bucket.home
                home.open(to_write=True)
                if (following := self._take()) is not None:
                    following.job.bucket.home.begin_open()
                current.job.run()
                current.job.bucket.push()
                home.close(changed=True)
                # The write of the bucket before this one ran during this step. Its memory goes now, and not later: the
                # next bucket to be read would be the fourth in memory.
                if done is not None:
                    done.settle()
                current.future.set_result(None)
                current, following, done = following or self._next_or_stop(home), None, home
        except BaseException as error:
            self._fail(error, current, following)
            raise

    def _next_or_stop(self, home: Home) -> _Queued | None:
        """Take the next job, or stop. Before it stops it brings the last bucket to rest; a job may come meanwhile."""
        if (following := self._take()) is None:
            home.settle()
            with self._lock:
                self._running = bool(self._waiting)
                following = self._waiting.pop(0) if self._waiting else None
        return following

    def _fail(self, error: BaseException, *taken: _Queued | None) -> None:
        """End all jobs with ``error``, and those that will be queued after it."""
        with self._lock:
            self._error = error if self._error is None else self._error
            left, self._waiting = self._waiting, []
            self._running = False
        for queued in (*taken, *left):
            # The step of a job may be over, and its future too, when the write after it fails.
            if queued is not None and not queued.future.done():
                queued.future.set_exception(error)

    def wait(self) -> None:
        """Wait for everything that was submitted; its error is raised here."""
        # An error is kept and raised again at every wait: masters are half stepped, and nothing that follows is right.
        if self._last is not None:
            with recording.stands("step", "offloaded steps", on_host=True):
                self._last.result()
            self._last = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, after its jobs."""
        # Elsewhere than in the main thread it does not wait: a thread cannot wait for its own end.
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())


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
