"""The process of one row: trains one model in one way, and measures itself when it is asked to.

The command holds the other end of a pipe (``worker.py``). Between two commands this process does nothing and keeps no
cached memory, so that another row can take its turn on the same device.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, where processes are forked from, and not at each one's first step
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import lightning_zero.engine
from benchmarks import rates
from benchmarks.gpu import exact, fit, trace
from benchmarks.gpu.model import Block, loss_of, make_model
from benchmarks.gpu.plan import Size
from lightning_zero.planning import memory
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import MIB
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of

BATCHES = 4  # different ones, in turn
PROFILED_STEPS = 2
HOST_STEPS = 5
SMALL = (1, 9)  # sequences, tokens: activations are next to nothing
ERROR_LINES = 30
AUTO = 0.65  # of the device's memory is for what `auto` places; the rest for parameters and activations
# NCCL refuses two ranks of one host on one GPU: each calls itself a host, and they talk over sockets.
TWO_HOSTS = {
    **{"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_MAX_CTAS": "4"},
    **{f"NCCL_{name}": "1" for name in ("IB_DISABLE", "P2P_DISABLE", "SHM_DISABLE")},
    **{f"NCCL_{name}_ENABLE": "0" for name in ("NVLS", "MNNVL")},
}


def serve(pipe: Connection, spec: dict[str, Any]) -> None:
    """Answer commands until the pipe closes. What a command raises is an answer too."""
    if spec["device"] == "cpu":
        torch.set_num_threads(1)  # a tiny model has nothing to share, and threads that wait for each other take time
    side = Side(spec)
    try:
        while True:
            command, arguments = pipe.recv()
            try:
                answer = getattr(side, command)(**arguments)
            except BaseException as error:
                lines = traceback.format_exc().splitlines()[-ERROR_LINES:]
                answer = {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": lines}
            pipe.send(answer)
    except EOFError:
        pass
    # At once: an orderly end would bring all values back to the device first. Folders of files are the command's.
    os._exit(0)


def measure_rates(device: str, folder: str) -> dict[str, float]:
    """Bytes and operations per second; on a CPU by small probes."""
    cuda = device == "cuda"
    found = {
        "host_copy": rates.host_copy_rate((2048 if cuda else 16) * MIB),
        "host_adam": rates.host_adam_rate((64 if cuda else 1) << 20),
    }
    if cuda:
        found |= {"matmul": rates.matmul_rate(), "device_copy": rates.device_copy_rate(), **rates.link_rates()}
    found["disk_read"], found["disk_write"] = rates.disk_rates(folder, (1024 if cuda else 8) * MIB)
    return found


def memory_of_libraries() -> int:
    """Bytes that libraries keep for their work from the first product on: no plan knows them."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # the backward's thread has its own
    del x
    return torch.cuda.memory_allocated()


