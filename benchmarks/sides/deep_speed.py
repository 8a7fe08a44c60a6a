"""DeepSpeed, stages 1 to 3 and its optimizer offload: as a peer where it is installed.

Its defaults stay, but for buckets of DDP's size: with the default of 5e8 elements nothing is sent before the backward
is over. torch's fused AdamW steps, like on all sides; offloaded it is DeepSpeedCPUAdam, as its documentation advises.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import subprocess
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.sides.side import LR, Side, loss_of, make_adamw

STAGES = {"deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3, "deepspeed2+cpu": 2, "deepspeed3+cpu": 3}
BUCKET_NUMEL = 6_553_600  # 25 MiB of fp32
_COMPILES = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


@functools.cache
def _fails(code: str) -> str | None:
    """The last line of what a process says that runs ``code``, if it fails."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install deepspeed)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | _environ(), text=True, capture_output=True)
    said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else None


def _environ() -> dict[str, str]:
    return {"DS_ACCELERATOR": "cpu", "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}


def why_not(name: str) -> str | None:
    """Its CPU Adam is compiled when it is first used, and needs a compiler and ninja."""
    return _fails("import deepspeed") or (_fails(_COMPILES) if name.endswith("+cpu") else None)


def build(name: str, model: nn.Module, precision: str) -> Side:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(_environ(), RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_SIZE=world)
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    offloads = name.endswith("+cpu")
    zero: dict[str, Any] = {"stage": STAGES[name], "reduce_bucket_size": BUCKET_NUMEL}
    if offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        zero["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=0.01)  # AdamW's of torch
    else:
        optimizer = make_adamw(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default it clips to a norm of 1
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> float:
        loss = loss_of(engine, tokens, False)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Side(name, step)
