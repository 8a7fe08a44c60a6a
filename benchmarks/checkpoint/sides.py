"""What is measured: ways to train and to save. All make the same model and take the same batches."""

from __future__ import annotations

import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bench import batch
from benchmarks.sides.peers import shard_fsdp2
from benchmarks.sides.side import loss_of, make_adamw


class Side(ABC):
    """One way to train, to save and to load. A turn is a program that stops wherever a step is to be taken.

    Attributes:
        background: a save goes on behind the steps that follow.
        losses: of each step.
        waited_s: seconds that steps have waited for copies of what they change.
    """

    background = False
    waited_s = 0.0

    def __init__(self) -> None:
        self.losses: list[float] = []

    @abstractmethod
    def run(self, program: Iterator[None]) -> None:
        """Take a step each time that ``program`` asks for one, until it ends."""

    @abstractmethod
    def save(self, path: str) -> None:
        """On all ranks."""

    def finish(self) -> None:  # noqa: B027  most have nothing to wait for
        """Wait until what was saved last is written.

        Raises:
            Exception: it could not be.
        """

    @abstractmethod
    def load(self, path: str) -> None:
        """On all ranks, which have trained on since: weights and optimizer state are those of the save then."""

    @abstractmethod
    def values(self) -> Iterable[Tensor]:
        """What this rank holds of weights and optimizer state."""

    def fingerprint(self) -> list[int]:
        """Checksums of :meth:`values`."""
        return [zlib.crc32(memoryview(v.detach().reshape(-1).view(torch.uint8).numpy())) for v in self.values()]  # type: ignore[arg-type]


class TorchSide(Side):
    """A loop over torch's own parts.

    Args:
        model: sharded or wrapped already.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.optimizer = model, make_adamw(model)

    def run(self, program: Iterator[None]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for number, _ in enumerate(program):
            loss = loss_of(self.model, batch(rank, world, number, 1), False)
            loss.backward()
            self.before_optimizer()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())

    def before_optimizer(self) -> None:
        """Wait for what the next step would change."""

    def values(self) -> Iterable[Tensor]:
        for param in self.model.parameters():
            for value in (param, *self.optimizer.state[param].values()):
                yield _local(value)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


class Dcp(TorchSide):
    """FSDP2 with ``dcp.save``: each block and the root are units, as DCP's recipes have it."""

    def __init__(self, model: nn.Module) -> None:
        shard_fsdp2(model, "fp32")
        super().__init__(model)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DcpAsync(Dcp):
    """FSDP2 with ``dcp.async_save``: a copy is made, and then written behind the steps."""

    background = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._group = dist.new_group(backend="gloo")  # of its own: the thread that writes uses it beside the steps
        self._written: Future[Any] | None = None

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        self._written = dcp.async_save(self.state(), checkpoint_id=path, process_group=self._group)  # type: ignore

    def finish(self) -> None:
        if self._written is not None:
            self._written.result()


class DcpStager(DcpAsync):
    """The same with a ``DefaultStager`` in a thread: the user waits for the copy before the next optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
        self._stager = DefaultStager(options)
        self._copied: Future[Any] | None = None

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        saved: Any = dcp.async_save(
            self.state(), checkpoint_id=path, process_group=self._group, async_stager=self._stager
        )
        self._copied = getattr(saved, "staging_completion", None)
        self._written = getattr(saved, "upload_completion", saved)

    def before_optimizer(self) -> None:
        if self._copied is not None:
            started = time.perf_counter()
            self._copied.result()
            self._copied = None
            self.waited_s += time.perf_counter() - started


class DdpFile(TorchSide):
    """DDP with ``torch.save`` by rank 0, made durable as on the other sides."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))

    def save(self, path: str) -> None:
        if dist.get_rank() == 0:
            with open(path, "wb") as file:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: str) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        dist.barrier()
