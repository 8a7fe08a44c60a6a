"""QLoRA: adapters on frozen 4-bit weights of bitsandbytes, whose bytes are in shards and are never cast."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.app.convert import convert
from lightning_zero.checkpoint.hugging_face.export import export
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.memory.held_bytes import held_bytes, planned_now
from tests.engine.support import TRUE, Sharded, autocast
from tests.engine.test_pretrained import TOKENS, saved, transformers
from tests.harness import on_ranks, run
from tests.trainer.test_hugging_face import WithAdapters
from tests.trainer.toys import Lit, Run, fit, seeded, strategy_of, trainer

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")

WIDTH = 64
ROWS = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")]
STORAGES = {
    "fp32": ("bfloat16", "float16", "uint8"),
    "bf16": ("bfloat16", "float16", "uint8"),
    "bf16_true": ("float16",),
}


def packed(inputs: int, outputs: int, storage: str) -> nn.Module:
    settings = {"compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": getattr(torch, storage)}
    return bnb.nn.Linear4bit(inputs, outputs, bias=False, **settings).to("cpu")  # quantises


class Block(nn.Module):
    """Its backward begins with a 4-bit layer, as that of a Llama with adapters on q_proj and v_proj alone."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self.up, self.down = packed(WIDTH, 2 * WIDTH, storage), packed(2 * WIDTH, WIDTH, storage)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 2 * WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.adapter(x)))


def model(storage: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(storage) for _ in range(3)])


