"""A bucket: which parameters share one flat buffer, and where each of its roles rests.

::

    full        compute_param  [numel]        memory while gathered; parameters are views of it
    home        master_param   [owned numel]  and optimizer state: home.py
    param_*     compute_param  [owned numel]  beside the master, where they rest on another tier or in files
    grad        grad           [owned numel]  from a backward until it is cleared
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import increment_version

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.reduction import Pending
from lightning_zero.engine.parameters.classes import Classes, set_values
from lightning_zero.engine.units.flat_buffer import FlatBuffer
from lightning_zero.engine.units.home import Home, ParamFile, ResidentHome, Tiers, copy_cast, make_home, opened
from lightning_zero.planning.layout import BucketLayout, Fragment
from lightning_zero.planning.placement import Placement, StageRow, Tier


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtype of each role of a bucket."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype


@dataclass(slots=True, eq=False)
class ParamInfo:
    """A parameter that the engine owns. Nothing is stored on the ``nn.Parameter`` itself."""

    param: nn.Parameter
    fqns: tuple[str, ...]  # every name; tied weights have several
    shape: torch.Size
    strides: tuple[int, ...]  # the flat buffer keeps the order of memory: kernels round differently for another
    dtype: torch.dtype  # before sharding: what checkpoints hold
    classes: Classes  # that the parameter goes through
    slot: int = 0  # position in the bucket
    gathered: Tensor | None = None  # [shape] compute_dtype, a view of the bucket's full buffer
    placeholder: Tensor | None = None  # [shape] compute_dtype, NaN
    version: int = 0  # of the parameter, up to which what users wrote to it is in the masters

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def check_shape(self, shape: torch.Size) -> None:
        """Refuse ``param.data`` of another shape.

        Raises:
            RuntimeError: names the parameter and the right way.
        """
        if shape != self.shape:
            raise RuntimeError(
                f"{self.fqn}.data = ...: expected a tensor of shape {tuple(self.shape)}, got {tuple(shape)}. A sharded "
                "parameter keeps its shape: change the module before it is sharded (in __init__ or configure_model)."
            )

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat`` [numel], a part of a flat buffer, as the parameter: [shape]."""
        return flat.as_strided(self.shape, self.strides)

    def flattened(self, value: Tensor) -> Tensor:
        """``value`` [shape], of any strides, as it lies in a flat buffer: [numel]."""
        return value.permute(sorted(range(value.dim()), key=lambda d: -self.strides[d])).reshape(-1)


