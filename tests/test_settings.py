"""The dataclasses: values are checked at the door, and every way of writing a setting gives the same object."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from lightning_zero.presets import PRESETS
from lightning_zero.settings import (
    ConfigError,
    DType,
    Offload,
    OffloadConfig,
    OptimizerConfig,
    Precision,
    PrecisionConfig,
    Stage,
    StateDtype,
    UnitConfig,
    ZeroConfig,
    keywords,
    make_config,
    names_arguments,
)
from tests.rows import IN_FILES

pytestmark = pytest.mark.smoke

NVME_PATH = "LIGHTNING_ZERO_NVME_PATH"


def test_defaults_are_stage_3_on_the_device() -> None:
    config = ZeroConfig()
    assert config.stage.name is Stage.zero3
    assert config.offload.name is Offload.none
    assert config.precision.name is None
    assert make_config() == config


@pytest.mark.parametrize("stage", [3, "3", "zero3", Stage.zero3, {"name": "zero3"}])
def test_every_way_to_write_a_stage(stage: Any) -> None:
    assert make_config(stage=stage).stage.name is Stage.zero3


def test_every_name_that_types_list_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Lightning's names of precisions."""
    monkeypatch.setenv(NVME_PATH, "/b")
    names: dict[str, list[Any]] = {}
    for key, kind in (get_type_hints(keywords.Keywords) | {"stage": keywords.Stage}).items():
        literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal and key != "tensor_plan"]
        names[key] = [name for one in literals for name in get_args(one)]
        assert all(getattr(make_config(**{key: name}), key) is not None for name in names[key])
    of_lightning = {"bf16-mixed", "16-mixed", "32-true", "64-true", "bf16-true", "16-true", 16, 32, "bf16"}
    assert of_lightning < {*names["precision"]}
    assert make_config(precision="bf16-mixed").precision.name is make_config(precision="bf16").precision.name
    assert make_config(precision=16).precision.name is Precision.fp16
    assert make_config(unit=None, precision=None) == ZeroConfig()


