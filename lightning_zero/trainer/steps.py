"""Run the Trainer's steps. If set, divide sequences among ranks, average losses over tokens, write fingerprints."""

from __future__ import annotations

import contextlib
import csv
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.comm.sequence import SequenceGroup, open_sequence_group
from lightning_zero.device import accelerator_of
from lightning_zero.engine import Engine
from lightning_zero.engine.passes.writes import checksum_on_device
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.whole.values import MASTER, own_fragments
from lightning_zero.engine.whole.whole_params import take_writes_over
from lightning_zero.lightning_api import pl
from lightning_zero.planning.topology import Ranks
from lightning_zero.sequence.part import SequencePart, WholeBatch
from lightning_zero.sequence.step import SequenceSteps, check_alike
from lightning_zero.settings import ConfigError, LossMean
from lightning_zero.trainer.run import Run
from lightning_zero.trainer.sequence_check import SequenceCheck
from lightning_zero.trainer.step_tokens import StepTokens

LARGEST_SEED = 2**62
KEY = "zero.tensor_parallel"
_SUMS = 8  # sums of each gradient: each is over every 8th element


class LongSequences(SequenceSteps):
    """Runs the module's steps: on whole sequences if ``group`` is None, else on one part of a sequence per rank."""

    def __init__(
        self,
        module: Any = None,
        engine: Engine | None = None,
        ranks: Ranks | None = None,
        tokens: StepTokens | None = None,
    ) -> None:
        """Create the group of the ranks that share a sequence or a batch with this rank, if there are such ranks.
        Raise ConfigError if sequences are divided and the module is compiled. ``tokens``: counts the tokens of training
        steps; None: do not count. Collective."""
        self.group: SequenceGroup | None = None
        self.tokens = tokens
        self._check: SequenceCheck | None = None
        self._shared_batches: SharedBatches | None = None
        if engine is None or ranks is None or ranks.same_batch.size == 1:
            super().__init__(module, None)
            return
        divides = ranks.sequence.size > 1
        if divides and engine.compiled.are_there:
            raise ConfigError(
                "zero.sequence_parallel: expected a module without compiled parts (a compiled graph would not call "
                "the attention that exchanges heads between ranks), got a compiled one with "
                f"zero.sequence_parallel={ranks.sequence.size}. Do not call torch.compile, or drop "
                "zero.sequence_parallel."
            )
        group = open_sequence_group(dist.group.WORLD, ranks.same_batch, engine.comm.device, engine.comm.waits)
        super().__init__(module, group if divides else None)
        if divides:
            self.group, self._check = group, SequenceCheck(module, engine, self, group)
        else:
            self._shared_batches = shared = SharedBatches(group)
            engine.passes.on_grad = lambda info, grad: shared.note(info.fqn, grad) if info.split is None else None

    def check_alike(self, batch: Any) -> None:
        if self.group is not None:
            check_alike(batch, self.group)
        if self._shared_batches is not None:
            check_alike(batch, self._shared_batches.group, KEY)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        with super().backward():
            yield
        if self._shared_batches is not None:
            self._shared_batches.check_grads()

    def seed_alike(self) -> None:
        """Seed the generators of ranks that share a batch or a sequence with the same number, unless their states are
        equal. Dropout and randomly chosen layers must agree on these ranks, but without ``seed_everything`` each
        process starts with a different seed. Collective."""
        group = self.group if self._shared_batches is None else self._shared_batches.group
        if group is None:
            return
        states = [zlib.crc32(state.numpy().tobytes()) for state in Generators.now(group.device).as_tensors().values()]
        found = group.gather_objects((states, torch.initial_seed()), "random numbers of ranks that share a batch")
        if any(other != found[0] for other in found):
            Generators.seeded(found[0][1], group.device).restore(group.device)

    @property
    def trying(self) -> SequenceCheck | None:
        """Return the SequenceCheck while it runs a trial step, else None."""
        return self._check if self._check is not None and self._check.found is not None else None

    def check(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any, *, together: bool = True) -> None:
        """Before the step ``name``, compare trial steps on whole sequences and on parts; see
        :meth:`SequenceCheck.before`."""
        if self._check is not None:
            self._check.before(name, step, (*args, *kwargs.values()), together=together)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch, *more = (*args, *kwargs.values())
        with self._random_numbers_of_a_part():
            part, own = self.cut(batch)
            if self.tokens is not None:
                part = part or WholeBatch()
                part.empty_is_zero = True
            return self.train(part, step, own, *more)

    def whole_loss(self, part: SequencePart, loss: Tensor, tokens: Any) -> Tensor:
        if self.tokens is None:
            return super().whole_loss(part, loss, tokens)
        if tokens is not None:
            loss = part.mean_over(loss, tokens)
        if self.trying is None and loss.requires_grad:  # manual optimization returns losses without a backward
            self.tokens.of_next_backward = part.count(loss)
        return loss if isinstance(part, WholeBatch) else part.loss(loss)

    @contextlib.contextmanager
    def _random_numbers_of_a_part(self) -> Iterator[None]:
        """During the body, seed torch differently on the ranks that share a sequence, so that their dropout differs.

        The seed is the rank plus a number drawn from torch's generator, whose state is equal on these ranks and saved
        in checkpoints. Python's and NumPy's generators, by which models may choose layers, stay equal on these ranks.
        """
        if self.group is None:
            yield
            return
        seed = int(torch.randint(LARGEST_SEED, (1,), dtype=torch.int64))
        device = self.group.device
        before, accelerator = Generators.now(device), accelerator_of(device)
        own = Generators.seeded(seed + self.group.rank, device)
        _set(own, accelerator)
        try:
            yield
        finally:
            _set(before, accelerator)


