"""Muon for the matrices inside of blocks, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from lightning_zero.config import ConfigError

RULES: dict[str, Callable[..., Optimizer]] = {"muon": Muon, "adamw": AdamW}


class MuonAdamW(Optimizer):
    """Steps a param group by torch's :class:`~torch.optim.Muon` or :class:`~torch.optim.AdamW`, as its ``rule`` says.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate and
    one weight decay serve both.

    Args:
        params: param groups, with ``rule: muon`` or ``rule: adamw`` (the default), as :meth:`groups_of` gives them.
        lr, weight_decay: of both rules.
        momentum: of Muon.
        betas: of AdamW.

    Raises:
        ConfigError: a rule that there is not.
        ValueError: a tensor under Muon that is no matrix, or a number out of its range; from torch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        common = {"lr": lr, "weight_decay": weight_decay}
        self._settings: dict[str, dict[str, Any]] = {
            "muon": {**common, "momentum": momentum, "adjust_lr_fn": "match_rms_adamw"},
            "adamw": {**common, "betas": tuple(betas)},
        }
        for rule, settings in self._settings.items():  # both, whatever groups there are: before training
            RULES[rule]([nn.Parameter(torch.empty(1, 1))], **settings)
        super().__init__(params, {})

    @staticmethod
    def groups_of(module: nn.Module) -> list[dict[str, Any]]:
        """Param groups of the parameters that learn: matrices of blocks (modules in a ``ModuleList``) for Muon, which
        is for what lies between other layers; the other matrices, embeddings and heads among them; and vectors, which
        do not decay.
        """
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rule = param_group.setdefault("rule", "adamw")
        if rule not in RULES:
            raise ConfigError(f"rule of a param group: expected one of {', '.join(RULES)}, got {rule!r}.")
        params = param_group["params"]
        param_group["params"] = params = [params] if isinstance(params, torch.Tensor) else list(params)
        settings = {**self._settings[rule], **{k: v for k, v in param_group.items() if k not in ("params", "rule")}}
        # Torch's class checks them, and completes what a group of it has.
        made = RULES[rule]([{"params": params}], **settings).param_groups[0]
        super().add_param_group({**made, **param_group})

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
