"""An engine on the meta device: layouts, order and bytes of a model without its values (simulated scale)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of
from tests.models import VOCABULARY, Odd


@pytest.fixture(autouse=True)
def compiler_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's meta kernels import the compiler, which sets this variable for good where it is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("built_on", ["meta", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_whole_steps_without_values(stage: int, precision: str, built_on: str) -> None:
    with torch.device(built_on):
        model = Odd()
    engine = lightning_zero.shard(model, stage=stage, precision=precision, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    for _ in range(2):
        logits = model(torch.zeros(2, 7, dtype=torch.long, device="meta"))
        assert logits.shape == (2, 7, VOCABULARY)
        logits.sum().backward()
        engine.passes.wait_for_all()
        lightning_zero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        assert held_bytes(engine) == planned_bytes(plan_of(engine), moment=Moment.reduced)
        optimizer.zero_grad()
    with pytest.raises(NotImplementedError, match="no data"):
        engine.state_dict()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    engine.release()
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())
