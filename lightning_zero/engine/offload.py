"""The offloaded optimizer step: exact, lazy, in a thread, one bucket after the other.

::

    main   : step() | forward 0 ...... | forward 1 ...... | forward 2
    worker :        [step 0][step 1][step 2][step 3]
    read   :        [rd 0][rd 1][rd 2][rd 3]
    write  :                [wr 0][wr 1][wr 2][wr 3]

``step()`` takes the hyperparameters and the gradients as they are, and returns. A bucket's next gather waits for that
bucket's step alone; whoever looks at values, and the next backward, wait for all. At most three buckets of state in
files are in memory at a time: the one that is read, the one that is stepped, the one that is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from lightning_zero.engine.unit import Bucket


class StepJob(NamedTuple):
    """One bucket's step: ``run`` does the arithmetic while the bucket's home is open."""

    bucket: Bucket
    run: Callable[[], None]


def default_threads(share: int) -> int:
    """Threads of a rank's offloaded step, on its ``share`` of the cores: one is left for transfers if it can be."""
    return max(1, share - 1) if share > 2 else share


class StepWorker:
    """Runs jobs in a thread of its own, in order."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            1, "lightning_zero-step", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._last: Future[None] | None = None

    def submit(self, jobs: Sequence[StepJob]) -> None:
        """Start ``jobs``; each bucket's ``step_future`` ends with its own."""
        futures: list[Future[None]] = [Future() for _ in jobs]
        for job, future in zip(jobs, futures, strict=True):
            job.bucket.step_future = future
        self._last = self._pool.submit(self._run, jobs, futures)

    @staticmethod
    def _run(jobs: Sequence[StepJob], futures: Sequence[Future[None]]) -> None:
        for place, (job, future) in enumerate(zip(jobs, futures, strict=True)):
            home = job.bucket.home
            try:
                home.open()
                if place + 1 < len(jobs):
                    jobs[place + 1].bucket.home.begin_open()
                job.run()
                job.bucket.push()
                home.close(changed=True)
                if place:
                    jobs[place - 1].bucket.home.settle()
            except BaseException as error:
                for waiting in futures[place:]:
                    waiting.set_exception(error)
                raise
            future.set_result(None)
        if jobs:
            jobs[-1].bucket.home.settle()

    def wait(self) -> None:
        """Wait for everything that was submitted; its error is raised here."""
        if self._last is not None:
            self._last.result()  # an error is raised again whenever someone waits: nothing can be right afterwards
            self._last = None

    def close(self) -> None:
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())
