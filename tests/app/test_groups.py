"""What the files of the groups make: each is built as a run would build it, and a wrong value is named by its key."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_zero.app import parts, train
from lightning_zero.app.jobs import decided
from lightning_zero.app.parts import build_all
from lightning_zero.app.schema import TrainConfig
from lightning_zero.app.sweep import job_arguments, overrides_of, print_table, read_results
from lightning_zero.app.tasks import _next, check_vocabulary, optimized
from lightning_zero.data.synthetic import BRANCHES, SyntheticData
from lightning_zero.data.text import TextData
from lightning_zero.models.gpt import LitGPT
from lightning_zero.models.hugging_face import LitCausalLM
from lightning_zero.optimizers.refused import check_optimizer
from lightning_zero.settings import ConfigError, OptimizerConfig
from lightning_zero.trainer.saves.checkpoint_fits import OtherModelError
from tests.app.test_schema import choices, config_of
from tests.harness import run_command

PACKAGES = {"tensorboard": "tensorboard", "many": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def files(group: str) -> list[str]:
    return [choice.partition("=")[2] for choice in choices(group)]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.mainly(lambda name: name in ("many", "wandb"))
@pytest.mark.parametrize("name", files("logger"))
def test_loggers_or_their_packages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(f"logger={name}", "tags=[first,wide]")
    for node in config.logger.values():
        node |= {k: str(tmp_path) for k in ("save_dir",) if k in node}
    package = PACKAGES.get(name)
    if package and not installed(package):
        said = rf"logger\.\w+: .* needs a package that is .*{package}.* pip install 'lightning-zero\[loggers\]'"
        with pytest.raises(ConfigError, match=said):
            parts.build_loggers(config)
    else:
        assert len(parts.build_loggers(config)) == {"none": 0, "many": 2}.get(name, 1)
        assert name != "wandb" or config.logger["wandb"]["tags"] == ["first", "wide"]


class WandbLogger(DummyLogger):
    """Stands for Lightning's, as far as it is looked at."""

    def __init__(self, offline: bool = False) -> None:
        super().__init__()
        self._offline = offline


def test_an_account_of_wandb_is_asked_for_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = SimpleNamespace(Error=type("Error", (Exception,), {}))
    wandb.login = mock.Mock(side_effect=wandb.Error("No API key configured."))
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = config_of()
    node = {"_target_": f"{__name__}.WandbLogger"}
    config.logger = {"wandb": node}
    with pytest.raises(ConfigError, match=r"logger\.wandb: .*No API key.* wandb login .*logger\.wandb\.offline=true"):
        parts.build_loggers(config)
    for variable, value in (("LOCAL_RANK", "1"), ("WANDB_MODE", "offline")):  # another rank of this host
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert len(parts.build_loggers(config)) == 1
    config.logger = {"csv": None, "wandb": node | {"offline": True}}
    assert len(parts.build_loggers(config)) == 1 and wandb.login.call_count == 1


@pytest.mark.mainly(lambda name: name == "early_stopping")
@pytest.mark.parametrize("name", files("callbacks"))
def test_callbacks_monitor_what_one_key_says(name: str) -> None:
    best = name in ("best", "early_stopping")
    overrides = ["callbacks.best.monitor=val_accuracy", "callbacks.best.mode=max"] * best
    callbacks = build_all("callbacks", config_of(f"callbacks={name}", *overrides).callbacks)
    monitored = [(type(c), c.monitor, c.mode) for c in callbacks if isinstance(c, (ModelCheckpoint, EarlyStopping))]
    expected = [(ModelCheckpoint, None, "min")] * (name != "none")
    expected += [(ModelCheckpoint, "val_accuracy", "max")] * best
    assert monitored == expected + [(EarlyStopping, "val_accuracy", "max")] * (name == "early_stopping")


