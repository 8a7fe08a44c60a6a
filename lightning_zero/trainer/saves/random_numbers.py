"""Make a resumed run draw the random numbers that the saved run would have drawn.

A save keeps two states of the generators, "now" and "epoch". If a batch was fetched but not trained before the save,
the resumed run fetches it again::

    epoch |  iterator is made  | fetch | step | fetch | step | ...         | validation, hooks | next epoch
          ^ "epoch"            ^ "now" of a save during this step            ^ "now" of a save here

Making an iterator draws random numbers too: the seed of workers and the order of a shuffling sampler. In a resumed run
Lightning makes the first iterator early, in ``setup_data``, before start hooks, which may also draw. So the generators
are set three times: before that iterator is made, after the last start hook, and at the first fetch (unless Lightning
has made another iterator before).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.rng import Generators, of_rank
from lightning_zero.lightning_api import pl

KEY = "lightning_zero_rng"  # key in a checkpoint


class Saved(NamedTuple):
    """The generator states with which one rank resumes. ``now``: before the rank's next draw. ``epoch``: before the
    epoch's iterator was made. ``in_epoch``: whether the next batch comes from that iterator."""

    now: Generators
    epoch: Generators
    in_epoch: bool

    @classmethod
    def of_rank(cls, record: Mapping[str, Any], rank: int, world_size: int, device: torch.device) -> Saved:
        now, epoch = (of_rank(record[name], rank, world_size, device) for name in ("now", "epoch"))
        return cls(now, epoch, bool(record["in_epoch"]))


def saved_ranks(record: Mapping[str, Any]) -> int:
    return len(record["now"]["torch"])


class RandomNumbers:
    """Notes the generators' states during a fit, for saves, and restores them from ``saved`` if the fit resumes."""

    def __init__(self, trainer: pl.Trainer, device: torch.device, saved: Saved | None) -> None:
        self._fit_loop = trainer.fit_loop
        self._device = device
        self._saved = saved  # None after the first fetch
        self._epoch: Generators | None = None  # states before the iterator of this epoch was made
        self._fetching: Generators | None = None  # states before the last batch was fetched
        self._trained = -1  # trained batches at that fetch
        self._made: tuple[Any, Generators] | None = None  # the first iterator, and the states after making it
        self._made_in_place = False  # whether the loops were restored before it was made
        self.watches = True

    def stop(self) -> None:
        """Stop noting and setting generators when the run ends. Saves after the run still hold states."""
        self.watches = False
        self._made = None

    # -- what Lightning does, in this order -----------------------------------------------------------------------

    def before_iterator(self, loader: Any) -> None:
        """Set the generators, and in a resumed fit the sampler's epoch, before ``loader`` makes its first iterator."""
        if self._fit_loop.is_resuming:  # Lightning sets the epoch later, when workers already have an order
            epoch = self._next_epoch()
            for owner in (loader, getattr(loader, "batch_sampler", None)):
                if callable(set_epoch := getattr(getattr(owner, "sampler", None), "set_epoch", None)):
                    set_epoch(epoch)
        if self._saved is not None:
            (self._saved.epoch if self._saved.in_epoch else self._saved.now).restore(self._device)
        self._epoch = self._now()

    def _next_epoch(self) -> int:
        """Return the number of the epoch to which the next batch belongs. Lightning counts a finished epoch only later,
        in ``reset``."""
        loop, batches = self._fit_loop, self._fit_loop.epoch_loop
        epochs: Any = loop.epoch_progress.current
        loop.update_restart_stage()
        ended = (
            batches.restarted_on_train_batch_end and loop.restarted_mid_epoch and batches.batch_progress.is_last_batch
        )
        return int(epochs.processed) + ended

    def setup_data(self, setup: Callable[[], None]) -> None:
        if self._fit_loop.is_resuming and not self._made_in_place:
            # Drop the loader made for ``estimated_stepping_batches``, before Lightning had restored the loops.
            self._fit_loop._combined_loader = None
        before = self._iterator
        setup()
        if self._iterator is not None and self._iterator is not before:
            self._made = self._iterator, self._now()
            self._made_in_place = self._fit_loop.is_resuming

    def on_train_start(self) -> None:
        if self._saved is not None:
            self._saved.now.restore(self._device)

    def on_run_start(self, start: Callable[[Any], None], fetcher: Any) -> None:
        before, states = self._iterator, self._now()
        start(fetcher)
        if self._iterator is not before:
            self._epoch = states

    def on_before_fetch(self) -> None:
        if self._saved is not None and self._made is not None:
            iterator, states_behind = self._made
            if iterator is self._iterator:
                (self._saved.now if self._saved.in_epoch else states_behind).restore(self._device)
            self._saved = None
        self._made = None
        self._fetching, self._trained = self._now(), self._batches_trained

    @property
    def _iterator(self) -> Any:
        return getattr(self._fit_loop._combined_loader, "_iterator", None)

    @property
    def _batches_trained(self) -> int:
        progress: Any = self._fit_loop.epoch_loop.batch_progress
        count: int = progress.total.processed
        return count

    def _now(self) -> Generators:
        return Generators.now(self._device)

    # -- saving ---------------------------------------------------------------------------------------------------

    def row(self) -> Tensor:
        """Return the generator states ``now`` and ``epoch`` that this rank saves (see :class:`Saved`), as one flat
        tensor."""
        fetched_only = self._fetching if self._trained == self._batches_trained else None
        now = fetched_only or self._now()
        return torch.cat([*now.as_tensors().values(), *(self._epoch or now).as_tensors().values()])

    def record_of(self, rows: Tensor) -> dict[str, Any]:
        """Return the checkpoint's record of generator states. ``rows`` [ranks, length]: each rank's :meth:`row`."""
        progress: Any = self._fit_loop.epoch_loop.batch_progress
        ended = progress.is_last_batch and progress.current.ready == progress.current.processed
        sizes = {name: len(part) for name, part in self._now().as_tensors().items()}
        parts = [part.clone() for part in rows.split([*sizes.values()] * 2, dim=1)]
        now, epoch = (dict(zip(sizes, some, strict=True)) for some in (parts[: len(sizes)], parts[len(sizes) :]))
        return {"now": now, "epoch": epoch, "in_epoch": not ended}