def batch(step: int) -> Tensor:
    """For all ranks."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def own(values: Tensor) -> Tensor:
    return values.chunk(dist.get_world_size())[dist.get_rank()]


def bytes_of(module: nn.Module) -> dict[str, Tensor]:
    """Of packed parameters, and of what decodes them."""
    found = {}
    for name, param in module.named_parameters():
        if (state := getattr(param, "quant_state", None)) is not None:
            found[name] = param.detach().clone().view(torch.uint8)
            found |= {f"{name}.{k}": v.clone() for k, v in state.as_dict(packed=True).items()}
    assert len(found) > 2
    return found


def assert_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def mean_square(module: nn.Module, x: Tensor, precision: str) -> Tensor:
    with autocast(precision):
        return module(x.to(TRUE.get(precision, torch.float32))).float().square().mean()


@on_ranks(2)
@pytest.mark.parametrize(("precision", "storage"), [(p, s) for p, all in STORAGES.items() for s in all])
@pytest.mark.parametrize(("stage", "offload"), ROWS)
def test_training_is_that_of_one_process(stage: int, offload: str, precision: str, storage: str) -> None:
    """With the whole batch, in as many parts as there are ranks."""
    module, twin = model(storage), model(storage)
    before = bytes_of(module)
    trained = [p for p in twin.parameters() if p.requires_grad]
    if precision == "bf16_true":
        for param in trained:
            param.data = param.data.bfloat16()
    optimizer = torch.optim.SGD(trained, lr=0.1)
    tolerance = 1e-2 if precision == "bf16_true" else 1e-6
    near = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    settings: dict[str, Any] = {"stage": stage, "offload": offload, "precision": precision}
    with Sharded(module, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **settings) as side:
        for step in range(3):
            expected = [mean_square(twin, part, precision) for part in batch(step).chunk(2)]
            (sum(expected) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = mean_square(module, own(batch(step)), precision)
            near(loss, expected[dist.get_rank()])
            side.backward(loss)
            side.step()
            side.zero_grad()
            with side.engine.step_scope("validation", evaluation=True), torch.no_grad():
                module.eval()
                found = mean_square(module, batch(9), precision)
                module.train()
            near(found, mean_square(twin, batch(9), precision))
        with lightning_zero.gather(module):
            assert_bytes(bytes_of(module), before)
            found = [param.float() for param in module.parameters() if param.requires_grad]
            near(found, [param.float() for param in trained])
    assert_bytes(bytes_of(module), before)
    copy.deepcopy(module)(batch(0).to(TRUE.get(precision, torch.float32)))


@on_ranks(2)
@pytest.mark.parametrize("storage", ["bfloat16", "uint8"])
def test_bytes_are_in_shards_and_planned(storage: str) -> None:
    module = model(storage)
    found = bytes_of(module)
    nbytes = sum(value.numel() for name, value in found.items() if name.endswith(".weight"))
    beside = sum(t.nbytes for n, t in found.items() if n.endswith(("absmax", "quant_map")))
    beside += 4 * sum(n.endswith(".weight") for n in found)  # the offset of a nested state is a number there
    held = {}
    for stage in (1, 3):
        with Sharded(copy.deepcopy(module), stage=stage) as side:
            side.zero_grad()
            now = held_bytes(side.engine)
            assert now == planned_now(side.engine, now)
            held[stage] = now[Role.compute_param, Tier.device]
            frozen = [bucket for bucket in side.engine.buckets if not bucket.plan.trainable]
            assert sum(b.plan.beside for b in frozen) == beside
            assert {b.dtypes.compute for b in frozen} == {getattr(torch, storage)}
            if stage == 3:
                assert sum(b.master.nbytes for b in frozen) == nbytes / 2
    adapters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert held == {1: nbytes + beside + adapters, 3: nbytes / 2 + beside + adapters / 2}


@on_ranks(2)
def test_bytes_of_another_dtype_or_without_what_decodes_them_are_not_loaded() -> None:
    state = model("float16").state_dict()
    with Sharded(model("bfloat16"), stage=3) as side, pytest.raises(RuntimeError, match="bytes in torch.bfloat16 and"):
        side.engine.load_state_dict(state)
    lacking = {name: value for name, value in state.items() if not name.startswith("1.up.weight.")}
    with Sharded(model("float16"), stage=3) as side, pytest.raises(RuntimeError, match="got torch.float16 and none"):
        side.engine.load_state_dict(lacking)


@on_ranks(1)
def test_what_cannot_be_sharded_is_refused() -> None:
    fresh = nn.Sequential(bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False))
    trained, narrow = model("bfloat16"), model("uint8")
    trained[0].up.weight.requires_grad_()
    narrow[1].up.weight.quant_state.packing_format_for_cpu = True
    for module, says in (
        (fresh, r"weight: expected a frozen 4-bit weight with its quant_state, got one with"),
        (trained, r"0\.up\.weight: .* requires a gradient\. Freeze it, and train adapters"),
        (narrow, r"1\.up\.weight: .* packed anew\. Shard the module before it is evaluated"),
    ):
        with pytest.raises(ConfigError, match=says):
            lightning_zero.shard(module, stage=3)


class Adapted(WithAdapters):
    def __init__(self, folder: Path, storage: str) -> None:
        super().__init__("llama", folder)
        self.storage = storage

    def configure_model(self) -> None:
        if self.model is None:
            peft, storage = pytest.importorskip("peft"), getattr(torch, self.storage)
            self.model = base_model(self.folder, storage)
            self.model = peft.get_peft_model(self.model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
            self.model.train()


def base_model(folder: Any, storage: torch.dtype = torch.uint8) -> Any:
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, dtype=torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("storage", ["float16", "uint8"])
def test_adapters_of_peft_and_the_whole_model_are_exported(storage: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved("llama", tmp_path / "in")
    module = Adapted(tmp_path / "in", storage)
    of = trainer("zero3", tmp_path, max_epochs=1)
    of.fit(module, DataLoader(TOKENS, batch_size=2))
    module.eval()
    with of.strategy.step_scope(), torch.no_grad():
        expected = module.model(TOKENS).logits
    of.strategy.export(tmp_path / "adapters")
    base = base_model(tmp_path / "in", getattr(torch, storage))
    found = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad():  # not in eval(): there bitsandbytes packs narrow weights wrongly on some CPUs
        assert torch.equal(found.train()(TOKENS).logits, expected)
    base = base_model(tmp_path / "in", torch.float16)
    before = bytes_of(base)
    engine = lightning_zero.shard(base, stage=3)
    export(engine, tmp_path / "out", torch.bfloat16, 10**9)
    engine.release()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_bytes(bytes_of(found), before)
    assert {p.dtype for p in found.parameters()} == {torch.float16, torch.bfloat16}


class Quantised(Lit):
    def __init__(self, storage: str = "uint8") -> None:
        super().__init__(width=WIDTH, depth=1)
        self.blocks = nn.ModuleList(Block(storage) for _ in range(2))
        self.first.requires_grad_(False)


def run_of(path: Path, form: str, exclude: bool, module: Any = None, **settings: Any) -> Run:
    strategy = strategy_of("zero3", checkpoint={"name": form, "exclude_frozen": exclude})
    module = seeded(Quantised) if module is None else module
    return fit(strategy, path.parent, module, batch_size=12 // dist.get_world_size(), **settings)


@on_ranks(2)
@pytest.mark.parametrize("storage", ["float16", "uint8"])
@pytest.mark.parametrize("ema", [True, False])
def test_averages_keep_the_bytes(ema: bool, storage: str, tmp_path: Path) -> None:
    module = seeded(lambda: Quantised(storage))
    before = bytes_of(module)
    callback = EMAWeightAveraging(decay=0.8) if ema else StochasticWeightAveraging(0.01, swa_epoch_start=1)
    fit("zero3", tmp_path, module, callbacks=[callback], max_epochs=4)  # the averages are its weights at the end
    assert_bytes(bytes_of(module), before)


def _save(form: str, exclude: bool, path: Path, epochs: int = 1) -> dict[str, Tensor]:
    found = run_of(path, form, exclude, max_epochs=epochs)
    found.trainer.save_checkpoint(path)
    return found.weights


def _resume(form: str, exclude: bool, path: Path, expected: dict[str, Tensor]) -> None:
    module = seeded(Quantised, seed=3 if exclude else 5)  # without frozen parameters the same base
    found = run_of(path, form, exclude, module, ckpt_path=path).weights
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype is torch.float32 and not name.endswith("absmax"):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("ranks", [(2, 3), (2, 1), (1, 2)])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("exclude", [False, True])
def test_training_goes_on_on_other_ranks(exclude: bool, form: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    whole = run(ranks[0], _save, form, exclude, tmp_path / "whole.ckpt", 2)[0]
    run(ranks[0], _save, form, exclude, tmp_path / "one.ckpt")
    path = tmp_path / "one.ckpt"
    keys = ShardedFolder(path).keys if form == "sharded" else torch.load(path, weights_only=False)["state_dict"]
    frozen = [key for key in keys if ".up." in key or ".down." in key or "first" in key]
    assert bool(frozen) == (not exclude)
    run(ranks[1], _resume, form, exclude, path, whole)
    if not exclude:
        with pytest.raises(ConfigError, match=r"which has 4-bit weights, stored as bytes\. Drop dtype="):
            convert(str(path), str(tmp_path / "other"), to="full", dtype="bf16")
