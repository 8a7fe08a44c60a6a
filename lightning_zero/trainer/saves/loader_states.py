"""Saves where each rank's stateful loaders are in an epoch. Lightning saves rank 0's states, and loads them on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.ranks.messages import dumps
from lightning_zero.trainer import uneven

_LIGHTNINGS, _RANKS = "combined_loader", "lightning_zero_loaders"  # keys in the state of a fit loop


class LoaderStates:
    """States of this rank's loaders: a list, which is empty at the begin of an epoch, and in an epoch on a rank that
    has had all its batches.

    Attributes:
        loaded: those that the run resumes from, until the first epoch begins.
        out: other ranks resume in an epoch of which this rank has had all batches.
    """

    def __init__(self) -> None:
        self.loaded: Sequence[Any] = []
        self.out = False
        self._last: Sequence[Any] | None = None  # when a fit ended

    def take(self) -> tuple[Sequence[Any], bool]:
        taken = self.loaded, self.out
        self.loaded, self.out = [], False
        return taken

    def fit_ends(self, trainer: Any) -> None:
        """Note states before Lightning resets loaders."""
        if trainer is not None and trainer.fit_loop._data_fetcher is not None:
            self._last = uneven.states_to_save(trainer.fit_loop)

    def save(self, strategy: Any, checkpoint: dict[str, Any]) -> None:
        """Put all ranks' states into a checkpoint, where they are not the same. Collective."""
        trainer = strategy.lightning_module._trainer
        if "loops" not in checkpoint or trainer is None:
            return
        loop, state = trainer.fit_loop, _fit_loop(checkpoint)
        own = self._last if loop._data_fetcher is None else uneven.states_to_save(loop)
        if own is not None:
            state[_LIGHTNINGS] = own
        if _LIGHTNINGS not in state:
            return
        try:
            found = strategy._gather_objects(list(state[_LIGHTNINGS]), "states of loaders")
        except TypeError as error:
            rank_zero_warn(f"state_dict() of a training loader: only rank 0's is saved. {error}")
            return
        if len({dumps(states) for states in found}) > 1:
            state[_RANKS] = found

    def load(self, strategy: Any, checkpoint: dict[str, Any], path: Any) -> None:
        """Put this rank's states in the place of rank 0's."""
        state = _fit_loop(checkpoint)
        found = state.pop(_RANKS, None)
        if found is not None and len(found) != strategy.world_size:
            rank_zero_warn(
                f"{path} has different states of loaders for {len(found)} ranks: all "
                f"{strategy.world_size} ranks use that of rank 0, so that samples of this epoch may be repeated or "
                "left out."
            )
        elif found is not None:
            state[_LIGHTNINGS] = found[strategy.global_rank]
            self.out = not state[_LIGHTNINGS]  # while others have some
        self.loaded = state.get(_LIGHTNINGS, [])


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state
