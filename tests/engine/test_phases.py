"""Units, passes and file storages refuse transitions that they do not have, and name where they came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.engine.passes.passes import Phase
from lightning_zero.engine.units import master_storage
from lightning_zero.engine.units.unit import State
from tests.engine.support import Model, Sharded, language_work
from tests.engine.test_offload import offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


@on_ranks(1)
def test_illegal_transitions_name_where_they_came_from(tmp_path: Path) -> None:
    with Sharded(Model(), **offload("nvme", tmp_path)) as side:
        language_work(side, 0)
        engine = side.engine
        with pytest.raises(RuntimeError, match="illegal transition BETWEEN -> TOLD"):
            engine.passes._enter(Phase.TOLD)
        with pytest.raises(RuntimeError, match=r"blocks\.0: illegal transition SHARDED -> GATHERED"):
            engine.units[1]._enter(State.GATHERED)
        files = next(b.storage for b in engine.buckets if isinstance(b.storage, master_storage.FileStorage))
        with pytest.raises(RuntimeError, match="rests in files: illegal transition to WRITING"):
            files._enter(master_storage.Phase.WRITING)


@on_ranks(1)
def test_a_pass_goes_through_its_phases() -> None:
    with Sharded(Model()) as side:
        passes = side.engine.passes
        seen: list[Phase] = []
        enter = passes._enter

        def spy(phase: Phase) -> None:
            enter(phase)
            seen.append(phase)

        passes._enter = spy  # type: ignore[method-assign]
        with side.engine.step_scope():
            language_work(side, 0)
        assert seen == [Phase.FORWARD, Phase.TOLD, Phase.BETWEEN, Phase.FORWARD]  # what may follow in the step
        side.engine.passes.rest()
        assert seen[-1] is Phase.BETWEEN
        del passes._enter
