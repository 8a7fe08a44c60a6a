"""Tests with real processes: pools of forked workers, each with one gloo process group that runs many cases.

The short way, a test whose body runs on every rank of pools of 2 and then of 3 workers::

    @on_ranks(2, 3)
    @pytest.mark.parametrize("stage", [0, 3])
    def test_something(stage):
        assert dist.get_world_size() in (2, 3)

(``parametrize`` and fixtures with picklable values work as usual; they are evaluated in the parent.)

The long way, where the parent looks at what the ranks found::

    losses = run(2, train, stage, timeout=30)     # train is a function at module level: it is sent by its name
    assert losses[0] == losses[1]

- An exception on any rank fails the test with that rank's traceback. The other ranks are killed after a short grace,
  and so are all ranks of a case that takes longer than ``timeout`` (with their stacks in the message). The next case
  then gets a new pool; otherwise it gets the workers as the case before left them, so undo global changes.
  What the harness undoes itself: environment variables, the working directory, seeds, default dtype, grad mode.
- Workers look like processes that were started from outside: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
  MASTER_PORT are set, and the default group exists, which Lightning's strategies take over as it is.
- Each process group of gloo has a thread that polls a hundred times a second, as long as its process lives: with the
  groups of many engines, this was a large part of the system time of a run. So pools are stopped (SIGSTOP) between
  cases, and one that has gathered many threads is ended after its case; the next case gets a new one.
- Fork takes 0.1 s where spawn takes 5. The price: the parent may not run parallel torch code before it forks, so
  everything here runs on one thread; nor a backward, which starts threads: tests/conftest.py fails the test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import inspect
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, here, and not in every worker at its first backward
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
LAUNCHERS = ("LOCAL_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "NODE_RANK", "OMPI_", "PMI_")
LAUNCHERS += ("GROUP_RANK", "GROUP_WORLD_SIZE")
DEFAULT_TIMEOUT_S = 60.0
GRACE_S = 3.0  # for the other ranks, once one has failed
EXIT_S = 20.0
MANY_THREADS = 40  # of one worker: those of the groups of three engines at a time, or so
_DUMP_STACKS = signal.SIGUSR2  # SIGUSR1 is SLURM's

torch.set_num_threads(1)


class WorkerDied(RuntimeError):
    """A worker has ended without an answer."""


class CaseTimeout(AssertionError):
    """A case took too long; the message holds the stacks of the ranks that were still running."""


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on all ranks of a pool of ``world`` workers; its results in rank order."""
    pool = _POOLS.get(world)
    if pool is None:
        pool = _POOLS[world] = Pool(world)
    try:
        pool.signal(signal.SIGCONT)
        results = pool.run(pickle.dumps((function, args, kwargs)), timeout)
    except BaseException:
        del _POOLS[world]
        pool.kill()
        raise
    if pool.threads() > MANY_THREADS:
        del _POOLS[world]
        _EXIT_CODES[world] = _EXIT_CODES.get(world, []) + pool.close()
    else:
        pool.signal(signal.SIGSTOP)
    return results


