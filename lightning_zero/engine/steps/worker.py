"""The offloaded optimizer step: exact, lazy, in a thread, one bucket after the other.

::

    main   : step() | forward 0 ...... | forward 1 ...... | forward 2
    worker :        [step 0][step 1][step 2][step 3]
    read   :        [rd 0][rd 1][rd 2][rd 3]
    write  :                [wr 0][wr 1][wr 2][wr 3]

``step()`` takes the hyperparameters and the gradients as they are, and returns. A bucket's next gather waits for that
bucket's step alone; whoever looks at values, and the next backward, wait for all. At most three buckets of state in
files are in memory at a time: the one that is read, the one that is stepped, the one that is written.

Where nothing comes between a bucket's gradient and its step (see ``early_steps.py``), the step is queued
as soon as the gradient has been reduced::

    main   : backward 2 | backward 1 | backward 0 | step() | forward 0 ......
    worker :             [step 2]     [step 1]     [step 0]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import Home


class StepJob(NamedTuple):
    """One bucket's step: ``run`` does the arithmetic while the bucket's home is open."""

    bucket: Bucket
    run: Callable[[], None]
    number: int = 0  # place of the bucket in the forward


def default_threads(share: int) -> int:
    """Threads of a rank's offloaded step, on its ``share`` of the cores: one is left for transfers if it can be."""
    return max(1, share - 1) if share > 2 else share


class _Queued(NamedTuple):
    job: StepJob
    future: Future[None]


class StepWorker:
    """Runs jobs in a thread of its own: of those that wait, the one that the next forward needs first."""

    def __init__(self, threads: int, accelerator: Accelerator) -> None:
        def begin() -> None:
            torch.set_num_threads(threads)  # a setting of each thread, as is the device
            accelerator.bind_thread()

        self._pool = ThreadPoolExecutor(1, "lightning_zero-step", initializer=begin)
        self._waiting: list[_Queued] = []
        self._running = False
        self._last: Future[None] | None = None
        self._lock = threading.Lock()

    def submit(self, jobs: Iterable[StepJob], event: Any) -> None:
        """Queue jobs; each ends the step that its bucket awaits.

        Args:
            event: on a GPU, behind what may still read what the steps change there.
        """
        queued = [_Queued(job, job.bucket.step.ask(event)) for job in jobs]
        with self._lock:
            self._waiting = sorted([*self._waiting, *queued], key=lambda q: q.job.number)
            if not self._running:
                self._running = True
                self._last = self._pool.submit(self._run)

    def _take(self) -> _Queued | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _run(self) -> None:
        """Until nothing waits. What has begun to be read is next, whatever comes: memory holds three buckets."""
        current, done = self._take(), None
        while current is not None:
            following = None
            home = current.job.bucket.home
            try:
                home.open()
                if (following := self._take()) is not None:
                    following.job.bucket.home.begin_open()
                current.job.run()
                current.job.bucket.push()
                home.close(changed=True)
                if done is not None:
                    done.settle()
            except BaseException as error:
                self._fail(error, current, following)
                raise
            current.future.set_result(None)
            current, done = following or self._next_or_stop(home), home

    def _next_or_stop(self, home: Home) -> _Queued | None:
        """The next job; where there is none, the last bucket is brought to rest first, and a job may come meanwhile."""
        if (following := self._take()) is None:
            home.settle()
            with self._lock:
                self._running = bool(self._waiting)
                following = self._waiting.pop(0) if self._waiting else None
        return following

    def _fail(self, error: BaseException, *taken: _Queued | None) -> None:
        with self._lock:
            left, self._waiting = self._waiting, []
            self._running = False
        for queued in (*taken, *left):
            if queued is not None:
                queued.future.set_exception(error)

    def wait(self) -> None:
        """Wait for everything that was submitted; its error is raised here."""
        if self._last is not None:
            self._last.result()  # an error is raised again whenever someone waits: nothing can be right afterwards
            self._last = None

    def close(self) -> None:
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())
