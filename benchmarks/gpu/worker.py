"""A process for each row, and what is asked of it. A crash or a wait without end is that row's own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

EXIT_S = 30.0  # the system frees pinned memory for a while


class RowError(Exception):
    """A row cannot go on; ``details`` is for its line."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class CutError(RowError):
    """A row has had its time."""


def context() -> Any:
    """Where processes come from: a server that has imported torch, and holds no device, is forked for each."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # a profiler without a GPU has much to say about that
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["benchmarks.gpu.side"])
    return made


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _enter(pipe: Connection, spec: dict[str, Any]) -> None:
    from benchmarks.gpu.side import serve  # here, so that the command itself imports no torch

    serve(pipe, spec)


class Worker:
    """A process, which ends with this one."""

    def __init__(self, spec: dict[str, Any], processes: Any) -> None:
        self.pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_enter, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """See :func:`ask_all`."""
        return ask_all([self], command, deadline, **arguments)[0]

    def answer(self, command: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RowError(f"{command}: the process ended with {self._process.exitcode}") from error
        if "error" in answer:
            raise RowError(f"{command}: {answer['error']}", traceback=answer["traceback"])
        return answer

    def close(self, *, at_once: bool = False) -> None:
        """End the process, and wait until its memory is free."""
        self.pipe.close()
        self._process.join(0 if at_once else EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(EXIT_S)


def ask_all(workers: Sequence[Worker], command: str, deadline: float, **arguments: Any) -> list[dict[str, Any]]:
    """The answers to a command of :class:`benchmarks.gpu.side.Side`, which all get at once.

    Args:
        deadline: on the clock of ``time.monotonic``.

    Raises:
        RowError: it failed in one of them, or a process is gone.
        CutError: it was not ready by ``deadline``; the processes are killed.
    """
    for worker in workers:
        with contextlib.suppress(OSError):  # it is gone, which its answer says
            worker.pipe.send((command, arguments))
    waiting, answers = {worker.pipe: worker for worker in workers}, dict[Worker, dict[str, Any]]()
    while waiting:
        ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            for worker in workers:
                worker.close(at_once=True)
            raise CutError(f"{command} was not over in time")
        for worker in [waiting.pop(pipe) for pipe in ready]:  # type: ignore[call-overload]
            answers[worker] = worker.answer(command)
    return [answers[worker] for worker in workers]