def on_ranks(
    *worlds: int, full: Sequence[int] = (), timeout: float = DEFAULT_TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that is to run on every rank, once for each number of ranks.

    Args:
        worlds: numbers of ranks of the default run.
        full: more of them, for the full run.
    """
    cases = [pytest.param(n, id=f"{n}ranks") for n in worlds]
    cases += [pytest.param(n, id=f"{n}ranks", marks=pytest.mark.full) for n in full]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world: int, **kwargs: Any) -> None:
            run(world, test, timeout=timeout, **kwargs)

        parameters = inspect.signature(body).parameters.values()
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *parameters])  # type: ignore[attr-defined]
        test.__dict__["body"] = body  # what a worker runs: it finds ``test`` by name
        return pytest.mark.parametrize("world", cases)(test)

    return decorate


def run_command(
    *words: object, folder: Path = ROOT, timeout: float = 200.0, code: int | None = None, **environ: object
) -> subprocess.CompletedProcess[str]:
    """What a program gives that runs to its end: its exit code, which must be ``code``, and what it prints.

    It takes the packages of this tree, wherever it runs, and computes on one thread. ``"python"`` is the one that runs
    this. ``environ``: variables to set; those of launchers are taken away.
    """
    given = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    paths = [str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    given |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in environ.items()}
    command = [sys.executable if word == "python" else str(word) for word in words]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=timeout)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def forked(
    call: Callable[[], object],
    folder: Path,
    argv: Sequence[str],
    *,
    timeout: float = 200.0,
    code: int | None = None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """What a command gives whose Python code is ``call``: its exit code, which must be ``code``, and what it prints.

    It is a fork of this process: seconds of imports are not done again. What it starts by itself are real processes.

    Args:
        folder: to run in; modules there can be imported.
        argv: ``sys.argv``.
        environ: variables to set; those of launchers are taken away.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = out.fileno(), err.fileno()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_as_command, args=(call, folder, list(argv), environ, *files))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        process.kill()
        process.join()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
    assert not late, f"took longer than {timeout:g} s\n{said[0]}\n{said[1]}"
    assert process.exitcode is not None
    assert code in (None, process.exitcode), f"exit code {process.exitcode}\n{said[0]}\n{said[1]}"
    return subprocess.CompletedProcess(list(argv), process.exitcode, *said)


def _as_command(
    call: Callable[[], object], folder: Path, argv: list[str], environ: dict[str, str], out: int, err: int
) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for key in [key for key in os.environ if key.startswith(LAUNCHERS)]:
        del os.environ[key]
    os.environ.update(environ)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = argv
    # Of an earlier test in this process: Lightning would start the other ranks as those of that job.
    if "hydra" in sys.modules:  # which is not needed by all tests, nor there everywhere
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().cfg = None
        GlobalHydra.instance().clear()
    warnings.resetwarnings()  # those of pytest; then Python's own
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning  # pytest would keep them for its report
    _log_here()
    call()


def _log_here() -> None:
    """Let handlers write to where stderr is now: a test that took its output may have made them, and have ended."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:  # one that pytest has not made
                handler.stream = sys.stderr  # the old one may be closed, and would be flushed by ``setStream``


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def assert_gone(references: Sequence[weakref.ref[Any]]) -> None:
    """What these weak references led to is collected, perhaps in several rounds, and when a thread has let go of it."""
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        if all(reference() is None for reference in references):
            return
        assert time.monotonic() < deadline, [
            (reference(), [str(holder)[:200] for holder in gc.get_referrers(reference())])
            for reference in references
            if reference() is not None
        ]
        time.sleep(0.05)


def close_pools() -> dict[int, list[int | None]]:
    """End all pools in good order; the exit codes of their workers (None: had to be killed), by pool size.

    Those of pools that were ended before are among them.
    """
    codes = {world: _EXIT_CODES.get(world, []) + pool.close() for world, pool in _POOLS.items()}
    codes = {**_EXIT_CODES, **codes}
    _POOLS.clear()
    _EXIT_CODES.clear()
    return codes


class Pool:
    """``world`` workers that stand in one process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="lightning_zero_pool_")
        fork = multiprocessing.get_context("fork")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world):
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=_work, args=(rank, world, port, theirs, self._stack_file(rank)), name=f"pool{world}-rank{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: bytes, timeout: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(case)
        answers = self._collect(time.monotonic() + timeout, timeout)
        failed = [(rank, answer) for rank, (ok, answer) in answers.items() if not ok]
        if failed:
            raise _restored(failed)
        return [answers[rank][1] for rank in range(self.world)]

    def _collect(self, deadline: float, timeout: float) -> dict[int, tuple[bool, Any]]:
        """The answers of all ranks; of fewer if one failed and others did not come back within the grace time."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        one_failed = False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if one_failed:
                    return answers
                stacks = "\n".join(self._stack(rank) for rank in sorted(waiting.values()))
                raise CaseTimeout(f"ranks {sorted(waiting.values())} took longer than {timeout:g} s\n{stacks}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._receive(rank)
                if not answers[rank][0] and not one_failed:
                    one_failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(self._pipes[rank].recv_bytes())
            return answer
        except EOFError:
            self._processes[rank].join(EXIT_S)
            return False, (WorkerDied(f"the worker died with exit code {self._processes[rank].exitcode}"), "")

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}"

    def _stack(self, rank: int) -> str:
        pid = self._processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _DUMP_STACKS)
        time.sleep(0.3)  # the handler writes at once; nothing tells when
        return f"--- rank {rank} ---\n{self._stack_file(rank).read_text()}"

    def signal(self, number: int) -> None:
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def threads(self) -> int:
        """Of the worker that has most of them (0 where the system has no /proc)."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        return max(len(list(folder.iterdir())) if folder.is_dir() else 0 for folder in folders)

    def close(self) -> list[int | None]:
        self.signal(signal.SIGCONT)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(EXIT_S)
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


