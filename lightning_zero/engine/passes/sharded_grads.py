"""Manages ``param.grad`` of one engine's parameters: assignment, clearing, values, norms and clipping."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor

from lightning_zero.engine.passes.grad_norms import GradNorms, alike, parts_of_shards, refuse_whole, slots_of, views_of
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.sharded_grad import Number, ShardedGrad, stale, unreduced
from lightning_zero.engine.passes.writes import checksum
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.param import ParamInfo, get_grad, set_grad


class ShardedGrads:
    """Manages the gradients of one engine as users see them: ``param.grad`` of each parameter with a gradient is a
    :class:`ShardedGrad` until users clear it."""

    def __init__(
        self, reducer: Reducer, after_step: AfterStep, forget_failed: Callable[[], None], most_overflows: int | None
    ) -> None:
        """``most_overflows``: raise an error after this many skipped steps in a row (see
        ``zero.optimizer.skip_nonfinite``). None: skip no step."""
        self._reducer, self._grads = reducer, reducer.grads
        self._after_step, self._forget_failed = after_step, forget_failed
        self._most_overflows = most_overflows
        self.overflows = 0  # steps that were skipped because a gradient was not finite
        # Both by id of the first parameter of an optimizer:
        self._in_a_row: dict[int, int] = {}  # skipped steps since its last other step
        self._known_finite: set[int] = set()  # :meth:`overflowed` has found its gradients to be finite
        self._bucket_of = {id(info.param): bucket for bucket in self._grads for info in bucket.params}
        self._of: dict[int, ShardedGrad] = {}
        self._aside = False
        self.backwards = 0  # number of this rank's backwards that have given gradients
        self.undivided = False  # gradients are sums over tokens, which the step has yet to divide by their number
        self.norms = GradNorms(reducer, self._bucket_of, self.finish_pending)
        self._whole: tuple[ParamInfo, float, Tensor] | None = None  # the gradient that was gathered last, and its scale

    def _changed(self) -> None:
        """Drop cached norms and gathered values, because gradients have changed on all ranks."""
        self.norms.tables.clear()
        self._whole = None

    # -- param.grad ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def set_aside(self, infos: Iterable[ParamInfo]) -> Iterator[None]:
        """Context manager in which ``param.grad`` of ``infos`` is None. The engine does not treat these gradients as
        cleared. On exit restore each ``param.grad``."""
        kept = [(info.param, info.param.grad) for info in infos]
        self._aside = True
        try:
            for param, _ in kept:
                param.grad = None
            yield
        finally:
            self._aside = False
            for param, grad in kept:
                param.grad = grad

    def place_used(self) -> None:
        """Set ``param.grad`` of parameters with gradients to a :class:`ShardedGrad`, unless in :meth:`set_aside`."""
        for bucket, grads in () if self._aside else self._grads.items():
            self.place([bucket.params[slot] for slot in grads.used])

    def place(self, infos: Iterable[ParamInfo]) -> None:
        """Set ``param.grad`` of each of ``infos`` to its :class:`ShardedGrad`. Drop cached norms and values."""
        self._changed()
        with torch._C.DisableTorchFunctionSubclass():
            for info in infos:
                grad = self._of.get(id(info.param))
                if grad is None or grad.dtype != info.param.dtype:
                    grad = self._of[id(info.param)] = ShardedGrad(info, ref(self))
                grad.added = False
                set_grad(info.param, grad)

    def remove(self, infos: Iterable[ParamInfo]) -> None:
        """At the start of a backward, set each ``param.grad`` of ``infos`` that is a :class:`ShardedGrad` to None, so
        that autograd does not add to it."""
        self._whole = None
        for info in infos:
            with torch._C.DisableTorchFunctionSubclass():
                if isinstance(get_grad(info.param), ShardedGrad):
                    set_grad(info.param, None)
            if (grad := self._of.get(id(info.param))) is not None:
                grad.added = False

    def finish_pending(self) -> None:
        """Prepare a read of gradients: wait for steps, drop gradients that users cleared or whose backward raised."""
        self._forget_failed()
        self.refuse_undivided()
        self._after_step.wait_for_steps()
        self.forget_cleared(takes=True)

    def refuse_undivided(self) -> None:
        """Raise RuntimeError if gradients are sums over tokens, not yet divided by the number of tokens."""
        if self.undivided:
            raise RuntimeError(
                "zero.loss=tokens: gradients are sums over tokens until the step divides them by their number. Read or "
                "change them in on_before_optimizer_step, or clear them with zero_grad(set_to_none=True); with manual "
                "optimization, call lightning_zero.divide_by_tokens(self, optimizer) after the last backward of a "
                "step, before clipping, reading and optimizer.step()."
            )

    def forget_cleared(self, *, takes: bool = False) -> None:
        """Drop the stored gradients of parameters whose ``param.grad`` users have set to None or to another tensor.
        With ``takes``, store such tensors as gradients, which is collective if there are any. Raises RuntimeError if
        users have assigned a :class:`ShardedGrad` that was cleared before."""
        assigned: list[tuple[Place, Tensor]] = []
        for bucket, grads in () if self._aside else self._grads.items():
            cleared, is_plain = [], bucket.shown is Shown.PLAIN
            with torch._C.DisableTorchFunctionSubclass():
                for info in bucket.params:
                    own, grad = self._of.get(id(info.param)), get_grad(info.param)
                    if isinstance(grad, ShardedGrad) and grad is not own:
                        raise stale(info.fqn)
                    if own is not None and (grad is own or own.added):
                        continue
                    if grad is None or not (is_plain or takes):
                        cleared.append(info.slot)
                    elif not is_plain:
                        assigned.append((Place(bucket, info), grad))
            if cleared and (grads.used or bucket.grad_store.is_there):
                grads.forget(cleared)
            own = None
            for slot in cleared:
                key = id(bucket.params[slot].param)
                if key in self._of and sys.getrefcount(self._of[key]) > 2:
                    del self._of[key]  # a user has kept it, and must not see gradients to come
        if assigned:
            self.take_assigned(assigned)

    @outside_autograd
    def take_assigned(self, assigned: Sequence[tuple[Place, Tensor]]) -> None:
        """Store in the gradient shards what users have assigned to ``param.grad``. ``assigned``: pairs (place of the
        parameter, tensor). Collective. Raises RuntimeError on all ranks if values differ between ranks."""
        found = [(*place, grad if grad.layout is torch.strided else grad.to_dense()) for place, grad in assigned]
        sums = self._reducer.comm.gather_checked(
            {info.fqn: checksum(info.flattened(grad)) for _, info, grad in found}, "gradients that were assigned"
        )
        is_local = {b: self._reducer.unreduced and b.plan.accumulates_locally for b, *_ in found}
        for bucket, info, _ in found:
            same = bucket.comm.ranks.topology.same_params
            if not is_local[bucket] and any(len({sums[rank].get(info.fqn) for rank in ranks}) > 1 for ranks in same):
                raise RuntimeError(
                    f"{info.fqn}.grad was assigned, with other values on some ranks than on others. Average them over "
                    "the ranks first (torch.distributed.all_reduce)."
                )
            if not bucket.plan.trainable:
                raise RuntimeError(
                    f"{info.fqn}.grad was assigned, but {info.fqn} is frozen: call requires_grad_() first."
                )
        self.place([info for _, info, _ in found])
        for bucket, info, grad in found:
            grads = self._grads[bucket]
            if info.slot in grads.partial:
                grads.forget([info.slot])
            if is_local[bucket]:
                grads.replace(info.slot, grad)
                continue
            if not bucket.grad_store.is_there:
                own = torch.zeros(bucket.plan.owned_numel, dtype=bucket.dtypes.grad, device=bucket.comm.device)
                bucket.grad_store.add(own)
            grads.used.add(info.slot)
            grads.agreed.add(info.slot)
            self.write(info, grad)

    def shows(self, grad: ShardedGrad) -> bool:
        """Return whether ``grad`` is still the gradient of its parameter: users have not cleared the gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            now = get_grad(grad.info.param)
        is_there = now is grad or type(now) is Tensor or grad.added or self._aside
        return is_there and self._of.get(id(grad.info.param)) is grad

    @property
    def are_there(self) -> bool:
        """Return whether this rank has gradients of a backward since users last cleared gradients."""
        self.forget_cleared()
        return any(grads.used or bucket.grad_store.is_there for bucket, grads in self._grads.items())

    def used_params(self) -> set[int]:
        """Return ids of parameters with a gradient on any rank."""
        self._whole = None  # a step follows, which needs the memory
        used = set()
        for bucket, grads in self._grads.items():
            with torch._C.DisableTorchFunctionSubclass():
                used |= {id(i.param) for i in bucket.params if i.slot in grads.agreed and get_grad(i.param) is not None}
        return used

    # -- values -------------------------------------------------------------------------------------------------------

    @outside_autograd
    def change(self, grad: ShardedGrad, method: str, numbers: Sequence[Number]) -> None:
        """Apply the in-place tensor method named ``method``, with arguments ``numbers`` (numbers or 0-d tensors), to
        this rank's fragment of ``grad``. Raises RuntimeError after a backward that raised and, at stages 2 and 3, if
        gradients are not reduced yet, unless ``method`` is ``zero_`` or multiplies or divides by a number."""
        info = grad.info
        bucket = self._bucket_of[id(info.param)]
        self._forget_failed()
        bucket.awaited_step.wait()  # see [Note: masters during an offloaded step]
        self._changed()
        self.refuse_undivided()  # zeros too: the tokens of these sums would stay counted
        if method == "zero_":
            self._grads[bucket].zero(info.slot)
            return
        self._reducer.refuse_partial()
        scale = self._reducer.shown_scale(id(info.param))
        if (values := self._local(info)) is not None:
            scale *= self._reducer.local_scale(bucket)
        elif self._reducer.unreduced and (method not in ("mul_", "div_") or isinstance(numbers[0], Tensor)):
            raise unreduced(info.fqn)  # a tensor is computed from gradients, maybe
        elif (fragment := bucket.grad_fragment(info.slot)) is not None:
            values = fragment.values
        else:
            return
        if method not in ("mul_", "div_") and scale != 1.0:
            numbers = [number if number is None else number / scale for number in numbers]
        if method.startswith("clamp"):
            self._before_clamp(values)
        getattr(values, method)(*(n.to(values.device) if isinstance(n, Tensor) else n for n in numbers))

    @outside_autograd
    def gather(self, info: ParamInfo) -> Tensor:
        """Return the whole gradient of one parameter, with the values of DDP's ``param.grad``. Collective if gradients
        are sharded. Raises RuntimeError in a backward, after a backward that raised, and if the gradient is only partly
        reduced."""
        scale = self._reducer.shown_scale(id(info.param))
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"the gradient of {info.fqn} is read inside a backward: read param.grad.clone() before.")
        if self._whole is not None and self._whole[:2] == (info, scale):
            return self._whole[2]
        self.finish_pending()
        self._reducer.refuse_partial()
        bucket, comm = self._bucket_of[id(info.param)], self._reducer.comm
        if (local := self._local(info)) is not None:
            return local.to(bucket.dtypes.master, copy=True).mul_(self._reducer.local_scale(bucket) * scale)
        parts = torch.zeros(bucket.comm.ranks.parts.size, info.numel, dtype=bucket.dtypes.grad)
        flat = (parts := parts.to(comm.device))[bucket.comm.ranks.parts.index]
        fragment = bucket.grad_fragment(info.slot)
        if fragment is not None and not (bucket.comm.replicate.index and bucket.plan.shards_master):  # one replica's
            flat[fragment.offset : fragment.offset + fragment.values.numel()].copy_(fragment.values)
        if bucket.plan.shards_master:
            with comm.set_place("a read of .grad, which takes all ranks"):
                comm.gather_checked(None, f"a read of the gradient of {info.fqn}, which all ranks must make")
                comm.sum_(parts)
        values = flat.to(bucket.dtypes.master)
        values = (values if scale == 1.0 else values.mul_(scale)).as_strided(info.shape, info.strides)
        self._whole = info, scale, values
        return values

    def _local(self, info: ParamInfo) -> Tensor | None:
        """At stages 0 and 1, if the gradient of this parameter is not reduced yet, return this rank's gradient, a view
        of the local buffer; otherwise return None. Raises RuntimeError if the gradient is only partly reduced."""
        bucket = self._bucket_of[id(info.param)]
        if not (self._reducer.unreduced and bucket.plan.accumulates_locally):
            return None
        local = self._grads[bucket].local_grads().get(info.slot)
        if local is None or bucket.grad_store.is_there:
            raise self.norms.mixed(info)
        return local

    @outside_autograd
    def write(self, info: ParamInfo, values: Tensor) -> None:
        """Replace one gradient by ``values``, a whole gradient as in DDP's ``param.grad``. Each rank stores its
        fragment. At stages 2 and 3 raises RuntimeError if gradients are not reduced yet and elements change to values
        other than 0. This check is collective."""
        bucket, scale = self._bucket_of[id(info.param)], self._reducer.shown_scale(id(info.param))
        self._changed()
        if (local := self._local(info)) is not None:
            local.copy_(values / (self._reducer.local_scale(bucket) * scale))
            return
        if self._reducer.unreduced and not bool(((values == 0) | (values == self.gather(info))).all()):
            raise unreduced(info.fqn)
        if (fragment := bucket.grad_fragment(info.slot)) is not None:
            own = info.flattened(values)[fragment.offset : fragment.offset + fragment.values.numel()]
            fragment.values.copy_(own if scale == 1.0 else own / scale)
        if bucket.dtypes.grad == values.dtype:
            self._whole = info, scale, values

    # -- many together ------------------------------------------------------------------------------------------------

    def total_norm(self, places: Iterable[Place], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients at ``places``; 0 inside :meth:`set_aside`. Collective."""
        return torch.zeros((), device=self._reducer.comm.device) if self._aside else self.norms.total(places, norm_type)

    def clip_by_norm(
        self, places: Sequence[Place], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients at ``places`` so that their joint norm is at most ``max_norm``. Return the norm before
        scaling. Collective. Raises RuntimeError if ``error_if_nonfinite`` is set and the norm is not finite."""
        norm = self.total_norm(places, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the gradient norm is {norm.item()}: gradients cannot be clipped.")
        # Multiply by one if nothing is to be clipped, as torch does: a test would make the host wait.
        self.scale(places, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def scale(self, places: Iterable[Place], factor: Tensor) -> None:
        """Multiply the gradients at ``places`` by ``factor`` (0-d, on the device, equal on all ranks)."""
        streams = self._reducer.comm.streams
        on_host = functools.cache(lambda: streams.to_host(factor))

        def is_left_to_its_step(bucket: Bucket, slots: set[int]) -> bool:
            """Return whether the bucket's offloaded step will scale the gradient, so that the host need not wait."""
            return len(slots) == len(bucket.params) and bucket.grad_store.scale_later(on_host)

        grads = dict(enumerate(self._shards_of(places, but=is_left_to_its_step)))
        for same in alike(grads):
            torch._foreach_mul_([grads[number] for number in same], factor.to(grads[same[0]].device))

    def clip_by_value(self, places: Iterable[Place], clip_value: float) -> None:
        for grad in self._shards_of(places):
            self._before_clamp(grad)
            grad.clamp_(-clip_value, clip_value)

    def _before_clamp(self, grad: Tensor) -> None:
        """Under ``skip_nonfinite``, replace infinity in ``grad`` by NaN, because a clamp would make infinity finite."""
        if self._most_overflows is not None:
            grad.masked_fill_(grad.isinf(), float("nan"))

    def _shards_of(
        self, places: Iterable[Place], but: Callable[[Bucket, set[int]], bool] = lambda *_: False
    ) -> list[Tensor]:
        """Return views of this rank's elements of the reduced gradients at ``places``. Skip a bucket if ``but(bucket,
        slots)`` returns True."""
        places = [] if self._aside else list(places)
        self.finish_pending()
        refuse_whole(places)
        self._changed()
        views = []
        for bucket, slots in slots_of(places).items():
            if not but(bucket, slots) and (grad := bucket.grad) is not None:
                views += views_of(grad, bucket.owned_fragments(), slots)
        return views

    def must_skip(self, places: Sequence[Place]) -> bool:
        """Return whether ``zero.optimizer.skip_nonfinite`` is set and a gradient at ``places``, the parameters of one
        optimizer, is not finite, so that the optimizer's step must be skipped. Collective."""
        if self._most_overflows is None or not places:
            return False
        key = id(places[0].info.param)
        overflowed = key not in self._known_finite and self.overflowed(places)  # fp16 has looked, before clipping
        self._known_finite.discard(key)
        return overflowed

    def overflowed(self, places: Iterable[Place]) -> bool:
        """Return whether any rank has a non-finite gradient at ``places``, the parameters of an optimizer that is about
        to step. If so, the caller must skip the step. Reads each gradient on its tier. Collective. Raises RuntimeError
        on all ranks when the number of steps skipped in a row reaches ``zero.optimizer.skip_nonfinite``."""
        if self._aside:
            return False
        places = list(places)
        self.finish_pending()
        known, views = parts_of_shards(self._grads, slots_of(places), lambda store: store.all_finite())
        checks = [torch.stack([torch.isfinite(views[n]).all() for n in same]).all() for same in alike(views)]
        checks += [torch.stack(list(known.values())).all()] if known else []
        found = not all(map(bool, checks))  # few ``bool`` calls, because the host waits for the device in each
        # All ranks must skip the step together, so they agree.
        overflowed = bool(self._reducer.comm.max_(torch.tensor([found], dtype=torch.uint8)))
        key = id(places[0].info.param)
        self.overflows += overflowed
        self._in_a_row[key] = overflowed * (self._in_a_row.get(key, 0) + 1)
        (self._known_finite.discard if overflowed else self._known_finite.add)(key)
        if overflowed and self._in_a_row[key] == self._most_overflows:
            parts = [(place.info.fqn, place.bucket.grad_fragment(place.info.slot)) for place in places]
            names = [fqn for fqn, part in parts if part is not None and not bool(torch.isfinite(part.values).all())]
            table = self._reducer.comm.gather_checked(names[:3], "the names of gradients that are not finite")
            first = sorted({name for names in table for name in names}, key=[p.info.fqn for p in places].index)[:3]
            raise RuntimeError(
                f"{self._most_overflows} step(s) in a row had gradients that are not finite, first those of "
                f"{', '.join(first)}. No parameter has changed in these steps. Look at their batches and losses, lower "
                "optimizer.lr, or raise zero.optimizer.skip_nonfinite."
            )
        return overflowed