def values_changed(infos: Iterable[ParamInfo]) -> None:
    """Parameters have other values, by other ways than operations on them. As after those, a backward that has saved
    the values of before is refused. (To :class:`~lightning_zero.engine.parameters.writes.Writes` this is no write.)"""
    infos = list(infos)
    increment_version([info.param for info in infos])
    for info in infos:
        info.version += 1


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Strides of ``param`` where its memory has neither gaps nor overlaps, else those of a contiguous tensor."""
    expected = 1
    for step, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if step != expected:
                return torch.empty(param.shape, device="meta").stride()
            expected *= size
    return param.stride()


class Bucket:
    """Parameters of one dtype in one flat buffer, with the roles that rest beside it.

    Attributes:
        full: compute_param, [layout.numel] compute_dtype; has memory while gathered.
        home: of master_param, the owned range of the bucket in master_dtype, and of its optimizer state. On the device
            it is the compute parameters' own memory where these are replicated and of the same dtype.
        grad: reduced gradient [owned numel] grad_dtype, or None; on the host where the row says so.
        submitted_event: on a GPU, when the masters' step was asked for: what its results may overwrite is read no more.
        resharding: compute parameters are dropped after use. This and the next are properties for ever, not states.
        refreshed: compute parameters are replicated, and brought up to date after a step.
    """

    def __init__(
        self,
        label: str,
        params: Sequence[ParamInfo],
        layout: BucketLayout,
        row: StageRow,
        dtypes: Dtypes,
        trainable: bool,
        comm: Communicator,
        tiers: Tiers,
    ) -> None:
        self.label = label
        self.params = list(params)
        self.layout = layout
        self.row = row
        self.dtypes = dtypes
        self.trainable = trainable
        self.comm = comm
        self.tiers = tiers
        shared = comm.shard_size > 1
        params_leave = shared or tiers.row.compute_param is not Tier.device
        self.resharding = row.compute_param is Placement.sharded and params_leave
        master_differs = tiers.row.steps_on_host or (shared and row.master is Placement.sharded)
        self.refreshed = not self.resharding and master_differs
        self._grad: Tensor | None = None
        self._grad_event: Any = None  # the end of its way to the host
        self.shown_full = False  # inside gather(): parameters hold full masters
        self.shows_values = False  # parameters show their gathered values
        self._values_here = True
        self.full = FlatBuffer(layout.numel, dtypes.compute, comm.device)
        self.home: Home
        self.param_shard: Tensor | None = None  # [owned numel] compute_dtype, where the master rests elsewhere
        self.param_file: ParamFile | None = None
        self.submitted_event: Any = None
        self.step_future: Future[None] | None = None  # an offloaded step of this bucket that was asked for
        for info in self.params:
            info.gathered = self.full.view(layout.slots[info.slot].start, info.shape, info.strides)

    # -- ranges ---------------------------------------------------------------------------------------------------

    @property
    def shard_range(self) -> tuple[int, int]:
        return self.layout.shard_range(self.comm.shard_rank)

    @property
    def owned_range(self) -> tuple[int, int]:
        """Elements of the bucket whose master_param and optim_state this rank holds."""
        if self.row.master is Placement.sharded:
            return self.shard_range
        return 0, self.layout.numel

    @property
    def owned_numel(self) -> int:
        low, high = self.owned_range
        return high - low

    def owned_fragments(self) -> list[Fragment]:
        return list(self.layout.cut(*self.owned_range))

    def part_of(self, full: Tensor, info: ParamInfo) -> Tensor:
        """The part of ``full`` [layout.numel] that is one parameter: a view of the parameter's shape."""
        start = self.layout.slots[info.slot].start
        return info.shaped(full[start : start + info.numel])

    @property
    def own_shard_of_owned(self) -> slice:
        """This rank's shard inside the owned range: what it alone answers for in sums over ranks."""
        low, high = self.shard_range
        base = self.owned_range[0]
        return slice(low - base, high - base)

    @property
    def has_master(self) -> bool:
        """Whether master_param is memory of its own, and the full buffer a copy."""
        differs = self.trainable and (self.dtypes.master != self.dtypes.compute or self.tiers.row.steps_on_host)
        return self.resharding or differs

    # -- gradient ---------------------------------------------------------------------------------------------------

    @property
    def has_grad(self) -> bool:
        """Whether there is a reduced gradient, arrived or on its way."""
        return self._grad is not None

    @property
    def grad(self) -> Tensor | None:
        """Reduced gradient [owned numel]. On a GPU the host waits for one that is still on its way to host memory."""
        if self._grad_event is not None:
            self._grad_event.synchronize()
            self._grad_event = None
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _ = self.grad  # nothing may be in flight into memory that is let go
        self._grad = value

    def claim_grad(self) -> Callable[[], Tensor | None]:
        """For an offloaded step: the gradient as it is now, to be called (and waited for) in the step's thread."""
        grad, event = self._grad, self._grad_event

        def arrived() -> Tensor | None:
            if event is not None:
                event.synchronize()
            return grad

        return arrived

    def bring_grad(self, reduced: Tensor) -> None:
        """Take ``reduced`` [owned numel] as the gradient into plain host memory, of no tier. The host does not wait."""
        streams = self.comm.streams
        host = torch.empty(reduced.shape, dtype=self.dtypes.grad, pin_memory=reduced.device.type == "cuda")
        with streams.on("d2h"):
            # On a GPU it is cast there: a copy that casts would block.
            source = reduced if reduced.device.type == "cpu" else reduced.to(self.dtypes.grad)
            host.copy_(source, non_blocking=True)
            event = streams.mark()
        self.grad = host
        if event is not None:
            self._grad_event = event
            streams.hold(source, event)

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def master(self) -> Tensor:
        """master_param [owned numel]; readable while the home is open (always, on the device and the host)."""
        return self.home.master

    def fill(self, values: Tensor) -> None:
        """Take initial values: ``values`` [layout.numel] in master_dtype, the same on every rank."""
        low, high = self.owned_range
        if self.has_master:
            self._make_home(values[low:high])
        if not self.resharding:
            self.full.data.copy_(values)
        if not self.has_master:
            self.home = ResidentHome(self.full.data[low:high])

    def _make_home(self, values: Tensor) -> None:
        """A home for master_param, and one for the compute parameters where these rest on another tier."""
        row, tiers = self.tiers.row, self.tiers
        tier = row.master if self.trainable else row.compute_param  # a frozen bucket has the compute role only
        dtype = self.dtypes.master if self.trainable else self.dtypes.compute
        self.home = make_home(tier, tiers, self.label, values, dtype)
        # In files they rest apart from the master also where both do: a gather would read the optimizer state too.
        apart = tier is not row.compute_param or tier is Tier.nvme
        if self.resharding and self.trainable and apart:
            compute = values.to(self.dtypes.compute)
            if row.compute_param is Tier.nvme:
                assert tiers.nvme is not None
                self.param_file = ParamFile(tiers.nvme, self.label, compute.cpu())
            elif row.compute_param is Tier.device:
                self.param_shard = compute.clone()

    def make_trainable(self) -> None:
        """Give a frozen bucket the roles that it lacks."""
        with opened(self.home) as master:
            values = master.clone()
        self.trainable = True
        if self.has_master and (self.dtypes.master != self.dtypes.compute or self.tiers.row.steps_on_host):
            self.home.free()
            self._make_home(values)

    def push(self) -> None:
        """The master changed (its home is open): bring the compute parameters' own slice up to date."""
        if not self.has_master:
            return
        if self.param_file is not None:
            self.param_file.write(self.master.to(self.dtypes.compute))
            return
        target = self.param_shard
        if target is None and not self.resharding:
            target = self.full.data[slice(*self.owned_range)]
        if target is None:
            return
        if not self.tiers.row.steps_on_host:
            copy_cast(self.master, target)
            return
        with self.comm.streams.on("h2d", after=self.submitted_event):
            copy_cast(self.master, target)

    def stage_ahead(self) -> None:
        """The bucket will be gathered soon: start reading what rests in files."""
        if self.param_file is not None:
            self.param_file.begin_read()
        elif self.resharding:
            self.home.begin_open()

    def _write_slice(self, target: Tensor) -> None:
        """This rank's compute parameters into ``target`` [owned numel], its place of a full buffer."""
        if self.param_file is not None:
            self.param_file.read(target)
        elif self.param_shard is not None:
            target.copy_(self.param_shard)
        elif self.resharding:
            with opened(self.home) as master:
                copy_cast(master, target)

    def own_compute_params(self) -> Tensor:
        """Compute parameters of the owned range as they rest: what a gather takes from this rank. [owned numel]"""
        low, high = self.owned_range
        if not self.has_master:
            return self.full.data[low:high]
        own = torch.empty(high - low, dtype=self.dtypes.compute, device=self.comm.device)
        if self.resharding:
            self._write_slice(own)
        else:
            with opened(self.home) as master:
                copy_cast(master, own)
        return own

    def write_master(self, info: ParamInfo, value: Tensor, *, before: Tensor | None = None) -> None:
        """Set one parameter in the masters, from a full value of its shape: every rank takes its own part.

        Args:
            before: compute parameters of the owned range. Where ``value`` equals them, masters keep their digits.
        """
        flat = info.flattened(value)
        with opened(self.home, changed=True) as master:
            for fragment in self.owned_fragments():
                if fragment.index != info.slot:
                    continue
                own = slice(fragment.start, fragment.start + fragment.numel)
                part = flat[fragment.offset : fragment.offset + fragment.numel]
                if before is not None:
                    new = part.to(master.device)
                    part = torch.where(new == before[own].to(master.device), master[own], new.to(master.dtype))
                master[own].copy_(part)

    def wait_step(self) -> None:
        """Wait for an offloaded step of this bucket; its error is raised here."""
        if self.step_future is not None:
            self.step_future.result()  # one that failed stays: what rests here is not what the user thinks
            self.step_future = self.submitted_event = None

    def has_no_step(self) -> None:
        """An offloaded step was asked for, and this rank has nothing in it to do."""
        self.step_future = Future()
        self.step_future.set_result(None)

    @property
    def step_done(self) -> bool:
        return self.step_future is None or self.step_future.done()

    def gather_begin(self) -> Pending:
        """Issue the gather of the compute parameters. The full buffer has memory from here on."""
        self.wait_step()
        self.full.allocate()
        low, high = self.owned_range
        if not self.tiers.row.leaves_device:
            self._write_slice(self.full.data[low:high])
            return self.comm.all_gather(self.full.data, self.label)
        # The gather waits for this stream, and so for what a step has sent.
        with profiled("transfer", self.label), self.comm.streams.on("h2d"):
            self._write_slice(self.full.data[low:high])
            return self.comm.all_gather(self.full.data, self.label)

    def full_master(self) -> Tensor:
        """Blocking, on all ranks: master_param of the whole bucket, [layout.numel], a new tensor on the device."""
        low, high = self.owned_range
        with opened(self.home) as master:
            full = torch.empty(self.layout.numel, dtype=master.dtype, device=self.comm.device)
            full[low:high].copy_(master)
        if self.row.master is Placement.sharded:
            self.comm.all_gather(full, f"{self.label} (values)").wait()
        return full

    def show(self, gathered: bool) -> None:
        """Point the parameters at their gathered values or placeholders; inside ``gather`` they stay as they are."""
        self.shows_values = gathered
        if self.shown_full:
            return
        self._values_are(here=gathered)
        for info in self.params:
            value = info.gathered if gathered else info.placeholder
            assert value is not None
            set_values(info.param, value, info.classes.present if gathered else info.classes.absent, info.classes)

    def show_plain(self, full: Tensor) -> None:
        """Point the parameters at their parts of ``full`` [layout.numel], as plain parameters."""
        self._values_are(here=True)
        for info in self.params:
            set_values(info.param, self.part_of(full, info), info.classes.plain, info.classes)

    def _values_are(self, *, here: bool) -> None:
        """Values go or come back. While they are gone, versions are others, so that torch refuses a backward that has
        saved a parameter by itself; it would read what stands for the values."""
        if here is self._values_here:
            return
        self._values_here = here
        params = tuple(info.param for info in self.params)
        if here:
            _unsafe_set_version_counter(params, tuple(info.version for info in self.params))
        else:
            increment_version(params)


class Place(NamedTuple):
    """Where a parameter lives."""

    bucket: Bucket
    info: ParamInfo