_POOLS: dict[int, Pool] = {}
_EXIT_CODES: dict[int, list[int | None]] = {}  # of pools that have ended


def _kill_pools() -> None:
    for pool in _POOLS.values():
        pool.kill()


atexit.register(_kill_pools)


def _restored(failed: list[tuple[int, tuple[BaseException, str]]]) -> BaseException:
    """The first exception that is more than a consequence of another rank's, with every rank's traceback as a note."""
    # Another rank may have noticed the end of a worker, and answered, before its pipe was closed.
    rank, (error, _) = min(
        failed, key=lambda f: (not isinstance(f[1][0], WorkerDied), isinstance(f[1][0], ConnectionError))
    )
    error.add_note(f"on rank {rank}")
    for other, (_, text) in failed:
        error.add_note(f"--- rank {other} ---\n{text}")
    return error


def free_port() -> int:
    """One that nobody has, and below those that the system gives to sockets which take any: it will still be free."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


# -- in the workers ---------------------------------------------------------------------------------------------------


def _work(rank: int, world: int, port: int, pipe: Connection, stack_file: Path) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent tells us to end
    stacks = stack_file.open("w")
    faulthandler.register(_DUMP_STACKS, file=stacks, all_threads=True)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place["OMP_NUM_THREADS"] = 1  # Lightning would set it, to more for fewer ranks
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    gc.freeze()  # what came with the fork is not looked at again
    _take_own_cores()
    on_gpu = os.environ.get("LIGHTNING_ZERO_TEST_DEVICE") == "cuda"  # each rank has one of its own
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank, world_size=world)
    while case := pipe.recv_bytes():
        with _undone():
            answer = _answer(case)
        pipe.send_bytes(answer)
    dist.barrier()  # gloo aborts at random if a rank destroys the group while another still uses it
    dist.destroy_process_group()


def _answer(case: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(case)
        return pickle.dumps((True, getattr(function, "body", function)(*args, **kwargs)))
    except BaseException as error:
        text = traceback.format_exc()
        return pickle.dumps((False, (_picklable(error), text)))


def _picklable(error: BaseException) -> BaseException:
    try:
        again: BaseException = pickle.loads(pickle.dumps(error))
        return again
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Every case starts with the same seeds, and its changes to the process are undone."""
    environ, folder = dict(os.environ), os.getcwd()
    dtype = torch.get_default_dtype()
    _log_here()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack three times, for devices to come
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        gc.collect()


def _take_own_cores() -> None:
    """Of several processes of pytest (xdist), each has workers on cores of its own.

    A message wakes three threads, and waking one on another core costs virtual machines several times as much: on two
    cores, tests of two ranks took two thirds of the processor time.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if count > 1 and hasattr(os, "sched_setaffinity"):
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % count :: count] or cores)


def _die_with_parent() -> None:
    """A worker must not outlive a killed test run (Linux only; elsewhere the closed pipe ends it)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