def _set(generators: Generators, accelerator: Any) -> None:
    torch.set_rng_state(generators.torch)
    if generators.cuda is not None:
        accelerator.set_rng_state(generators.cuda)


class Steps:
    """Runs the steps of one run. Most methods wrap a method of Lightning's strategy, which they take as an argument.

    Attributes:
        sequences: cuts batches into parts of sequences, and holds the :class:`StepTokens` for ``zero.loss=tokens``.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.sequences = LongSequences()
        self._fingerprints: Fingerprints | None = None
        self._evaluation_begins = False

    def begin_run(self) -> None:
        """Prepare for the run's steps. Call this method after sharding. Collective."""
        run = self._run
        tokens = StepTokens(run.engine) if run.config.loss is LossMean.tokens else None
        run.engine.passes.sharded_grads.undivided = False  # an earlier run may have been cut off in a step
        self.sequences = LongSequences(run.model, run.engine, run._ranks, tokens)

    def begin_training(self) -> None:
        self.sequences.seed_alike()
        if (every := self._run.config.fingerprint) is not None:
            self._fingerprints = Fingerprints(self._run._trainer_of_run, self._run.engine, every)

    def end_training(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.write()

    def begin_evaluation(self) -> None:
        self._evaluation_begins = True

    @property
    def _is_manual(self) -> bool:
        module = self._run.lightning_module
        return module is not None and not module.automatic_optimization

    def train(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._is_manual:  # as under DDP, all ranks compute with rank 0's buffers
            self._run.engine.passes.buffers.sync()
        self.sequences.check("training_step", step, args, kwargs)
        with self._run.engine.step_scope("training_step"):
            return self.sequences.training_step(step, *args, **kwargs)

    def backward(self, act: Callable[..., Tensor], loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_manual:
            loss = self.sequences.manual_loss(loss)
        if (check := self.sequences.trying) is not None:
            check.backward(loss, *args, **kwargs)
            return loss
        if self.sequences.tokens is not None:
            loss = self.sequences.tokens.weigh(loss)
        with self.sequences.backward():
            return act(loss, optimizer, *args, **kwargs)

    def optimizer_step(self, step: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sequences.trying is not None:
            return closure()
        if self.sequences.tokens is not None:
            closure = self.sequences.tokens.around(closure, optimizer, self._run.lightning_module)
        if self._fingerprints is None:
            return step(optimizer, closure, *args, **kwargs)
        return self._fingerprints.step(closure, lambda closure: step(optimizer, closure, *args, **kwargs))

    def evaluate(self, key: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begins = self._sync_buffers_once()
        self.sequences.check(key, step, args, kwargs, together=begins)
        with self._run.engine.step_scope(key, evaluation=True):
            given: list[Any] = [*args, *kwargs.values()]
            part, own = self.sequences.cut(given[0])
            return self.sequences.evaluate(part, step, own, *given[1:])

    def evaluate_nothing(self, key: str) -> None:
        """Take part in the evaluation step ``key`` of other ranks, because this rank has no batch. Collective."""
        self._sync_buffers_once()
        with self._run.engine.step_scope(key, evaluation=True):
            pass

    def _sync_buffers_once(self) -> bool:
        """Before the first step of an evaluation, broadcast rank 0's buffers, except with manual optimization. Later
        steps need no broadcast, because they change no buffers. Return whether the next step is the first."""
        begins, self._evaluation_begins = self._evaluation_begins, False
        if begins and not self._is_manual:
            self._run.engine.passes.buffers.sync(evaluates=True)
        return begins


class SharedBatches:
    """Compares batches and gradients of ``group``, whose ranks share a batch."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self._sums: dict[str, Tensor] = {}  # of gradients of this backward, and of their squares, by parameter
        self._rounding = 0.0  # of the coarsest dtype of these gradients
        self._backwards = 1  # with the present one
        self._checked: set[str] = set()  # gradients that were not zero on some rank

    def note(self, name: str, grad: Tensor) -> None:
        """Add ``grad``, a gradient of the unsplit parameter ``name``, to the sums that :meth:`check_grads` compares."""
        if name not in self._checked:
            self._rounding = max(self._rounding, torch.finfo(grad.dtype).eps)
            flat = grad.detach().float().flatten()
            sums = F.pad(flat, (0, -len(flat) % _SUMS)).view(-1, _SUMS).sum(0)
            self._sums[name] = self._sums.get(name, 0.0) + torch.cat([sums, flat.square().sum(0, keepdim=True)])

    def check_grads(self) -> None:
        """Raise ConfigError on all ranks if a parameter that is not split has different gradients on ranks that share a
        batch, because then each rank has only a part of the sum. Collective.

        A parameter is compared in each backward until its gradient is nonzero (it is zero behind a layer initialized
        to zero), and again in backwards 2, 4, 8, ... Gradients must agree to half the digits of their dtype."""
        own, self._sums = {name: total.tolist() for name, total in self._sums.items()}, {}
        found = self.group.gather_objects((own, self._rounding), f"first gradients ({KEY})")
        rounding = max(eps for _, eps in found)
        table = [{name: torch.tensor(total) for name, total in sums.items()} for sums, _ in found]
        self._checked |= {name for sums in table for name, total in sums.items() if total.any()}
        self._backwards += 1
        if not self._backwards & (self._backwards - 1):
            self._checked.clear()
        first = table[0]
        floor = 2 * rounding * sum(float(total[_SUMS]) for total in first.values()) ** 0.5

        def apart(name: str, other: Tensor) -> bool:
            norm = max(float(first[name][_SUMS]), float(other[_SUMS])) ** 0.5
            return bool((first[name] - other)[:_SUMS].norm() > rounding**0.5 * norm + floor)

        differ = [name for name in first if any(apart(name, other[name]) for other in table if name in other)]
        if differ:
            raise ConfigError(
                f"{KEY}: expected equal gradients of {differ[0]} (and {len(differ) - 1} others) on ranks that share a "
                "batch, got different ones: the parameter is not split, but each rank uses it for its own heads or "
                "features only. Give its module the style replicated_with_grad_allreduce in zero.tensor_plan."
            )


# -- fingerprints: checksums of weights and optimizer state, for zero.fingerprint --------------------------------------
#
# Equal fingerprints show that two runs, or two replicas in one run, hold the same bits.

FILE = "fingerprints.csv"
COLUMNS = ("step", "unit", "masters", "optimizer_state")


@outside_autograd
def fingerprints(engine: Engine) -> Tensor:
    """Return checksums of each unit's masters and optimizer state, ``[units, 2] int64`` on the device. Collective.

    A checksum sums, mod 2**64, the bits of each element times an odd number for its position, parameter and state name.
    Each rank adds the elements that it saves, so checksums are equal at every stage, tier and number of ranks.
    """
    take_writes_over(engine)
    unit_of = {bucket: unit.index for unit in engine.units for bucket in unit.buckets}
    found = torch.zeros(len(engine.units), 2, dtype=torch.int64, device=engine.comm.device)
    for storage, parts in itertools.groupby(own_fragments(engine), lambda part: part.storage):
        assert storage is not None
        with opened(storage):
            for part in parts:
                bucket = engine.buckets[part.value.bucket]
                info = bucket.params[part.value.slot]
                summed = checksum_on_device(part.source.tensor, part.start, info.split)
                summed *= zlib.crc32(f"{info.fqn} {part.value.name}".encode()) | 1
                found[unit_of[bucket], int(part.value.name != MASTER)] += summed.to(found.device)
    return engine.comm.sum_(found)


@outside_autograd
def differing_replicas(engine: Engine) -> Tensor:
    """Return for each unit whether ranks' copies of its replicated parameters differ, as ``[units] bool`` on the
    device. Collective."""
    groups = engine.comm.ranks.tensor, engine.comm.ranks.expert
    place = {1: 0} | {group.size: group.index for group in groups}
    sizes = sorted(place)  # numbers of parts
    # A row for each part of each number of parts. Ranks with other parts leave the least number there.
    own = torch.full((2, sum(sizes), len(engine.units)), torch.iinfo(torch.int64).min, device=engine.comm.device)
    rows = {size: sum(sizes[:kind]) + place[size] for kind, size in enumerate(sizes)}
    own[0, [*rows.values()]] = 0
    for unit in engine.units:
        for bucket in (bucket for bucket in unit.buckets if not bucket.plan.reshards):
            unit.unshard_wait()
            row = own[0, rows[bucket.params[0].split.parts if bucket.params[0].split is not None else 1]]
            for info in bucket.params:
                row[unit.index] += checksum_on_device(info.flattened(info.param.data), info.slot)
    own[1, [*rows.values()]] = ~own[0, [*rows.values()]]
    largest, smallest = engine.comm.max_(own).unbind()
    return (largest != ~smallest).any(0)


class Fingerprints:
    """Writes checksums of each unit every ``every`` steps into ``fingerprints.csv`` in the Trainer's default_root_dir.

    Checksums stay on the device until the next ones are due or training ends, so the host does not wait for them.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, every: int) -> None:
        self._trainer, self._engine, self._every = trainer, engine, every
        self._path = Path(trainer.default_root_dir) / FILE
        self._waits: tuple[int, Tensor, Tensor] | None = None  # step, fingerprints, units whose replicas differ
        self._keep(trainer.global_step, differing_replicas(engine))

    def _keep(self, step: int, differ: Tensor) -> None:
        self.write()
        self._waits = step, fingerprints(self._engine), differ

    def step(self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run the optimizer step ``step(closure)`` and return its result. If fingerprints are due, compare ranks'
        copies of whole parameters before the step, and compute fingerprints after it. Collective.

        Raises RuntimeError on all ranks if these copies differed when fingerprints were last due.
        """
        number, differ = self._trainer.global_step + 1, []
        if number % self._every:
            return step(closure)

        def compared() -> Any:
            result = closure()  # the backward: after it a step replaces the parameters
            differ.append(differing_replicas(self._engine))
            return result

        result = step(compared)
        self._keep(number, torch.stack(differ).any(0))
        return result

    def write(self) -> None:
        """Append the last fingerprints to the file. Raise RuntimeError if ranks' copies of parameters differed."""
        if self._waits is None:
            return
        (step, found, differ), self._waits = self._waits, None
        titles = [unit.title for unit in self._engine.units]
        if self._trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            with self._path.open("a", newline="") as file:
                lines = csv.writer(file)
                lines.writerows([COLUMNS] if is_new else [])
                for title, row in zip(titles, found.tolist(), strict=True):
                    lines.writerow([step, title, *(f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for number in row)])
        if wrong := [title for title, flag in zip(titles, differ.tolist(), strict=True) if flag]:
            raise RuntimeError(
                f"zero.fingerprint: expected equal replicas of {', '.join(wrong[:3])} on all ranks, got different ones "
                f"before step {step}. A rank has computed or stored wrong numbers, or code wrote to parameters on some "
                "ranks only: test GPUs and memory, and check this code. Resume from an earlier checkpoint."
            )