@pytest.mark.mainly(lambda name: name in ("adafactor", "adamw"))
@pytest.mark.parametrize("name", files("optimizer"))
def test_optimizers_step_slices(name: str) -> None:
    """Each but one is one of those that the engine knows to be element-wise."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = parts.build_optimizer(config_of(f"optimizer={name}"))([weight])
    steps_whole = check_optimizer(optimizer, OptimizerConfig(), stochastic_rounding=False)
    assert steps_whole == (name == "adafactor")
    weight.grad = torch.ones(4)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_models_take_what_the_data_gives(name: str, tmp_path: Path) -> None:
    if name != "gpt":
        pytest.importorskip("transformers")
    config = config_of("experiment=tiny", f"model={name}", "data=synthetic")
    data, model = parts.build_data(config, set()), parts.build_model(config, set())
    check_vocabulary(model, data)
    model.configure_model()
    batch = next(iter(data.val_dataloader()))
    assert model(batch[:, :-1]).shape == (4, 64, 256)


def callbacks_of(config: TrainConfig) -> Any:
    return build_all("callbacks", config.callbacks)


def model_of(config: TrainConfig) -> Any:
    pytest.importorskip("transformers")
    return parts.build_model(config, set())


def checked_vocabulary(config: TrainConfig) -> None:
    check_vocabulary(parts.build_model(config, set()), parts.build_data(config, set()))


SPARSE = "optimizer=sgd optimizer._target_=torch.optim.SparseAdam ~optimizer.momentum ~optimizer.weight_decay"


@pytest.mark.parametrize(("build", "overrides", "says"), [
    (callbacks_of, "callbacks=early_stopping callbacks.best.mode=up", "callbacks.best"),
    (
        callbacks_of,
        "callbacks=early_stopping +callbacks.early_stopping.patient=3",
        "patient: .* Write callbacks.early_stopping.patience",
    ),
    (parts.build_optimizer, SPARSE, "SparseAdam steps sparse gradients only"),
    (model_of, "model=hf", "model.path: expected a folder with a model"),
    (model_of, "model=hf model.path=/nowhere", "model.path: expected a folder with a config.json"),
    (model_of, "model=llama model.config.model_type=lama", "model.config.model_type: .* got 'lama'"),
    (model_of, "model=llama +model.config.num_layer=3", "config.num_layer: LlamaConfig has no such setting"),
    (
        checked_vocabulary,
        "experiment=tiny data=synthetic data.vocab_size=500",
        "model.vocab_size: expected at least 500.*got 256",
    ),
    (train.check_task, "task=test", "ckpt_path: expected a checkpoint for task=test, got none"),
    (
        train.check_task,
        "task=predict ckpt_path=there optimized_metric=loss",
        "optimized_metric: expected none for task=predict",
    ),
])  # fmt: skip
def test_what_cannot_be_built_is_refused_by_its_key(build: Any, overrides: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(config_of(*overrides.split()))


def test_a_folder_is_read_without_the_strategy_and_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the strategy from_pretrained reads it; with it nobody does, and zero.init_from names the folder."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    there = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **sizes))
    there.save_pretrained(tmp_path)
    config = config_of("model=hf", f"model.path={tmp_path}", "+model.config.attention_dropout=0.5")
    assert config.zero.init_from == str(tmp_path)
    model = parts.build_model(config, set())
    assert isinstance(model, LitCausalLM) and model.config.attention_dropout == 0.5 and model.vocab_size == 300
    model.configure_model()
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), there.parameters(), strict=True))  # type: ignore
    with torch.device("meta"):
        planned = parts.build_model(config, set())
        planned.configure_model()
    assert all(p.is_meta for p in planned.parameters())


# -- data ---------------------------------------------------------------------------------------------------------


def test_made_up_tokens_are_the_same_again_and_can_be_learned() -> None:
    one, other = (SyntheticData(n_train=64, n_val=8, block_size=32, seed=3) for _ in range(2))
    assert torch.equal(torch.stack(list(one.train_data)), torch.stack(list(other.train_data)))
    assert not torch.equal(one.train_data[0], one.val_data[0])
    followers: dict[int, set[int]] = {}
    for walk in one.train_data:
        for token, following in zip(walk[:-1].tolist(), walk[1:].tolist(), strict=True):
            followers.setdefault(token, set()).add(following)
    assert max(map(len, followers.values())) <= BRANCHES
    with pytest.raises(ConfigError, match=r"data\.n_train: expected at least a batch"):
        SyntheticData(n_train=7, batch_size=4).check(world_size=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of pairs of bytes."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained = {"vocab_size": 300, "special_tokens": ["<end>"], "initial_alphabet": letters, "show_progress": False}
    inner.train_from_iterator([WORDS], tokenizers.trainers.BpeTrainer(**trained))
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(folder)
    return folder


WORDS = "the quick brown fox jumps over the lazy dog; " * 40


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package, with a cache of its own."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # which a tokenizer's first call sets
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return found


def dataset_text(path: Path, **settings: Any) -> Any:
    """Its data, ready to train."""
    from lightning_zero.data.dataset import DatasetText

    data = DatasetText(str(path), **{"block_size": 8, "batch_size": 2, "val_fraction": 0.1, **settings})
    data.prepare_data()
    data.setup("fit")
    return data


def test_text_is_cut_into_pieces_of_tokens_once(datasets: Any, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(WORDS)
    data = dataset_text(tmp_path / "texts", tokenizer=str(tokenizer))
    expected = data.encode([WORDS])[0] * 2
    assert len(expected) < 2 * len(WORDS) / 3
    assert data.bytes_per_token == pytest.approx(2 * len(WORDS) / len(expected))
    pieces = data._pieces()["tokens"]
    assert [list(piece) for piece in pieces] == [expected[n : n + 9] for n in range(0, len(expected) - 8, 8)]
    assert len(data.train_data) + len(data.val_data) == len(pieces) and len(data.val_data) == round(len(pieces) / 10)
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, 9) and batch.dtype == torch.int64 and batch.tolist()[0] in map(list, pieces)
    again = dataset_text(tmp_path / "texts", tokenizer=str(tokenizer))
    assert again._pieces().cache_files == data._pieces().cache_files  # cut once
    assert dataset_text(tmp_path / "texts").vocab_size == 256  # bytes


def test_a_model_from_a_folder_brings_its_tokenizer(datasets: Any, tokenizer: Path, tmp_path: Path) -> None:
    """Else a real vocabulary would be trained on bytes without a word."""

    def data(folder: Path, *overrides: str) -> Any:
        (tmp_path / "a.txt").write_text(WORDS)
        small = () if overrides == ("data=synthetic",) else (f"data.path={tmp_path}/a.txt",)
        return parts.build_data(config_of("model=hf", f"model.path={folder}", *small, *overrides), set())

    assert data(tokenizer).vocab_size > 256
    assert data(tokenizer, "data.tokenizer=null").vocab_size == 256
    with pytest.raises(ConfigError, match=r"files of a tokenizer .*model=hf takes model.path.*data.tokenizer=null"):
        data(tmp_path)
    assert isinstance(data(tmp_path, "data=synthetic"), SyntheticData)
    assert isinstance(data(tmp_path, "data=text"), TextData)


def test_a_dataset_on_disk(datasets: Any, tokenizer: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"story": [WORDS, "and so on"], "stars": [1, 2]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "set")
    data = dataset_text(tmp_path / "set", column="story")
    joined = WORDS.encode() + b"\0and so on\0"
    assert bytes(data._pieces()[0]["tokens"]) == joined[:9] and len(data._pieces()) == (len(joined) - 1) // 8
    tokens = dataset_text(tmp_path / "set", split="test", column="story", tokenizer=str(tokenizer))
    assert 0 < len(tokens._pieces()) < len(data._pieces())
    mistakes: dict[str, dict[str, Any]] = {
        "column: expected one of story, stars, got 'text'": {},
        "column: expected a column of text, got int64 in 'stars'": {"column": "stars"},
        "split: expected one of train, test, got 'dev'": {"column": "story", "split": "dev"},
        "path: expected text for at least one batch": {"column": "story", "block_size": 800},
    }
    for said, given in mistakes.items():
        with pytest.raises(ConfigError, match=f"data.{said}"):
            dataset_text(tmp_path / "set", **given)


def test_a_path_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: expected a folder of save_to_disk.* Set data\.path"):
        parts.build_data(config_of("data=dataset"), set())
    said = r"data\.path: expected a file, a folder or a glob of text"
    with pytest.raises(ConfigError, match=said if installed("datasets") else "Run pip install datasets"):
        dataset_text(tmp_path / "nowhere")


@pytest.mark.parametrize(("missing", "overrides"), [
    ("transformers and datasets", ["model=hf", "model.path=/folder"]),
    ("transformers", ["model=llama"]),
    ("datasets", ["data=dataset", "data.path=/folder"]),
    ("transformers", ["data=dataset", "data.tokenizer=/folder"]),
])  # fmt: skip
def test_packages_are_missed_before_anything_is_built(
    missing: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, names = importlib.util.find_spec, missing.split(" and ")
    there = importlib.machinery.ModuleSpec("there", None, origin="there")
    of_folder = importlib.machinery.ModuleSpec("datasets", None)  # the user's own folder of that name
    known = {name: of_folder if name in names else there for name in ("transformers", "datasets")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: known.get(name) or find(name, *a))
    config = config_of("run_dir=run", *overrides)
    with pytest.raises(ConfigError, match=f"{missing} to be installed. Run pip install {' '.join(names)}\\.$"):
        parts.check_packages(config, "model", "data")
    parts.check_packages(config_of("run_dir=run"), "model", "data")


@pytest.mark.full
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_missing_package_is_said_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    code = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    code += f"sys.modules['transformers'] = None; runpy.run_module('lightning_zero.{command}', run_name='__main__')"
    done = run_command(
        "python", "-c", code, "model=hf", "model.path=/folder", f"hydra.run.dir={tmp_path / 'run'}", code=2
    )
    assert done.stdout == "False\n" and "transformers" in done.stderr and "pip install transformers" in done.stderr
    assert not (tmp_path / "run").exists()


# -- tasks and sweeps ---------------------------------------------------------------------------------------------


def test_evaluating_takes_a_checkpoint(tmp_path: Path) -> None:
    train.check_task(config_of("task=test", "model=hf", "model.path=/there"))
    with pytest.raises(ConfigError, match=r"optimized_metric: expected .*logs, one of loss, got 'los'.*=loss\.$"):
        optimized(config_of("optimized_metric=los", "task=test", "ckpt_path=there"), {"loss": 1.0})
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- experiment=tiny\n- seed=1\n")
    trainer: Any = SimpleNamespace(_checkpoint_connector=SimpleNamespace())
    refused = pytest.raises(ConfigError, match=r"^other\. The run .* had: experiment=tiny seed=1$")
    with refused, decided(trainer, str(tmp_path / "checkpoints" / "last.ckpt")):
        raise OtherModelError("other.")


def test_the_arguments_of_a_job_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["hydra/launcher=processes", "hydra.sweep.dir=x", "hydra.verbose=true", "hydra.mode=MULTIRUN"]
    arguments = job_arguments(["experiment=tiny", "seed=3"], given)
    assert arguments == ["experiment=tiny", "seed=3", "hydra.verbose=true", "hydra.mode=RUN"]
    monkeypatch.setattr(sys, "argv", ["train", "hparams_search=grid", "optimized_metric=bits", *arguments])
    trainer: Any = SimpleNamespace(lightning_module=LitGPT(), datamodule=SyntheticData())
    said = _next(trainer, "last.ckpt", finished=True)  # no sweep of one run
    assert said == "python -m lightning_zero.train experiment=tiny seed=3 task=test ckpt_path=last.ckpt"


def test_a_sweep_leaves_a_table_that_is_printed(tmp_path: Path, capsys: Any) -> None:
    for number, metrics in enumerate(['{"bits": 2.5, "loss": 9}', '{"bits": 2.25, "loss": 8}', None]):
        run = tmp_path / "sweep" / str(number)
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra" / "overrides.yaml").write_text(f"- seed=1\n- optimizer.lr={number}\n")
        if metrics is not None:
            (run / "results.json").write_text(f'{{"metrics": {metrics}}}')
    runs = sorted((tmp_path / "sweep").iterdir())
    assert overrides_of(runs[1]) == ["seed=1", "optimizer.lr=1"] and read_results(runs[2]) == {}
    for direction, order in (("minimize", ["1", "0", "2"]), ("maximize", ["0", "1", "2"])):
        print_table(tmp_path, runs, "bits", direction)
        lines = [line for line in capsys.readouterr().out.splitlines() if "optimizer.lr=" in line]
        assert [line.strip("│ ").split(" ")[0] for line in lines] == order
        assert "optimizer.lr=2 (failed)" in lines[-1] and "seed=1" not in "".join(lines)
        assert "2.2500" in lines[order.index("1")] and "8.0000" in lines[order.index("1")]
        table = [line.split(",") for line in (tmp_path / "sweep.csv").read_text().splitlines()]
        assert table[0][:3] == ["run", "overrides", "bits"] and [row[0] for row in table[1:]] == order
