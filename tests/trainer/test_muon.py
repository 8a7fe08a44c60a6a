"""The example's Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import copy

import pytest
import torch

from examples.muon import MuonAdamW, groups_of
from lightning_zero.models.gpt import GPT
from tests.harness import on_ranks

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 32, "n_layer": 2, "n_head": 2, "d_model": 16, "block_size": 8}


@on_ranks(1)
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