class Side:
    """One way to train one model.

    Attributes:
        spec: see :meth:`benchmarks.gpu.plan.Row.spec`.
        count: steps so far, which choose the batch.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.size: Size | None = Size(**spec["size"]) if "size" in spec else None
        self.device = spec["device"]
        self.cuda = self.device == "cuda"
        self.count = 0
        self.engine: Any = None
        self.used_before = _meminfo("MemTotal") - _meminfo("MemAvailable")
        self.ranks = spec.get("ranks", 1)
        if self.ranks > 1:
            rank, size, port = str(spec["rank"]), str(self.ranks), str(spec["port"])
            where = {"NCCL_HOSTID": f"rank{rank}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update(TWO_HOSTS | where, RANK=rank, NODE_RANK=rank, LOCAL_RANK="0", WORLD_SIZE=size)

    # -- commands -------------------------------------------------------------------------------------------------

    def machine(self, host_gib: int) -> dict[str, Any]:
        """What runs here. Half of ``host_gib`` is touched: some machines get their memory as it is used."""
        found = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
        found |= {"host_gib": _gib(_meminfo("MemTotal")), "host_available_gib": _gib(_meminfo("MemAvailable"))}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found |= {"device": torch.cuda.get_device_name(), "device_gib": _gib(total), "device_free_gib": _gib(free)}
        if host_gib:
            touched = torch.empty(host_gib << 29, dtype=torch.uint8).fill_(1)
            found |= {"touched_gib": _gib(touched.numel()), "host_gib_then": _gib(_meminfo("MemTotal"))}
        return found

    def rates(self) -> dict[str, float]:
        return measure_rates(self.device, self.spec["folder"])

    def bits(self, seconds: float) -> dict[str, Any]:
        """See :func:`benchmarks.gpu.exact.compare`; for so many seconds."""
        if self.ranks > 1:
            dist.init_process_group("nccl" if self.cuda else "gloo")
        return exact.compare(self._asked_for(), self.device, time.monotonic() + seconds, seeds=5)

    def sanitizer(self, seconds: float) -> dict[str, Any]:
        return exact.sanitize(self._asked_for(), self.device)

    def trainer(self, seconds: float) -> dict[str, Any]:
        if importlib.util.find_spec("lightning") is None:
            return {"status": "not run", "why": "lightning is not installed"}
        return fit.measure(self._asked_for(), self.device, self.spec["folder"], self.spec["sides"], self.ranks)

    def _asked_for(self) -> Size:
        assert self.size is not None
        return self.size

    def build(self) -> dict[str, Any]:
        """Make the model, and what trains it."""
        started = time.perf_counter()
        size, spec = self.size, self.spec
        assert size is not None
        if spec.get("raises"):  # of tests: what becomes of a row that fails
            raise RuntimeError(spec["raises"])
        if self.cuda:
            torch.cuda.set_device(0)
            self.of_libraries = memory_of_libraries()
        if spec["side"] == "fsdp2" or spec["alone"]:
            store = Path(spec["folder"]) / f"store-{os.getpid()}"
            backend = "nccl" if self.cuda else "gloo"
            dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
        self.model = make_model(size, "meta" if spec["offload"] == "auto" else self.device)
        parameters = sum(p.numel() for p in self.model.parameters())
        if spec["compiled"] and not spec["side"].startswith("zero"):
            for module in self.model.modules():
                if isinstance(module, Block):
                    module.compile()
        build = {"bare": self._build_bare, "fsdp2": self._build_fsdp2}.get(spec["side"], self._build_ours)
        self.model_step = build()
        self.batches = [self._batch(i) for i in range(BATCHES)]
        self._settle()
        found = {"parameters": parameters, "build_s": round(time.perf_counter() - started, 2)}
        if self.cuda:  # a peak of its own, for it has the whole module beside what is made of it
            found["device_peak_of_build_gib"] = _gib(torch.cuda.max_memory_allocated())
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return found

    def turn(self, untimed: int, steps: int, *, idle_after: bool = False) -> dict[str, Any]:
        """``untimed`` steps, then ``steps`` timed ones, from the end of one to the end of the next.

        What a step leaves running (an offloaded optimizer) falls on the next one, as it does in training.

        Args:
            idle_after: give cached memory back, since others have the device next.
        """
        losses = [self._step()[0] for _ in range(untimed)]
        first, marks = self.count - untimed, [self._mark()]
        for _ in range(steps):
            loss, after_backward = self._step()
            losses.append(loss)
            marks += [after_backward, self._mark()]
        self._settle()
        if idle_after and self.cuda:
            torch.cuda.empty_cache()
        ends = marks[::2]
        return {
            "step_s": [self._between(a, b) for a, b in pairwise(ends)],
            "forward_backward_s": [self._between(a, b) for a, b in zip(ends, marks[1::2], strict=False)],
            "losses": {first + i: loss.item() for i, loss in enumerate(losses)},
        }

    def memory(self) -> dict[str, Any]:
        """Peaks of the steps so far, and what was planned; then the device's peak with next to no activations."""
        used = _meminfo("MemTotal") - _meminfo("MemAvailable") - self.used_before
        found: dict[str, Any] = {"host_rss_peak_gib": _gib(_rss_peak()), "host_used_gib": _gib(used)}
        if self.cuda:
            found["device_peak_gib"] = _gib(torch.cuda.max_memory_allocated())
            found["device_reserved_gib"] = _gib(torch.cuda.max_memory_reserved())
        if self.engine is not None:
            peaks = memory.peak_bytes(plan_of(self.engine), limits_of(self.engine)).values()
            planned = max(memory.on_tier(held, Tier.device) for held in peaks)
            found["planned_device_gib"] = _gib(planned)
            found["planned_host_gib"] = _gib(max(memory.on_tier(held, Tier.host) for held in peaks))
        if self.cuda:
            small = self._small_peak()
            found["device_peak_small_gib"] = _gib(small)
            if self.engine is not None:
                found["peak_over_plan"] = round(small / planned, 4)
        return found

    def waits(self) -> dict[str, Any]:
        """Where calls of torch wait for the device in a step, by torch's own warnings. (Waits for events give none.)"""
        if not self.cuda:
            return {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(PROFILED_STEPS):
                    self._step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self._settle()
        places = Counter(_place(w) for w in caught if "called a synchronizing" in str(w.message))
        per_step = {place: n / PROFILED_STEPS for place, n in places.most_common(12)}
        return {"sync_warnings": places.total() / PROFILED_STEPS, "sync_warnings_at": per_step}

    def host_time(self) -> dict[str, Any]:
        """Milliseconds of the processor, on all threads, in a step of one short sequence: next to nothing is computed.
        A GPU's kernels are as short; on a CPU they count."""
        tokens = self.batches[0][: SMALL[0], : SMALL[1]].contiguous()
        self.model_step(tokens)
        self._settle()
        started = time.process_time()
        for _ in range(HOST_STEPS):
            self.model_step(tokens)
        spent = time.process_time() - started
        self._settle()
        return {"host_ms": round(spent / HOST_STEPS * 1e3, 3)}

    def timeline(self, path: str) -> dict[str, Any]:
        """Write a timeline of a few steps to ``path`` (gzip), and say what is in it."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiled:
            for _ in range(PROFILED_STEPS):
                with torch.profiler.record_function(trace.STEP):
                    self._step()
            self._settle()
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(plain))
            text = plain.read_bytes()
        Path(path).write_bytes(gzip.compress(text, 6))
        return trace.of_trace(json.loads(text))

    # -- ways to train --------------------------------------------------------------------------------------------

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.size is None or self.size.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=False)

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def _build_bare(self) -> Callable[[Tensor], tuple[Tensor, Any]]:
        return self._plain_step(self._optimizer(), self._autocast)

    def _build_fsdp2(self) -> Callable[[Tensor], tuple[Tensor, Any]]:
        size = self.size
        assert size is not None
        options: dict[str, Any] = {}
        if size.precision != "fp32":
            reduced = torch.bfloat16 if size.reduce_dtype == "bf16" else torch.float32
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        if self.spec["offload"] == "cpu":  # parameters, gradients and the optimizer
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.cuda)
        mesh = init_device_mesh(self.device, (1,))
        for module in self.model.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        return self._plain_step(self._optimizer(), nullcontext)

    def _plain_step(
        self, optimizer: torch.optim.Optimizer, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[Tensor], tuple[Tensor, Any]]:
        def step(tokens: Tensor) -> tuple[Tensor, Any]:
            with autocast():
                loss = loss_of(self.model, tokens)
            loss.backward()
            after_backward = self._mark()
            optimizer.step()
            optimizer.zero_grad()
            return loss, after_backward

        return step

    def _build_ours(self) -> Callable[[Tensor], tuple[Tensor, Any]]:
        spec, size = self.spec, self.size
        assert size is not None
        offload: dict[str, Any] = {"name": spec["offload"]}
        if "nvme" in spec["offload"]:
            offload["nvme_path"] = spec["folder"]
        if spec["offload"] == "auto":
            offload["device_budget"] = int(AUTO * torch.cuda.mem_get_info()[1]) if self.cuda else 200_000
        if (
            spec["offload"] in ("optimizer_cpu", "cpu", "auto") and spec["host_gib"]
        ):  # what is free may not say what there is
            offload["host_budget"] = f"{spec['host_gib']}GiB"
        precision = {"name": size.precision, "reduce_dtype": size.reduce_dtype}
        os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = str(int(spec["alone"]))
        self.engine = engine = lightning_zero.shard(
            self.model,
            stage=spec["side"],
            precision=precision,
            offload=offload,
            device=self.device,
            compile="blocks" if spec["compiled"] else "none",
        )
        optimizer = self._optimizer()
        engine.add_optimizer(optimizer)

        def step(tokens: Tensor) -> tuple[Tensor, Any]:
            found: list[Any] = []

            def closure() -> Tensor:
                with self._autocast():
                    loss = loss_of(self.model, tokens)
                optimizer.zero_grad()
                engine.passes.backward(loss)
                found.extend([loss, self._mark()])
                return loss

            optimizer.step(closure)
            return found[0], found[1]

        return step

    # -- steps and clocks -----------------------------------------------------------------------------------------

    def _batch(self, seed: int) -> Tensor:
        assert self.size is not None
        shape = self.size.micro_batch, self.size.length + 1
        drawn = torch.randint(0, self.size.vocab_size, shape, generator=torch.Generator().manual_seed(1000 + seed))
        return drawn.to(self.device)

    def _step(self) -> tuple[Tensor, Any]:
        loss, mark = self.model_step(self.batches[self.count % BATCHES])
        self.count += 1
        return loss.detach(), mark

    def _small_peak(self) -> int:
        """Peak of the device's memory in steps of one short sequence, as the plan counts: without activations."""
        torch.cuda.reset_peak_memory_stats()
        tokens = self.batches[0][: SMALL[0], : SMALL[1]].contiguous()
        for _ in range(2):
            self.model_step(tokens)
        self._settle()
        return torch.cuda.max_memory_allocated() - self.of_libraries

    def _settle(self) -> None:
        """Wait until nothing runs: no offloaded step, no kernel."""
        if self.engine is not None:
            self.engine.passes.wait_for_all()
        if self.cuda:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start


def _place(warning: warnings.WarningMessage) -> str:
    """File and line from the package on: no folder of this machine."""
    path = Path(warning.filename)
    known = [i for i, part in enumerate(path.parts) if part in ("lightning_zero", "benchmarks", "torch")]
    return f"{'/'.join(path.parts[known[-1] if known else -1 :])}:{warning.lineno}"


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 3)


def _meminfo(key: str) -> int:
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:")), 0)


def _rss_peak() -> int:
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
