"""The example's Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from examples.muon import MuonAdamW, groups_of
from lightning_zero.models.gpt import GPT

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 32, "n_layer": 2, "n_head": 2, "d_model": 16, "block_size": 8}


def _names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    listed = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in listed}


@pytest.mark.sample
def test_matrices_of_blocks_alone_go_to_muon() -> None:
    model = GPT(**SIZES)
    model.blocks[0].down.requires_grad_(False)
    muon, matrices, vectors = MuonAdamW(groups_of(model), weight_decay=0.3).param_groups
    inner = {f"blocks.{n}.{name}.weight" for n in range(2) for name in ("qkv", "proj", "up", "down")}
    assert _names(model, muon) == inner - {"blocks.0.down.weight"}
    assert _names(model, matrices) == {"embed.weight", "position.weight", "head.weight"}
    assert [g["rule"] for g in (muon, matrices, vectors)] == ["muon", "adamw", "adamw"]
    assert [g["weight_decay"] for g in (muon, matrices, vectors)] == [0.3, 0.3, 0.0]
    trained = sum(p.requires_grad for p in model.parameters())
    assert sum(len(g["params"]) for g in (muon, matrices, vectors)) == trained


@pytest.mark.sample
def test_example_steps_as_muon_and_adamw_of_torch_do() -> None:
    one, two = (copy.deepcopy(model) for model in [GPT(**SIZES)] * 2)
    mine = MuonAdamW(groups_of(one), lr=0.02)
    matrices, decay, rest = groups_of(two)
    theirs = [
        torch.optim.Muon(matrices["params"], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{**decay, "weight_decay": 0.1}, rest], lr=0.02, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        tokens = torch.arange(16).view(2, 8) * (step + 1) % 32
        for model, optimizers in ((one, [mine]), (two, theirs)):
            model.zero_grad()
            model(tokens).logsumexp(-1).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
