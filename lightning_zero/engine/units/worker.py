"""Runs offloaded optimizer steps in a thread, one bucket after the other.

::

    main   : step() | forward 0 ...... | forward 1 ...... | forward 2
    worker :        [step 0][step 1][step 2][step 3]
    read   :        [rd 0][rd 1][rd 2][rd 3]
    write  :                [wr 0][wr 1][wr 2][wr 3]

``step()`` takes the hyperparameters and the gradients as they are, and returns. A bucket's next gather waits for that
bucket's step alone. The next backward, and everything that looks at values, wait for all steps. At most three buckets
of state in files are in memory at a time: one that is read, one that is stepped, and one that is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import Home


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
