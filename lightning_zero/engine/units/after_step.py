"""Run offloaded steps in a thread, and issue the gathers that follow steps (param syncs).

::

    main   : step() | sync 0 | sync 1 ...... | forward 0 | forward 1
    worker :        [step 0][step 1][step 2]
    gather :                [AG 0]  [AG 1]  [AG 2]

`step()` captures hyperparameters and gradients, and returns. A bucket's next gather waits for that bucket's step only.
The next backward, and every read of masters or gradients, waits for all steps.

A *param sync* all-gathers a bucket whose compute parameters are replicated and whose masters are not (stages 1 and 2,
and offload). All ranks issue param syncs in the order of units, each after its bucket's step. A sync writes to memory
that users' views (`weight.detach()`) may share. The engine cannot notice reads of such views, so `step()` waits for
syncs of viewed buckets. All ranks must wait, or none: a rank that does not wait may enter a collective of the user's
before it issues its syncs, and the ranks would wait for each other for ever.

See [Note: masters during an offloaded step]: which thread may use a bucket during its offloaded step.
See [Note: one order of collectives]: param syncs are issued in the order of units.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Accelerator, Event
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.device.streams import Streams
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Shown
from lightning_zero.engine.units.master_storage import MasterStorage
from lightning_zero.engine.units.param_store import references
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.ranks.waits import goes_on_in_waits

DROPPED_S = 0.2  # within which threads of gloo drop messages that have ended


class Changes:
    """Counts changes of masters; see [Note: uses by some ranks alone].

    Attributes:
        counts: steps that have begun, changes since then that all ranks made together, users' writes since then.
        backwards: backwards that have ended.
        event: event after the last change.
        step_follows: whether the gradients of a backward are reduced, and no step has begun since.
    """

    backwards, step_follows = 0, False

    def __init__(self, streams: Streams) -> None:
        self._streams, self.counts, self.event = streams, (0, 0, 0), streams.mark()

    def backward_ended(self, *, step_follows: bool) -> None:
        self.backwards, self.step_follows = self.backwards + 1, step_follows

    def were_made(self) -> None:
        """Called on all ranks after they have changed masters together, or have compared users' writes."""
        self.event = self._streams.mark() if self._streams.are_there else None
        self.counts = self.counts[0], self.counts[1] + 1, 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager whose body changes this rank's masters, as the code of all ranks does."""
        steps, others, writes = self.counts
        self.counts = steps, others, writes + 1
        try:
            yield
        finally:
            self.event = self._streams.mark()
            self.counts = steps, others, writes + 2


class StepJob(NamedTuple):
    """The offloaded step of one bucket. `run()` steps the bucket; call it while the bucket's storage is open."""

    bucket: Bucket
    run: Callable[[], None]
    number: int = 0  # position of the bucket in the forward
    future: Future[None] | None = None  # of the submitted step


def threads_of_steps(cores: int, *, beside_device: bool) -> int:
    """Return how many threads run a rank's offloaded steps, of its `cores`. With more than 2 cores, one core is left
    for transfers. When training on a GPU (`beside_device`) with more than 6 cores, three cores are left, for the main
    thread and the threads of autograd and NCCL."""
    return cores - (3 if beside_device and cores > 6 else 1 if cores > 2 else 0)


