"""Checkpoint folders on a server that speaks S3: saved by two ranks, loaded by others, and a rank killed at any moment
of a save. ``make test-s3`` installs the server; elsewhere these tests are skipped."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zero.app.convert import convert
from lightning_zero.checkpoint import verify
from lightning_zero.trainer.saves.sharded_checkpoints import read
from tests import harness
from tests.harness import Pool
from tests.trainer.toys import Lit, assert_weights, fit, loaded_weights, loader, once, seeded, sharded, trainer, weights

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

# Those calls to S3 that change something.
CHANGES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "DeleteObject"}
WIDTH = 1100  # each of two ranks uploads two parts


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            for wait in range(300):
                try:
                    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
                    break
                except OSError:
                    assert process.poll() is None and wait < 299
                    time.sleep(0.1)
            yield address
        finally:
            process.kill()


def use(server: str) -> None:
    os.environ |= {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"


def save(server: str, root: Path, background: bool) -> dict[str, Tensor]:
    use(server)
    form = {"name": "sharded", "background": background}
    saves = ModelCheckpoint(every_n_train_steps=2, save_last=True)
    of = fit(
        sharded(checkpoint=form),
        f"s3://bucket/{background}",
        limit_val_batches=0,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saves],
    )
    return of.weights


def load(server: str, root: Path, background: bool, saved: dict[str, Tensor]) -> None:
    use(server)
    folder = f"s3://bucket/{background}"
    path = f"{folder}/checkpoints/last.ckpt"
    assert_weights(loaded_weights(path, sharded("zero1"), root, Lit()), saved, tolerance=0)
    assert_weights(Lit.load_from_checkpoint(path).state_dict(), saved, tolerance=0)
    saves = ModelCheckpoint(every_n_train_steps=2, save_last=True)
    again = fit(
        sharded("zero1"), folder, limit_val_batches=0, enable_checkpointing=True, callbacks=[saves], ckpt_path="last"
    )
    assert again.trainer.current_epoch == 2 and len(again.losses) == len(loader())
    for target in (str(root / "one.ckpt"), f"{folder}/one.ckpt"):
        once(lambda to=target: convert(path, to, to="full"))  # type: ignore[misc]
        assert_weights(loaded_weights(target, sharded("zero2"), root, Lit()), again.weights, tolerance=0)
    assert verify.main([path]) == 0
    check = trainer("zero3", root)
    check.validate(Lit(), loader(), ckpt_path=path, verbose=False)
    assert_weights(weights(check), again.weights, tolerance=0)


def export(server: str, root: Path) -> None:
    """Both write the same files, of several parts, and ``init_from`` reads them."""
    use(server)
    of = trainer(sharded(), root, max_steps=1, limit_val_batches=0)
    of.fit(seeded(lambda: Lit(WIDTH, 3), 1), loader())
    of.strategy.export("s3://bucket/model", shard_size="25MB")  # type: ignore[attr-defined]
    of.save_checkpoint("s3://bucket/wide.ckpt")
    once(lambda: convert("s3://bucket/wide.ckpt", "s3://bucket/converted", to="safetensors", shard_size="25MB"))
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    names = [path.rpartition("/")[2] for path in fs.find("bucket/model")]
    assert names == [path.rpartition("/")[2] for path in fs.find("bucket/converted")] and len(names) > 2, names
    assert all(fs.cat(f"bucket/model/{name}") == fs.cat(f"bucket/converted/{name}") for name in names)
    for source in ("model", "converted"):
        strategy = sharded("zero2", init_from=f"s3://bucket/{source}")
        read = trainer(strategy, root)
        read.validate(Lit(WIDTH, 3), loader(), verbose=False)
        assert_weights(weights(read), weights(of), tolerance=0)


def test_a_model_is_exported_converted_and_read(server: str, tmp_path: Path) -> None:
    harness.run(2, export, server, tmp_path, timeout=200)


@pytest.mark.parametrize("background", [False, True])
def test_two_ranks_save_and_other_ranks_go_on_at_another_stage(server: str, background: bool, tmp_path: Path) -> None:
    saved = harness.run(2, save, server, tmp_path, background, timeout=100)[0]
    harness.run(3, load, server, tmp_path, background, saved, timeout=100)


def overwrite(server: str, root: Path, number: int, kill: tuple[int, int] | None) -> None:
    """Note which checkpoint is there, whole, and save another one over it. Rank ``kill[0]`` is killed before its change
    number ``kill[1]``."""
    from aiobotocore.client import AioBaseClient

    use(server)
    path = "s3://bucket/killed/last.ckpt"
    if number:
        assert verify.main([path]) == 0
        checkpoint = read(path, None)
        found = checkpoint["global_step"]
        expected = seeded(lambda: Lit(WIDTH, 1, lr=0.0), found).state_dict()
        assert_weights({name: checkpoint["state_dict"][name].whole() for name in expected}, expected, tolerance=0)
        once(lambda: (root / str(number)).write_text(str(found)))
    of = trainer(sharded(stall_timeout_s=20.0), root, max_steps=number + 1, limit_val_batches=0)
    of.fit(seeded(lambda: Lit(WIDTH, 1, lr=0.0), number + 1), loader())
    call, changes = AioBaseClient._make_api_call, 0

    async def counted(self: Any, name: str, *args: Any) -> Any:
        nonlocal changes
        if name in CHANGES and kill is not None and dist.get_rank() == kill[0]:
            changes += 1
            if changes == kill[1]:
                os.kill(os.getpid(), signal.SIGKILL)
        return await call(self, name, *args)

    AioBaseClient._make_api_call = counted
    try:
        of.save_checkpoint(path)
    finally:
        AioBaseClient._make_api_call = call
    assert kill is None


def test_a_rank_that_is_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(server: str, tmp_path: Path) -> None:
    kills = [None, (0, 1), (1, 1), (0, 2), (0, 3), (1, 3), (0, 4), (1, 4), (0, 6), (0, 7), (0, 9), None]
    for number, kill in enumerate(kills):
        pool = Pool(2)
        try:
            pool.run(pickle.dumps((overwrite, (server, tmp_path, number, kill), {})), 120)
        except Exception as error:
            assert kill is not None and "exit code -9" in str(error) + "".join(getattr(error, "__notes__", [])), error
        finally:
            pool.kill()
    found = [int((tmp_path / str(number)).read_text()) for number in range(1, len(kills))]
    assert found == sorted(found) and found[0] == 1 and len(set(found)) > 2, found
