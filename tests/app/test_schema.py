"""The Hydra groups of our own commands: every file composes into the dataclasses, mistakes end in a sentence."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_zero.app import train
from lightning_zero.app.parts import accepted_arguments, locate
from lightning_zero.app.schema import MachineConfig, TrainConfig, register_schema, run_name
from lightning_zero.data.text import TextData
from lightning_zero.models.gpt import LitGPT
from lightning_zero.settings import Offload, Precision, Stage, ZeroConfig, make_config
from tests.harness import ROOT, run_command

CONF = ROOT / "conf"


def choices(group: str) -> list[str]:
    """List the files of ``group``, one of our own commands or of ``zero``, as overrides."""
    folder = CONF / group if group.startswith("zero/") else CONF / "app" / group
    return [f"{group}={file.stem}" for file in sorted(folder.glob("*.yaml"))]


MACHINES = choices("machine")  # of plan and submit


def composed(*overrides: str) -> DictConfig:
    register_schema()
    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        cfg = compose("train", overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        cfg.run_dir = "run"  # there is no run folder here
        return cfg


def config_of(*overrides: str) -> TrainConfig:
    cfg = composed(*overrides)
    train.check_keys(cfg)
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, TrainConfig)
    return config


# -- what is in the folders ---------------------------------------------------------------------------------------


def test_all_groups_are_there() -> None:
    groups = {file.parent.relative_to(CONF).as_posix().removeprefix("app/") for file in CONF.rglob("*.yaml")}
    for_other_apps = {"zero", "zero/into", "strategy"}
    assert groups == set().union(*BESIDE, {"app", "machine", "trainer", "zero/compile"}, for_other_apps)


# Groups whose files mean the same beside each other: the first of each are composed together, the second of each, ...
BESIDE = [
    {"model", "optimizer", "callbacks", "logger", "cluster", "zero/precision", "zero/checkpoint"},
    {"zero/offload", "debug"},
    {"zero/stage", "data"},
    {"experiment"},
    {"hparams_search"},
]
NEEDS = {"data=dataset": "data.path=/somewhere"} | dict.fromkeys(
    (f"zero/offload={row.name}" for row in Offload if "nvme" in row.name), "zero.offload.nvme_path=/somewhere"
)


def rounds() -> Iterator[list[str]]:
    for groups in BESIDE:
        files = [choices(group) for group in sorted(groups)]
        yield from ([o for o in found if o] for found in itertools.zip_longest(*files))


@pytest.mark.parametrize("options", list(rounds()), ids="-".join)
def test_every_file_composes_into_the_dataclasses_and_gives_targets_what_they_take(options: list[str]) -> None:
    if "hparams_search=optuna" in options:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    config = config_of(*options, *(NEEDS[option] for option in options if option in NEEDS))
    assert isinstance(config.zero, ZeroConfig)
    nodes = {"model": config.model, "data": config.data, "optimizer": config.optimizer, "trainer": config.trainer}
    nodes |= {f"callbacks.{k}": v for k, v in config.callbacks.items()}
    nodes |= {f"logger.{k}": v for k, v in config.logger.items()}
    for key, node in nodes.items():
        target = locate(key, node["_target_"])
        given = {k for k in node if k not in ("_target_", "_partial_")}
        assert given <= (accepted_arguments(target) or given), key


@pytest.mark.parametrize("name", ["plan", "submit"])
@pytest.mark.parametrize("option", MACHINES)
def test_every_machine_composes(name: str, option: str) -> None:
    register_schema()
    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        machine = OmegaConf.to_object(compose(name, overrides=[option]).machine)
    assert isinstance(machine, MachineConfig)
    assert option == "machine=here" or machine.gpu_memory > 2**34


def test_defaults_in_the_files_are_those_of_python() -> None:
    assert config_of().zero == make_config(precision="fp32")


def test_files_of_a_row_hold_its_name_alone() -> None:
    """Otherwise a preset string, which knows rows by name, would mean something else than the file."""
    for group, rows in (("stage", Stage), ("precision", Precision), ("offload", Offload)):
        files = {file.stem: OmegaConf.load(file) for file in (CONF / "zero" / group).glob("*.yaml")}
        assert files.pop("float8", None) in (None, {"name": "bf16", "float8": "tensorwise"})
        assert files == {row.name: {"name": row.name} for row in rows}


def test_trainer_settings_and_defaults_are_lightnings() -> None:
    theirs = inspect.signature(Trainer.__init__).parameters
    ours = {key: value for key, value in config_of().trainer.items() if key != "_target_"}
    # Given otherwise, or by a plus.
    assert set(theirs) - set(ours) == {
        *("self", "strategy", "callbacks", "logger", "plugins", "default_root_dir", "barebones"),
        *("enable_autolog_hparams", "model_registry"),
    }
    differing = list(ours)[: list(ours).index("max_epochs")]  # of the main job; as the file's comment says
    assert {key for key, value in ours.items() if value != theirs[key].default} <= set(differing)


@pytest.mark.parametrize(("variables", "nodes", "devices"), [
    ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}, 3, 2),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "1", "SLURM_NNODES": "2"}, 2, 4),
    ({}, 1, 2),
])  # fmt: skip
def test_nodes_and_devices_are_those_of_the_launcher(variables: dict[str, str], nodes: int, devices: int) -> None:
    config: dict[str, Any] = {"accelerator": "cpu"}
    given = config | {"num_nodes": 5, "devices": 7}
    with mock.patch.dict(os.environ, variables):
        assert (train.number_of_nodes(config), train.local_devices(config)) == (nodes, devices)
        assert (train.number_of_nodes(given), train.local_devices(given)) == (5, 7)


def test_model_and_data_files_name_every_argument() -> None:
    config = config_of()
    assert set(config.model) - {"_target_"} == (accepted_arguments(LitGPT) or set()) - {"optimizer"}
    assert set(config.data) - {"_target_"} == accepted_arguments(TextData)


# -- what overrides do --------------------------------------------------------------------------------------------


def test_experiment_changes_several_groups_and_the_command_line_wins() -> None:
    assert config_of("experiment=gpt_25m").zero.precision.name is Precision.bf16
    config = config_of("experiment=tiny", "model.n_layer=3", "zero/stage=zero1")
    assert (config.trainer["max_steps"], config.model["n_layer"]) == (20, 3)
    assert config.zero.stage.name.name == "zero1"
    assert config_of("experiment=tiny", "debug=fast").trainer["devices"] == 1


def test_a_file_of_this_machine_is_taken_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\ntrainer:\n  devices: 3\n")
    assert config_of(f"hydra.searchpath=[file://{tmp_path}]").trainer["devices"] == 3
    assert config_of().trainer["devices"] == "auto"


def test_the_group_drives_the_precision_of_the_trainer() -> None:
    agreed = {
        ("fp32", None): "32-true",
        ("bf16", None): "bf16-mixed",
        ("bf16", "bf16"): "bf16-mixed",
        ("fp32", "32"): "32-true",
        ("fp16_true", "16-true"): "16-true",
        (None, "bf16-true"): "bf16-true",
    }
    for (row, asked), expected in agreed.items():
        config = TrainConfig(zero=make_config(precision={"name": row}), trainer={"precision": asked})
        assert train.agreed_precision(config) == expected


def test_ranks_that_are_started_from_outside_share_a_run_folder() -> None:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    for environ, name in (({}, "20"), ({"TORCHELASTIC_RUN_ID": "abc"}, "torchrun-abc"), (slurm, "slurm-17-0")):
        with mock.patch.dict(os.environ, environ):
            assert run_name().startswith(name)


# -- mistakes, as a user makes them -------------------------------------------------------------------------------


@pytest.fixture
def command_line(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls main with overrides; returns (exit code, what it wrote to stderr). A fit is a failure."""
    monkeypatch.setattr(Trainer, "fit", mock.Mock(side_effect=AssertionError("training was started")))
    monkeypatch.setattr("lightning.pytorch.seed_everything", lambda *a, **k: 0)  # sets environment variables
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda *overrides: in_process(train, *overrides)[::2]
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_without_room_for_a_whole_copy_nothing_starts(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.engine.whole.whole_params.available_host_memory", lambda: 1000)
    settings = ("experiment=tiny", "trainer.accelerator=cpu", "zero.gather_after_fit=true", "data=synthetic")
    code, said = command_line(*settings)
    assert code == 2 and "zero.gather_after_fit=true: expected room for a whole copy of the module, " in said, said
    assert "on this host, got 1,000 bytes" in said and "Set zero.gather_after_fit=null" in said


SWEEP = "-m seed=1,2 trainer.devices=2 hydra/launcher=basic"
QUICK = "experiment=tiny data=synthetic trainer.accelerator=cpu"
WHOLE = "optimizer=adafactor zero.optimizer.state_dtype=bf16"
ONE_OF_A_KIND = {
    "trainer.max_steps= 5",
    "+machine=h100",
    "trainer.devices=0",
    "trainer.max_step=3",
    "zero.stage=3",
    "zero/offload=nvme",
    "optimizer.lr=abc",
    SWEEP,
    WHOLE,
}


@pytest.mark.mainly(lambda overrides: overrides in ONE_OF_A_KIND)
@pytest.mark.parametrize(("overrides", "parts"), [
    # a typo in a key, and what others call it
    ("trainer.max_step=3", ["Could not override 'trainer.max_step'. Did you mean trainer.max_steps=3? "]),
    ("model.n_layers=3", ["Did you mean model.n_layer=3? To append to your config use +model.n_layers=3.\n"]),
    ("optimizer.learning_rate=3", ["Did you mean optimizer.lr=3? "]),
    ("trainer.strategy=ddp", ["Could not override 'trainer.strategy'. Did you mean zero/stage=zero0? "]),
    ("+trainer.strategy=ddp", ["expected none, because zero/stage=... sets trainer.strategy, got 'ddp'."]),
    ("+trainer.logger=false", ["trainer.logger: expected none, because logger=... sets trainer.logger, got False."]),
    ("+trainer.default_root_dir=x", ["expected none, because run_dir=... sets trainer.default_root_dir, got 'x'."]),
    ("+model.optimizer=3", ["model.optimizer: expected none, because optimizer=... sets model.optimizer, got 3."]),
    ("model.width=", ["To append to your config use +model.width=VALUE.\n"]),
    # spaces
    ("trainer.max_steps= 5", ["error: 5: expected key=value without spaces. Write trainer.max_steps=5.\n"]),
    ("seed=3 trainer.max_steps = 5 tags=[a]", ["without spaces. Write trainer.max_steps=5.\n"]),
    # a group for a setting, and the other way round
    ("zero.stage=3", ["Error merging override zero.stage=3: ", "Did you mean zero/stage=zero3?\n"]),
    ("zero.offload=nvm", ["Did you mean zero/offload=nvme? There are zero/offload=auto, "]),
    ("zero=zero2", ["Could not override 'zero'. No match in the defaults list. Did you mean zero/stage=zero2?\n"]),
    ("stage=zero2", ["Did you mean zero/stage=zero2?\n"]),
    ("machine=h100", ["Could not override 'machine'. No match in the defaults list. There are callbacks, "]),
    ("+machine=h100", ["no group or setting machine. lightning-zero plan and lightning-zero submit have it. Drop +ma"]),
    ("callbacks.best.monitor=x", ["Did you mean callbacks=best callbacks.best.monitor=x? "]),
    ("zero/prefetch_bytes=3", ["Did you mean zero.prefetch_bytes=3?\n"]),
    ("zero.unit.classes=Block", ["list or tuple. Write zero.unit.classes=[Block].\n"]),
    # behind a plus
    ("+seed=3", ["An item is already at 'seed'. Did you mean seed=3?\n"]),
    ("+experiment=tiny", ["Multiple values for experiment. ", "Did you mean experiment=tiny?\n"]),
    ("+zero.unit.clases=[]", ["zero.unit.clases", "classes"]),
    # in a group or its file
    ("zero/stge=zero3", ["Could not override 'zero/stge'. Did you mean zero/stage=zero3?\n"]),
    ("zero/stage=zero4", ["Did you mean zero/stage=zero3? There are zero/stage=auto, zero/stage=zero0, "]),
    ("experiment=huge", ["experiment/huge", "There are experiment=gpt_1b, experiment=gpt_25m, experiment=llama_70b, "]),
    ("zero/stage=zero1,zero2", ["Ambiguous value for argument", "--multirun"]),
    # what Hydra takes for a number or nothing
    ("zero/precision=16", ["Did you mean zero/precision=fp16?\n"]),
    # a value; what zero.* refuses is in tests/test_settings.py
    ("zero/offload=nvme", ["zero.offload.nvme_path", "LIGHTNING_ZERO_NVME_PATH"]),
    ("zero.stage.name=zero9", ["'zero9', expected one of [zero0, ", "Did you mean zero.stage.name=zero3?\n"]),
    ("zero.dynamic_graph=perhaps", ["zero.dynamic_graph=perhaps: ", "is not a valid bool"]),
    ("trainer.max_steps=many", ["trainer.max_steps: expected a whole number, got 'many'. Change trainer.max_steps.\n"]),
    ("trainer.accumulate_grad_batches=1.5", ["trainer.accumulate_grad_batches: expected a whole number, got 1.5. "]),
    ("trainer.log_every_n_steps=true", ["trainer.log_every_n_steps: expected a whole number or null, got True."]),
    ("trainer.inference_mode=maybe", ["trainer.inference_mode: expected true or false, got 'maybe'."]),
    ("trainer.val_check_interval=0", ["trainer.val_check_interval: expected a number > 0, got 0."]),
    ("callbacks=early_stopping callbacks.early_stopping.patience=abc", ["patience: expected a whole number, got 'a"]),
    (SWEEP, ["--multirun", "hydra/launcher=basic"]),
    ("trainer.devices=0", ["trainer: ", "`Trainer(devices=0)` value is not a valid input"]),
    ("optimizer.lr=abc", ["error: optimizer.lr: expected a number, got 'abc'. Change optimizer.lr.\n"]),
    ("optimizer.lr=true", ["error: optimizer.lr: expected a number, got True. Change optimizer.lr.\n"]),
    ("optimizer.betas=[0.9]", ["AdamW refuses these settings: list index out of range. Change optimizer.*.\n"]),
    ("seed=-1", ["seed", "-1"]),
    # a contradiction
    ("zero/stage=zero2 zero.dynamic_graph=true", ["zero.dynamic_graph", "zero2"]),
    ("save_minutes=5 trainer.enable_checkpointing=false", ["save_minutes", "trainer.enable_checkpointing"]),
    ("zero/precision=bf16 trainer.precision=32-true", ["trainer.precision", "zero/precision=bf16", "32-true"]),
    ("trainer.precision=bf17", ["got bf17. Write zero/precision=bf16."]),
    ("optimizer=sgd zero.optimizer.sharding=whole", ["expected one of [auto, slices, tensors]"]),
    (WHOLE, ["drop zero.optimizer.state_dtype."]),
    # something that is not there
    ("data.path=nowhere.txt", ["data.path", "nowhere.txt"]),
    ("model._target_=lightning_zero.models.gpt.LitGTP", ["model._target_", "LitGTP"]),
    ("ckpt_path=nowhere.ckpt", ["ckpt_path", "nowhere.ckpt"]),
    ("ckpt_path=/proc/self/status", ["got /proc/self/status: torch.save writes no file that begins with b'Name:"]),
    ("data=synthetic zero.init_from=/nowhere", ["zero.init_from: expected a folder, got /nowhere. Change"]),
    ("data=synthetic zero.unit.classes=[Blok]", ["got 'Blok', which does not", "zero.unit.classes=[Block]."]),
    (f"{QUICK} callbacks.checkpoint.dirpath=/proc/a", ["callbacks.checkpoint.dirpath: expected a folder to write "]),
    (f"{QUICK} logger.csv.save_dir=/proc/a", ["logger.csv.save_dir: expected a folder to write to, got '/proc/a': No"]),
    # a model of one's own
    ("model._target_=torch.nn.Linear model.n_layer=3", ["model.n_layer", "torch.nn.Linear"]),
    ("model._target_=torch.nn.Linear", ["model", "in_features"]),
])  # fmt: skip
def test_a_mistake_ends_in_a_sentence(command_line: Any, overrides: str, parts: list[str]) -> None:
    code, said = command_line(*overrides.split())
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    assert not [word for word in ("Traceback", "Config'", "full_key") if word in said]  # the last two are OmegaConf's
    assert [part for part in parts if part not in said] == []
    assert not Path("outputs/train").exists()


def test_a_setting_with_dashes_is_refused_with_its_form(command_line: Any) -> None:
    code, said = command_line("--max_steps", "5")
    assert code == 2 and said.endswith(
        "error: a setting is written key=value, without dashes. Did you mean trainer.max_steps?\n"
    )


def test_files_of_ones_own_are_listed_and_looked_at(command_line: Any, tmp_path: Path) -> None:
    for name, text in (("zero/stage/mine", "name: zero1\n"), ("experiment/mine", "model:\n  n_layers: 3\n")):
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(("# @package _global_\n" if "experiment" in name else "") + text)
    for override, key in (("zero/stage=mime", "Did you mean zero/stage=mine?"), ("experiment=mine", "model.n_layers")):
        code, said = command_line("--config-dir", str(tmp_path / "conf"), override)
        assert code == 2 and key in said


@pytest.mark.smoke
def test_help_is_in_our_words() -> None:
    done = run_command("python", "-m", "lightning_zero.train", "--help", code=0)
    assert "Train a model under ZeRO" in done.stdout
    assert "zero/stage: auto, zero0, zero1, zero2, zero3" in done.stdout
    assert "prefetch_bytes" in done.stdout


# -- pieces -------------------------------------------------------------------------------------------------------


def test_a_broken_module_of_a_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_broken_module.py").write_text("import there_is_no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_library"):
        locate("model._target_", "users_broken_module.Lit")


def test_arguments_of_a_subclass_reach_the_base() -> None:
    class Mine(LitGPT):
        def __init__(self, extra: int = 0, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    assert accepted_arguments(Mine) == {"extra"} | (accepted_arguments(LitGPT) or set())