@pytest.mark.parametrize(("text", "told"), [
    ("zero.unit.max_bytes: expected a number > 0. Change zero.unit.max_bytes.",
     "unit['max_bytes']: expected a number > 0. Change unit['max_bytes']."),
    ("Choose zero/stage=zero1, zero2 or zero3, or zero/offload=none.",
     "Choose stage='zero1', 'zero2' or 'zero3', or offload='none'."),
    ("expected true or null. Set zero.unit.classes=[A, B], or zero.tensor_parallel=1.",
     "expected True or None. Set unit={'classes': ['A', 'B']}, or tensor_parallel=1."),
    ("Set zero.offload.nvme_path=/a/b.c, or zero.checkpoint.verify=false.",
     "Set offload['nvme_path']='/a/b.c', or checkpoint['verify']=False."),
    ("Set '+zero.tensor_plan={a.*.b: colwise, c: rowwise}'.", "Set tensor_plan={'a.*.b': 'colwise', 'c': 'rowwise'}."),
    ("zero.prefetch: no such setting; got zero.txt of /tmp/zero/stage and light.zero.loss",
     "prefetch: no such setting; got zero.txt of /tmp/zero/stage and light.zero.loss"),
])  # fmt: skip
def test_messages_name_arguments_to_callers_from_python(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error, names_arguments():
        raise ConfigError(text)
    assert str(error.value) == told
    with pytest.raises(ConfigError) as error, names_arguments(ZeroConfig()):  # which an app with Hydra has made
        raise ConfigError(text)
    assert str(error.value) == text


@pytest.mark.parametrize(("settings", "key", "got"), [
    ({"prefetch_bytes": -1}, "zero.prefetch_bytes", "-1"),
    ({"reduce_bucket_bytes": 0}, "zero.reduce_bucket_bytes", "0"),
    ({"optimizer": {"skip_nonfinite": 0}}, "zero.optimizer.skip_nonfinite: expected a number > 0", "got 0"),
    ({"stage": "zero2", "prefetch_bytes": 1}, "zero.prefetch_bytes", "zero2"),
    ({"stage": "zero0", "dynamic_graph": True}, "zero.dynamic_graph", "zero0"),
    ({"precision": "fp8"}, "zero/precision", "fp8"),
    ({"precision": {"name": "fp32", "grad_dtype": "bf16"}}, "zero.precision.grad_dtype", "bf16"),
    ({"precision": {"name": "bf16_true", "grad_dtype": "fp32"}}, "zero.precision.grad_dtype", "fp32"),
    ({"offload": {"name": "cpu", "nvme_path": "/a"}}, "zero.offload.nvme_path", "cpu"),
    ({"offload": {"name": "cpu", "device_budget": 1}}, "zero.offload.device_budget", "cpu"),
    ({"offload": {"name": "none", "host_budget": 1}}, "zero.offload.host_budget", "none"),
    ({"offload": {"name": "nvme", "nvme_path": "/a", "host_budget": 9}}, "zero.offload.host_budget", "nvme"),
    ({"offload": {"name": "nvme", "nvme_path": ""}}, "zero.offload.nvme_path", "nvme"),
    ({"offload": {"name": "cpu", "nvme": "/a"}}, "zero.offload.nvme", "nvme_path"),
    ({"gather_after_fit": "whole"}, "zero.gather_after_fit: expected true or false or null", "'whole'"),
    ({"activation_checkpointing": 1}, "zero.activation_checkpointing: expected one of none, blocks", "1"),
    ({"precision": {"fp32_modules": "LayerNorm"}}, "zero.precision.fp32_modules: expected a list", "'LayerNorm'"),
    ({"unit": "Block"}, "zero.unit: expected a mapping of settings, or UnitConfig", "'Block'"),
    ({"unit": ["Block"]}, "zero.unit: expected a mapping", "Write zero.unit.classes=[Block]."),
    ({"unit": ("Block",)}, "zero.unit: expected a mapping", "Write zero.unit.classes=[Block]."),
    ({"optimizer": "bf16"}, "zero.optimizer: expected a mapping", "Write zero.optimizer.state_dtype=bf16."),
    ({"stage": True}, "zero/stage: expected one of", "True"),
    ({"prefetch_bytes": "1MO"}, "zero.prefetch_bytes: expected a size such as 80GB", "'1MO'"),
    ({"offload": "gpu"}, "zero/offload: expected one of none", "Write zero/offload=none."),
    ({"stage": "ddp"}, "zero/stage: expected one of", "Write zero/stage=zero0."),
    ({"stall_timeout_s": float("nan")}, "zero.stall_timeout_s: expected a number", "nan"),
    ({"dynamic_graph": 1}, "zero.dynamic_graph: expected true or false", "1"),
    ({"unit": {"clases": []}}, "zero.unit.clases", "Write zero.unit.classes."),
])  # fmt: skip
def test_a_bad_value_names_the_key_and_what_it_got(settings: dict[str, Any], key: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(**settings)
    assert key in str(error.value) and got in str(error.value)


def test_bytes_are_taken_with_units() -> None:
    unit, offload = {"max_bytes": "1.5KiB"}, {"name": "cpu", "host_budget": "1 gb"}
    assert make_config(prefetch_bytes=0).prefetch_bytes == 0  # which turns it off
    config = make_config(prefetch_bytes="256MB", reduce_bucket_bytes=1e6, unit=unit, offload=offload)
    assert (config.prefetch_bytes, config.reduce_bucket_bytes) == (256_000_000, 1_000_000)
    assert (config.unit.max_bytes, config.offload.host_budget) == (1536, 10**9)
    found = (config.prefetch_bytes, config.reduce_bucket_bytes, config.unit.max_bytes, config.offload.host_budget)
    assert all(type(value) is int for value in found)


@pytest.mark.parametrize("row", IN_FILES)
def test_files_need_a_folder(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it comes from the environment, else from the setting alone."""
    monkeypatch.delenv(NVME_PATH, raising=False)
    for asked in (row, {"name": row}):
        with pytest.raises(ConfigError, match=f"zero.offload.nvme_path.*{NVME_PATH}"):
            make_config(offload=asked)
    assert make_config(offload={"name": row, "nvme_path": "/a"}).offload.nvme_path == "/a"
    monkeypatch.setenv(NVME_PATH, "/b")
    assert make_config(offload=row).offload == OffloadConfig(name=Offload[row], nvme_path="/b")
    assert make_config(offload={"name": row, "nvme_path": "/a"}).offload.nvme_path == "/a"
    assert make_config(offload="cpu").offload.nvme_path is None
    with pytest.raises(ConfigError, match="zero.offload.nvme_path"):
        make_config(offload={"name": row})


@pytest.mark.parametrize("row", [row.name for row in Offload])
@pytest.mark.parametrize("stage", range(4))
def test_rows_of_offload_and_stages(stage: int, row: str) -> None:
    fits = row == "none" or (stage == 3 if Offload[row].moves_params else stage >= 1)
    settings: dict[str, Any] = {"stage": stage, "offload": {"name": row, "nvme_path": "/a" if "nvme" in row else None}}
    if fits:
        assert make_config(**settings).offload.name is Offload[row]
    else:  # with the way out
        with pytest.raises(ConfigError, match=f"zero/offload={row}[: ].*zero/stage={'zero3' if stage else 'zero1'}"):
            make_config(**settings)


def everything(of: Any, key: str = "zero") -> list[tuple[str, Any, str]]:
    """Every field below ``of``: its key, what holds it, its name."""
    found = []
    for f in fields(of):
        value = getattr(of, f.name)
        found.append((f"{key}.{f.name}", of, f.name))
        found += everything(value, f"{key}.{f.name}") if is_dataclass(value) else []
    return found


@pytest.mark.parametrize("key", [key for key, _, _ in everything(ZeroConfig())])
def test_no_field_takes_what_it_is_not(key: str) -> None:
    holder, name = next((of, name) for found, of, name in everything(ZeroConfig()) if found == key)
    shown = re.escape(key) if not key.endswith(".name") else re.escape(key.removesuffix(".name")).replace(r"\.", "[./]")
    for value in (object(), 2 + 1j, {3: 4}):
        with pytest.raises(ConfigError, match=rf"^{shown}: expected .*, got .*\. Change {shown}\.$"):
            replace(holder, **{name: value})


def test_mappings_paths_and_tuples_become_the_dataclasses(tmp_path: Path) -> None:
    config = make_config(
        init_from=tmp_path,
        unit={"classes": ("Block",), "max_bytes": 8},
        optimizer=MappingProxyType({"state_dtype": "bf16"}),
        precision={"name": "bf16", "reduce_dtype": "bf16"},
    )
    assert config.init_from == str(tmp_path)
    assert config.unit == UnitConfig(classes=["Block"], max_bytes=8)
    assert config.optimizer == OptimizerConfig(state_dtype=StateDtype.bf16)
    assert config.precision == PrecisionConfig(name=Precision.bf16, reduce_dtype=DType.bf16)


def test_settings_go_on_top_of_a_base_and_leave_it_alone() -> None:
    base = make_config(stage="zero3", prefetch_bytes=10)
    config = make_config(base, prefetch_bytes=20)
    assert (config.stage.name, config.prefetch_bytes) == (Stage.zero3, 20)
    assert base.prefetch_bytes == 10


def test_presets_are_those_of_the_design(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        **{f"zero{n}": (f"zero{n}", "none") for n in range(4)},
        "zero1_offload": ("zero1", "optimizer_cpu"),
        "zero2_offload": ("zero2", "optimizer_cpu"),
        "zero3_offload": ("zero3", "cpu"),
        "zero3_offload_optimizer": ("zero3", "optimizer_cpu"),
        "zero3_nvme": ("zero3", "nvme"),
        "zero_auto": ("auto", "auto"),
    }
    ways = (("", "popen"), ("_notebook", "fork"))
    assert {f"{name}{end}": (*row, way) for end, way in ways for name, row in rows.items()} == PRESETS
    monkeypatch.setenv(NVME_PATH, "/b")
    for name, (stage, offload, _) in PRESETS.items():
        config = make_config(stage=stage, offload=offload)
        assert (config.stage.name.name, config.offload.name.name) == (stage, offload)
        assert config.offload.nvme_path == ("/b" if "nvme" in name else None)
