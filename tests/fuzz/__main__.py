"""Random programs for as long as one likes; ``make fuzz``.

::

    python -m tests.fuzz --minutes 60             # with a new seed, which it prints
    python -m tests.fuzz --minutes 5 --seed 7     # the same programs again, as far as it gets

A program that fails is made small, printed, and written to a folder as a script that runs on its own. The search goes
on until the time is up, and passes over failures that say the same. The exit status is 1 if there were any.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.programs import Program, script, source
from tests.fuzz.run import Runner, Verdict
from tests.fuzz.strategies import programs

ROUND = 200  # programs of one seed
SHRINK_S = 300.0  # for making one failure small


class Failure(AssertionError):
    """A program has failed."""


class Search:
    """Counts what comes of programs, and keeps the smallest that fails."""

    def __init__(self, runner: Runner, until: float) -> None:
        self._runner, self._stall_timeout_s = runner, runner.stall_timeout_s
        self._until = until
        self.counts: collections.Counter[str] = collections.Counter()
        self.known: set[str] = set()  # signatures of failures
        self.smallest: tuple[Program, Verdict] | None = None
        self._shrink_until = 0.0
        self._signature = ""

    def over(self) -> bool:
        return time.monotonic() > self._until

    def round(self, number: int) -> None:
        """Programs of one seed, up to the first new failure and the smallest like it."""
        self.smallest = None
        self._runner.stall_timeout_s = self._stall_timeout_s

        @seed(number)
        @settings(
            max_examples=ROUND,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        @given(programs())
        def run(program: Program) -> None:
            self._try(program)

        try:
            run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or self.smallest is None:
                raise
        if self.smallest is not None:
            self.known.add(self._signature)

    def _try(self, program: Program) -> None:
        if self.smallest is None and self.over():
            return
        if self.smallest is not None and time.monotonic() > self._shrink_until:
            if program == self.smallest[0]:
                raise Failure
            return
        verdict = self._runner.run(program)
        if self.smallest is None:
            refused = f": {verdict.refusal.why}" if verdict.refusal is not None else ""
            self.counts[verdict.kind + refused] += 1
        if not verdict.failed or verdict.signature in self.known:
            return
        if self.smallest is None:
            self._signature = verdict.signature
            self._shrink_until = time.monotonic() + SHRINK_S
            self._runner.stall_timeout_s = self._stall_timeout_s / 3  # hundreds of times, if ranks wait in vain
            print(f"a failure: {verdict.signature}; making it small ...", flush=True)
        elif verdict.signature != self._signature:
            return  # another failure: not a smaller one of the same
        if self.smallest is None or len(source(program)) <= len(source(self.smallest[0])):
            self.smallest = program, verdict
        raise Failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random programs against a plain twin.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--folder", type=Path, default=Path("outputs/fuzz"), help="for programs that fail")
    parser.add_argument("--stall", type=float, default=15.0, help="seconds that ranks wait for one another")
    chosen = parser.parse_args()
    first = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    print(f"seed {first}, {chosen.minutes:g} minutes", flush=True)
    scripts: list[Path] = []
    with Runner(stall_timeout_s=chosen.stall) as runner:
        search = Search(runner, time.monotonic() + 60 * chosen.minutes)
        number = first
        while not search.over():
            search.round(number)
            number += 1
            if search.smallest is not None:
                program, verdict = search.smallest
                text = script(program, f"{verdict.kind}\n{verdict.text}", verdict.earlier)
                chosen.folder.mkdir(parents=True, exist_ok=True)
                scripts.append(chosen.folder / f"failure_{first}_{len(scripts)}.py")
                scripts[-1].write_text(text)
                print(f"\n# {scripts[-1]}\n{text}", flush=True)
    print(f"\n{sum(search.counts.values())} programs, seed {first}:")
    for what, count in search.counts.most_common():
        print(f"{count:6d} {what}")
    for path in scripts:
        print(f"failed: {path}")
    return int(bool(scripts))


if __name__ == "__main__":
    sys.exit(main())