class StepWorker:
    """Runs step jobs in one thread, in the order in which the next forward needs their buckets."""

    def __init__(self, threads: int, accelerator: Accelerator) -> None:
        self._threads, self._accelerator = threads, accelerator
        self._pool = ThreadPoolExecutor(1, "lightning_zero-step")
        self._waiting: list[StepJob] = []
        self._running = False
        self._last: Future[None] | None = None
        self._error: BaseException | None = None  # the first error, never cleared
        self._lock = threading.Lock()

    def submit(self, jobs: Iterable[StepJob], event: Event) -> None:
        """Queue `jobs`, which complete their buckets' `awaited_step`. Jobs write to the GPU only after `event`."""
        # Before the worker sees the jobs: when this returns, every gather of these buckets waits for its step.
        queued = [job._replace(future=job.bucket.awaited_step.announce(event)) for job in jobs]
        if not queued:
            return
        # One lock for the queue and `_running`. Otherwise the worker could see an empty queue and stop, while this
        # thread queues a job and believes that the worker runs.
        with self._lock:
            self._waiting = sorted([*self._waiting, *queued], key=lambda job: job.number)
            if self._error is None and not self._running:
                try:
                    self._last = self._pool.submit(self._run)
                    self._running = True
                except BaseException as error:  # no thread can be started
                    self._error = error
        if self._error is not None:
            self._fail(self._error)

    def _next_job(self, *, or_stop: bool = False) -> StepJob | None:
        """Return the next job, or None if no job is queued. `or_stop`: if no job is queued, also record that the thread
        stops, so that the next call of :meth:`submit` starts a thread."""
        with self._lock:
            self._running = bool(self._waiting) or not or_stop
            return self._waiting.pop(0) if self._waiting else None

    def _run(self) -> None:
        """Run jobs until none is queued. The bucket being read is stepped next, even if a job with a lower number
        arrives, so that at most three buckets are in memory: one being read, one being stepped, one being written."""
        current: StepJob | None = None
        following: StepJob | None = None
        done: MasterStorage | None = None
        # Catch every error of this thread: otherwise the main thread would wait for the futures for ever.
        try:
            # Not in the pool's initializer, whose errors end the pool without a report.
            set_own_threads(self._threads)
            self._accelerator.bind_thread()
            current = self._next_job()
            while current is not None:
                storage = current.bucket.storage
                storage.open(to_write=True)
                if (following := self._next_job()) is not None:
                    following.bucket.storage.begin_open()
                current.run()
                current.bucket.copy_master_to_params()
                storage.close(changed=True)
                # The previous bucket was written during this step. Free it now, or the next read makes four in memory.
                if done is not None:
                    done.wait_for_rest()
                assert current.future is not None
                current.future.set_result(None)
                if following is None and (following := self._next_job()) is None:
                    storage.wait_for_rest()  # jobs may be submitted meanwhile
                    following = self._next_job(or_stop=True)
                current, following, done = following, None, storage
        except BaseException as error:
            self._fail(error, current, following)
            raise

    def _fail(self, error: BaseException, *taken: StepJob | None) -> None:
        """Fail the queued jobs, the jobs in `taken` (no longer in the queue) and all later jobs with `error`."""
        with self._lock:
            self._error = error if self._error is None else self._error
            left, self._waiting = self._waiting, []
            self._running = False
        for job in (*taken, *left):
            # The future is done already if the step has ended and the write after it has failed.
            if job is not None and job.future is not None and not job.future.done():
                job.future.set_exception(error)

    def wait(self) -> None:
        """Wait for all jobs. If a step has failed, raise its error in this and all later calls, because some masters
        have been stepped and others have not."""
        if self._last is not None:
            with recording.waiting("step", "offloaded steps", on_host=True):
                self._last.result()
            self._last = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the thread after the queued jobs."""
        # Waits in the main thread only: a thread cannot wait for its own end.
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())


class AfterStep:
    """Runs one engine's offloaded steps on `cores` cores, and issues param syncs (gathers after steps)."""

    def __init__(self, units: Sequence[Unit], streams: Streams, cores: int) -> None:
        self._units = units
        self._streams = streams
        self._threads = threads_of_steps(cores, beside_device=streams.are_there)
        self._numbers = {bucket: number for number, bucket in enumerate(b for unit in units for b in unit.buckets)}
        self._worker: StepWorker | None = None
        self.changes = Changes(streams)
        self.failed: Exception | None = None  # raised in every wait for steps and at the start of every pass
        self._pending_syncs: deque[tuple[Unit, list[Bucket]]] = deque()  # to be issued, in the order of units
        self._issuing = False
        self._references: dict[Bucket, int] = {}  # to the memory of synced parameters, without those of users' views
        self._viewed: set[Bucket] = set()
        goes_on_in_waits(self)

    def _referring(self, bucket: Bucket) -> int:
        return references(bucket.full.data) - len(bucket.params) * (bucket.shown is Shown.GATHERED)

    def count_references(self) -> None:
        """Count the references to the memory of buckets that have param syncs. Keep an earlier count if it is lower:
        users' views, and messages that gloo has not dropped yet, make a count higher."""
        self._references = {
            bucket: min(self._referring(bucket), self._references.get(bucket, sys.maxsize))
            for bucket in self._numbers
            if bucket.plan.gathers_after_step
        }
        self._viewed &= self._references.keys()

    def _refers_more(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """Return those `buckets` whose memory has more references than were counted. First wait a moment for references
        to end, because a thread of gloo drops a message only after it has reported the end of the message."""
        deadline = time.monotonic() + DROPPED_S
        more = set(buckets)
        while more := {bucket for bucket in more if self._referring(bucket) > self._references[bucket]}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.0005)
        return more

    def step_begins(self) -> None:
        """Before an optimizer step, find the buckets whose memory users' code still has views of."""
        self.changes.counts, self.changes.step_follows = (self.changes.counts[0] + 1, 0, 0), False
        still = {bucket for bucket in self._viewed if self._referring(bucket) > self._references[bucket]}
        self._viewed = still | self._refers_more(self._references.keys() - still)

    def step_ends(self) -> None:
        """After an optimizer step, count references again, because the step may have added some. Skip buckets whose
        memory users' code has views of."""
        others = self._references.keys() - self._viewed
        self._refers_more(others)
        for bucket in others:
            self._references[bucket] = self._referring(bucket)

    def use_cores(self, cores: int) -> None:
        """Run later steps on `cores` cores, after a wait for queued steps if the number of threads changes."""
        if (threads := threads_of_steps(cores, beside_device=self._streams.are_there)) != self._threads:
            self.close()
            self._threads, self._worker = threads, None

    def submit(self, jobs: Sequence[StepJob]) -> None:
        if self._worker is None:
            self._worker = StepWorker(self._threads, self._streams.accelerator)
        self._worker.submit([job._replace(number=self._numbers[job.bucket]) for job in jobs], self._streams.mark())

    def masters_changed(self, changed: Collection[Bucket]) -> None:
        """Schedule param syncs (gathers after a step) of the `changed` buckets, whose masters have changed or will when
        their queued step runs. Issue those whose steps have ended. Collective."""
        self.changes.were_made()
        viewed = []
        for unit in self._units:
            if not (buckets := [b for b in unit.buckets if b in changed]):
                continue
            synced = [b for b in buckets if b.plan.gathers_after_step]
            # Show placeholders now, although the param sync may be issued much later: a read in between must wait, and
            # not see old values.
            for bucket in synced:
                bucket.show(gathered=False)
            if synced:
                self._pending_syncs.append((unit, synced))
                if not self._viewed.isdisjoint(synced):
                    viewed.append(unit)
            is_here = unit.reshards and unit.state is not State.SHARDED
            if is_here:
                # A step inside a pass makes gathered values stale. The root is gathered on all ranks while a pass is
                # open, so all ranks gather it again. Other units may be gathered on some ranks only, and are gathered
                # again when they are needed, in an agreed order.
                unit.drop()
            unit.forget_node_slices()
            if is_here and unit is self._units[0]:
                unit.unshard_begin()
        self.sync_params()
        for unit in viewed:
            self.sync_params(unit)
            unit.unshard_wait()

    def sync_params(self, needed: Unit | None = None) -> None:
        """Issue the pending param syncs whose steps have ended, after a wait for the steps of units up to and including
        `needed`. All ranks issue syncs in the order of units; how many one call issues can differ between ranks."""
        if self.failed is not None:
            raise self.failed
        if not self._pending_syncs:
            return
        issuing, self._issuing = self._issuing, True
        try:
            behind = any(unit is needed for unit, _ in self._pending_syncs)
            while self._pending_syncs and (behind or self._pending_syncs[0][0].step_done):
                unit, buckets = self._pending_syncs[0]
                # Before the entry is removed: after a failed step the next call must get here again and raise.
                for bucket in buckets:
                    bucket.awaited_step.wait()
                self._pending_syncs.popleft()
                unit.begin_param_sync(buckets)
                behind = behind and unit is not needed
        finally:
            self._issuing = issuing

    @outside_autograd
    def go_on(self) -> bool:
        """Issue the pending param syncs whose steps have ended. Called repeatedly while this rank waits for other
        ranks. Return whether syncs are left for a later call; False if a step has failed or if this is called while
        this rank is issuing syncs."""
        if self.failed is not None or self._issuing:
            return False
        # Do not raise a failed step's error here: each raise adds to its traceback, which then holds whoever waits.
        if any(bucket.awaited_step.has_failed for _, buckets in self._pending_syncs for bucket in buckets):
            return False
        try:
            self.sync_params()
        except Exception:
            return False  # the next wait for steps raises it again
        return bool(self._pending_syncs)

    def wait_for_steps(self) -> None:
        """Wait for offloaded steps and their writes to files. Call before gradients change, which steps still read."""
        if self.failed is not None:
            raise self.failed
        if self._worker is not None:
            self._worker.wait()
        # Also buckets without a job on this rank: all ranks must agree on which buckets still await a step.
        for bucket in self._numbers:
            if bucket.plan.gathers_from_host:
                bucket.awaited_step.wait()
                bucket.param_store.wait_for_rest()  # a write to files may end later, and may fail

    def flush(self) -> None:
        """Wait for offloaded steps, and issue all param syncs."""
        self.wait_for_steps()
        self.sync_all_params()

    def sync_all_params(self) -> None:
        """Issue all pending param syncs, each after a wait for its step."""
        while self._pending_syncs:
            self.sync_params(self._pending_syncs[0][0])

    def wait_for_all(self) -> None:
        """Wait for offloaded steps, param syncs and all other gathers. Called before masters are read or changed."""
        self.flush()
        for unit in self._units:
            unit.unshard_wait()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
