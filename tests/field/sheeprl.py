"""PPO by the Hydra app of SheepRL on Fabric: networks whose gradients it reduces by itself, and one optimizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sheeprl.algos.ppo.ppo  # noqa: F401  # before the ranks are forked
from lightning.fabric import Fabric
from sheeprl.cli import run

import lightning_zero.fabric  # noqa: F401  # the names of its strategies
from tests.field.support import RANKS, STEPS, on_two_ranks

ROLLOUT = 8
OVERRIDES = (
    "exp=ppo env=gym env.num_envs=1 env.sync_env=True env.capture_video=False algo.run_test=False seed=5 "
    f"algo.rollout_steps={ROLLOUT} algo.per_rank_batch_size={ROLLOUT} algo.update_epochs=1 "
    f"algo.total_steps={ROLLOUT * RANKS * STEPS} model_manager.disabled=True metric.log_level=0 "
    f"fabric.accelerator=cpu fabric.devices={RANKS}"
)


def fit(strategy: str) -> None:
    backward = Fabric.backward

    def noted(self: Fabric, loss: Any, *args: Any, **kwargs: Any) -> None:
        with Path(f"losses-{self.global_rank}.jsonl").open("a") as file:
            print(json.dumps({"loss": loss.item()}), file=file)
        backward(self, loss, *args, **kwargs)

    Fabric.backward = noted  # type: ignore[method-assign]
    sys.argv[1:] = [*OVERRIDES.split(), f"fabric.strategy={strategy}"]
    run()


if __name__ == "__main__":
    on_two_ranks(fit)
