"""Runs parts within a budget of time, and turns what rows say into lines."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.bounds import OPTIMIZER_IN_FILES, bounds, phi
from benchmarks.gpu.fits import GIB, fitted
from benchmarks.gpu.output import Output
from benchmarks.gpu.plan import SIZES, TOLERANCE, Part, Row
from benchmarks.gpu.worker import CutError, RowError, Worker, ask_all, context, free_port

MARGIN_S = 4.0  # to end the last part and to write
PATIENCE = 2.5  # times its estimate that a part may take where the budget allows it
STEPS_OF_EXTRAS = 8  # of the peak without activations, the waits and the timeline
PEER_S = 10.0  # that a turn of a peer may take beyond several times what it took before
WRONG = ("other_bits", "far_from_bare", "other_bits_late", "other_losses", "races")  # in answers: empty if all is well


class Check:
    """One run.

    Attributes:
        failed: a part has raised or died; one that was cut or not run has not failed.
        host_gib: memory of the host that rows may use; 0: what is free.
    """

    def __init__(self, output: Output, device: str, folder: str, budget_s: float, *, broken: str | None = None) -> None:
        self.output, self.device, self.folder = output, device, folder
        self.host_gib = 0
        self.failed = False
        self._ends = time.monotonic() + budget_s
        self._processes = context()
        self._peers: dict[str, tuple[Row, Worker]] = {}  # of the size that runs now
        self._found: dict[tuple[str, str], dict[str, Any]] = {}  # of each size and side
        self._losses: dict[tuple[str, str], dict[int, float]] = {}
        self._rates: dict[str, float] = {}
        self._free_nbytes = 0  # of the device; 0: not known
        self._broken = broken

    def compare_with(self, earlier: Sequence[dict[str, Any]]) -> None:
        """Take rates and rows from what an earlier call has found."""
        for record in earlier:
            self._rates |= record.get("rates", {})
            if record["part"] == "row" and record["status"] == "ok":
                self._found[record["size"], record["side"]] = record

    # -- parts ----------------------------------------------------------------------------------------------------

    def run(self, parts: list[Part]) -> None:
        """All parts in their order; a later one that is shorter may still fit where one did not."""
        try:
            reason = self._describe_machine() if self._left() > 0 else None
            for part in fitted(parts, self._free_nbytes) if self._free_nbytes else parts:
                self._run_or_list(part, reason)
        finally:
            self._end_peers()

    def _left(self) -> float:
        return self._ends - time.monotonic() - MARGIN_S

    def _describe_machine(self) -> str | None:
        """A line about the machine. Returns why nothing can run on it."""
        worker = Worker({"device": self.device}, self._processes)
        try:
            found = worker.ask("machine", self._ends - MARGIN_S, host_gib=self.host_gib)
        except RowError as error:
            self.failed = True
            return str(error)
        finally:
            worker.close()
        self.output.write({"part": "machine", "name": "machine", "status": "ok", **found})
        if self.device == "cuda" and "device" not in found:
            self.failed = True
            return "there is no GPU here (--tiny runs on a CPU)"
        self._free_nbytes = int(found.get("device_free_gib", 0) * GIB)
        return None

    def _run_or_list(self, part: Part, reason: str | None) -> None:
        estimate, left = self._estimate(part), self._left()
        head = {"part": part.kind, "name": part.name, **part.fields, "estimate_s": round(estimate, 1)}
        if part.row is not None and any(row.size != part.row.size for row, _ in self._peers.values()):
            self._end_peers()
        reason = reason or part.why_not
        if reason or estimate > left:
            why = reason or f"{max(0.0, left):.0f} s were left"
            self.output.write({**head, "status": "not run", "why": why})
            return
        started = time.monotonic()
        deadline = started + min(left, PATIENCE * estimate + 10)
        try:
            found = self._run(part, deadline)
        except RowError as error:
            status = "cut" if isinstance(error, CutError) else "error"
            found = {"status": status, "error": str(error), **error.details}
        except Exception as error:  # of this process: the parts that follow may still run
            found = {"status": "error", "error": f"{type(error).__name__}: {error}"}
        self.failed |= found["status"] == "error"
        self.output.write({**head, **found, "took_s": round(time.monotonic() - started, 1)})

    def _estimate(self, part: Part) -> float:
        """What it should take: with an optimizer in files, what the disk that was measured allows."""
        if part.row is None or part.row.offload not in OPTIMIZER_IN_FILES or not self._rates:
            return part.estimate_s
        steps = part.row.warm_up + part.row.rounds * (1 + part.row.steps)
        return part.estimate_s / 2 + 1.3 * steps * bounds(part.row, self._rates, 0.0).get("disk", 0.0)

    def _run(self, part: Part, deadline: float) -> dict[str, Any]:
        if part.kind == "job":
            return gpu_tests.run_main_job(self.device, self.folder, self.output.folder / "job.txt", deadline)
        if part.kind == "tests":
            # Longer than its estimate at most by what ends it: the rest of the budget is for the rows.
            limit = min(part.estimate_s + gpu_tests.SUMMARY_S, deadline - time.monotonic())
            return gpu_tests.run(self.output.folder / "tests.txt", limit)
        if part.row is not None:
            return self._row(part.row, deadline)
        if part.kind != "rates":
            return self._asked(part, deadline)
        worker = Worker({"device": self.device, "folder": self.folder}, self._processes)
        try:
            self._rates = worker.ask("rates", deadline)
        finally:
            worker.close()
        return {"status": "ok", "rates": {name: float(f"{rate:.4g}") for name, rate in self._rates.items()}}

    def _asked(self, part: Part, deadline: float) -> dict[str, Any]:
        """Ask a process of its own, or one for each rank. Bits and losses that differ, and races, are errors."""
        self._end_peers()
        ranks = range(part.fields["ranks"])
        spec = {**part.fields, "device": self.device, "folder": self.folder, "size": asdict(SIZES[part.fields["size"]])}
        spec["port"] = free_port()
        workers = [Worker({**spec, "rank": rank}, self._processes) for rank in ranks]
        try:
            found, *others = ask_all(workers, part.kind, deadline, seconds=part.estimate_s)
        finally:
            for worker in workers:
                worker.close(at_once=len(workers) > 1)  # one that has failed leaves another waiting for it
        wrong = {key: [each[key] for each in (found, *others) if each.get(key)] for key in WRONG}
        said = "; ".join(f"{key}: {values}" for key, values in wrong.items() if values)
        return {"status": "ok", **found} | ({"status": "error", "error": said} if said else {})

    # -- rows -----------------------------------------------------------------------------------------------------

    def _row(self, row: Row, deadline: float) -> dict[str, Any]:
        spec = {**row.spec(self.device, self.folder), "host_gib": self.host_gib}
        if self._broken == row.name:
            spec["raises"] = "this row was to fail"
        worker, stays = Worker(spec, self._processes), False
        try:
            found = {"status": "ok", **worker.ask("build", deadline)}
            worker.ask("turn", deadline, untimed=row.warm_up, steps=0)
            found |= self._race(row, worker, deadline)
            self._found[row.size.name, row.name] = found
            found |= self._judge(row, found)
            found |= self._extras(row, worker, found["step_ms"] / 1e3, deadline)
            stays = row.is_peer and row.size.together and "extras_error" not in found
        finally:
            if stays:
                self._peers[row.name] = row, worker
            else:
                worker.close()
        return found

    def _race(self, row: Row, worker: Worker, deadline: float) -> dict[str, Any]:
        """Turns with the peers that there are; each round begins with another side."""
        peers = [] if row.compiled else list(self._peers)
        sides = {row.name: worker, **{name: self._peers[name][1] for name in peers}}
        steps: dict[str, list[list[float]]] = {name: [] for name in sides}
        forward_backward: list[float] = []
        for number in range(row.rounds):
            names = list(sides)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                answer = self._turn(name, sides, row, deadline)
                if answer is None:
                    continue
                steps[name].append(answer["step_s"])
                self._losses.setdefault((row.size.name, name), {}).update(answer["losses"])
                if name == row.name:
                    forward_backward += answer["forward_backward_s"]
        times = [seconds for turn in steps[row.name] for seconds in turn]
        own = statistics.median(times)
        ratios = {
            f"vs_{name}": round(statistics.median(map(_ratio, steps[name], steps[row.name])), 3)
            for name in peers
            if len(steps[name]) == row.rounds
        }
        return {
            "step_ms": _digits(own * 1e3),
            "spread_ms": [_digits(min(times) * 1e3), _digits(max(times) * 1e3)],
            "forward_backward_ms": _digits(statistics.median(forward_backward) * 1e3),
            "tokens_per_s": round(row.size.tokens / own),
            "micro_batch": row.size.micro_batch,
            "alternated_with": [name for name in peers if name in self._peers],
            **ratios,
        }

    def _turn(self, name: str, sides: dict[str, Worker], row: Row, deadline: float) -> dict[str, Any] | None:
        """One side's turn. A peer that fails, or takes much longer than it took, is left out from here on; where the
        row itself fails, that is raised."""
        if name != row.name:
            expected_s = (row.steps + 1) * self._found[row.size.name, name]["step_ms"] / 1e3
            deadline = min(deadline, time.monotonic() + PEER_S + PATIENCE * expected_s)
        try:
            together = row.size.together
            return sides[name].ask("turn", deadline, untimed=1, steps=row.steps, idle_after=together)
        except RowError:
            if name == row.name:
                raise
            sides.pop(name)
            self._peers.pop(name)[1].close()
            return None

    def _judge(self, row: Row, found: dict[str, Any]) -> dict[str, Any]:
        """Rates, bounds, and how its losses compare with those of the other sides."""
        size, step_s = row.size, found["step_ms"] / 1e3
        judged: dict[str, Any] = {"tflops": _digits(size.flops / step_s / 1e12)}
        if "matmul" in self._rates:
            judged["of_matmul"] = round(size.flops / step_s / self._rates["matmul"], 3)
        for peer in ("fsdp2", "bare"):
            other = self._found.get((size.name, f"{peer}+compiled" if row.compiled else peer))
            if other is not None and peer != row.side and f"vs_{peer}" not in found:
                judged[f"vs_{peer}"] = round(other["step_ms"] / found["step_ms"], 3)
        bare = self._found.get((size.name, "bare"))
        compute = bare["forward_backward_ms"] / 1e3 if bare else None
        if not row.compiled and row.offload != "auto":  # the bound is of the bare module as it is, and of one place
            judged |= phi(bounds(row, self._rates, compute), step_s, overlap=self.device == "cuda")
        losses = self._losses[size.name, row.name]
        judged["losses"] = {step: float(f"{losses[step]:.6g}") for step in (min(losses), max(losses))}
        if not all(map(math.isfinite, losses.values())):
            return judged | {"status": "error", "error": "its losses are not finite"}
        found = {peer: d for peer in ("bare", "fsdp2") if (d := self._loss_difference(row, peer)) is not None}
        if found:
            peer, most = max(found.items(), key=lambda item: item[1])
            judged["loss_difference"] = float(f"{most:.2g}")
            judged["loss_tolerance"] = TOLERANCE[size.precision]
            if most > TOLERANCE[size.precision]:
                judged |= {"status": "error", "error": f"its losses are not those of {peer}"}
        return judged

    def _loss_difference(self, row: Row, peer: str) -> float | None:
        """The largest relative difference at steps that both have made. None: with a peer that has failed, too, and for
        a model that was made on meta, whose weights are others."""
        own, other = (self._losses.get((row.size.name, name), {}) for name in (row.name, peer))
        if peer == row.name or row.offload == "auto" or not all(map(math.isfinite, other.values())):
            return None
        common = own.keys() & other.keys()
        return max((abs(own[step] - other[step]) / abs(other[step]) for step in common), default=None)

    def _extras(self, row: Row, worker: Worker, step_s: float, deadline: float) -> dict[str, Any]:
        """Memory, waits and a timeline. What fails or has no time here leaves the row as it is."""
        found: dict[str, Any] = {}
        if STEPS_OF_EXTRAS * step_s + 3 * MARGIN_S > deadline - time.monotonic():
            return {"left_out": "memory, waits and timeline: no time"}
        path = Path(self.folder) / "timeline.json.gz"
        try:
            found |= worker.ask("memory", deadline)
            found |= worker.ask("waits", deadline)
            found |= worker.ask("host_time", deadline)
            bare = self._found.get((row.size.name, "bare"), {}).get("host_ms")
            if bare is not None and row.side != "bare" and not row.compiled:
                found["host_us_per_unit"] = _digits((found["host_ms"] - bare) / row.size.n_layer * 1e3)
            found |= worker.ask("timeline", deadline, path=str(path))
            name = f"{row.size.name}-{row.name}.json.gz"
            found["timeline"] = self.output.add_timeline(path, name)
        except RowError as error:
            found |= {"extras_error": str(error), **error.details}
        return found

    def _end_peers(self) -> None:
        for _, worker in self._peers.values():
            worker.close()
        self._peers.clear()


def _ratio(other: list[float], own: list[float]) -> float:
    return statistics.median(other) / statistics.median(own)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
