"""Muon for the matrices inside of blocks and AdamW for everything else, as one optimizer of one's own.

Muon needs whole tensors: each matrix is stepped by the rank that owns it, with this class's own code.

python examples/muon.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader, Dataset

import lightning_zero  # noqa: F401  makes zero0, zero1, zero2 and zero3 known to Lightning
from lightning_zero.models.gpt import LitGPT

RULES: dict[str, Callable[..., Optimizer]] = {"muon": Muon, "adamw": AdamW}


class MuonAdamW(Optimizer):
    """Steps a param group by torch's Muon or AdamW, as its ``rule`` says.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate and
    one weight decay serve both.
    """

    def __init__(self, params: Iterable[Any], lr: float = 3e-3, weight_decay: float = 0.1) -> None:
        self._settings: dict[str, dict[str, Any]] = {
            "muon": {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"},
            "adamw": {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95)},
        }
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rule, params = param_group.get("rule", "adamw"), list(param_group["params"])
        settings = self._settings[rule] | {k: v for k, v in param_group.items() if k not in ("params", "rule")}
        # Torch's class checks them, and completes what a group of it has.
        made = RULES[rule]([{"params": params}], **settings).param_groups[0]
        super().add_param_group({**made, **param_group, "params": params})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                torchs = RULES[group["rule"]](group["params"])
                torchs.param_groups, torchs.state = [group], self.state
                torchs.step()
        return loss


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Param groups: matrices of blocks (modules in a ``ModuleList``) for Muon; the other matrices, embeddings and heads
    among them; and vectors, which do not decay."""
    blocks = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    inner = [m for listed in blocks for m in listed.modules() if not isinstance(m, nn.Embedding)]
    hidden = {id(p) for m in inner for p in m.parameters(recurse=False) if p.ndim == 2}
    learns = [p for p in module.parameters() if p.requires_grad]
    rest = [p for p in learns if id(p) not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in learns if id(p) in hidden], "rule": "muon"},
        {"params": [p for p in rest if p.ndim >= 2], "rule": "adamw"},
        {"params": [p for p in rest if p.ndim < 2], "rule": "adamw", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Lit(LitGPT):
    """The small GPT of the main job."""

    def configure_optimizers(self) -> Optimizer:
        return MuonAdamW(groups_of(self), lr=1e-2)


class Tokens(Dataset[Tensor]):
    """Multiples of a number, which can be learned."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(17) * (index % 7 + 1)) % 32


def main() -> None:
    trainer = Trainer(
        strategy="zero3",
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    torch.manual_seed(0)
    model = Lit(vocab_size=32, n_layer=2, n_head=2, d_model=32, block_size=16)
    trainer.fit(model, DataLoader(Tokens(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print(f"training loss: {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
