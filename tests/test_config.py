"""The dataclasses: values are checked at the door, and every way of writing a setting gives the same object."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.config import (
    CommConfig,
    ConfigError,
    DType,
    Offload,
    Precision,
    PrecisionConfig,
    Stage,
    Transport,
    UnitConfig,
    ZeroConfig,
    choose,
    make_config,
)
from lightning_zero.presets import PRESETS, preset_config


def test_defaults_are_stage_3_on_the_device() -> None:
    config = ZeroConfig()
    assert config.stage.name is Stage.zero3
    assert config.offload.name is Offload.none
    assert config.precision.name is None
    assert make_config() == config


@pytest.mark.parametrize("stage", [3, "3", "zero3", Stage.zero3, {"name": "zero3"}])
def test_every_way_to_write_a_stage(stage: Any) -> None:
    assert make_config(stage=stage).stage.name is Stage.zero3


@pytest.mark.parametrize(
    ("settings", "key", "got"),
    [
        ({"prefetch_bytes": -1}, "zero.prefetch_bytes", "-1"),
        ({"keep_gathered_bytes": -5}, "zero.keep_gathered_bytes", "-5"),
        ({"reduce_bucket_bytes": 0}, "zero.reduce_bucket_bytes", "0"),
        ({"stall_timeout_s": 0}, "zero.stall_timeout_s", "0"),
        ({"unit": {"max_bytes": 0}}, "zero.unit.max_bytes", "0"),
        ({"unit": {"min_bytes": 9, "max_bytes": 8}}, "zero.unit.min_bytes", "9"),
        ({"stage": "zero2", "keep_gathered_bytes": 1}, "zero.keep_gathered_bytes", "zero2"),
        ({"stage": "zero0", "dynamic": True}, "zero.dynamic", "zero0"),
        ({"stage": "zero4"}, "zero/stage", "zero4"),
        ({"stage": 7}, "zero/stage", "7"),
        ({"precision": "fp64"}, "zero/precision", "fp64"),
        ({"offload": "disk"}, "zero/offload", "disk"),
        ({"comm": {"transport": "pigeon"}}, "zero.comm.transport", "pigeon"),
        ({"precision": {"name": "fp32", "grad_dtype": "bf16"}}, "zero.precision.grad_dtype", "bf16"),
        ({"precision": {"name": "fp32", "reduce_dtype": "bf16"}}, "zero.precision.reduce_dtype", "bf16"),
        ({"precision": {"name": "bf16_true", "grad_dtype": "fp32"}}, "zero.precision.grad_dtype", "fp32"),
        ({"precision": {"reduce_dtype": "int8"}}, "zero.precision.reduce_dtype", "int8"),
        ({"prefetch_byte": 1}, "zero.prefetch_byte", "prefetch_bytes"),
        ({"unit": {"clases": []}}, "zero.unit.clases", "classes"),
    ],
)
def test_a_bad_value_names_the_key_and_what_it_got(settings: dict[str, Any], key: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(**settings)
    assert key in str(error.value)
    assert got in str(error.value)


def test_zero_turns_prefetching_off() -> None:
    assert make_config(prefetch_bytes=0).prefetch_bytes == 0


@pytest.mark.parametrize(("group", "row"), [("offload", "cpu"), ("offload", "nvme"), ("precision", "fp16")])
def test_a_planned_row_is_not_a_typo(group: str, row: str) -> None:
    with pytest.raises(ConfigError, match="not part of this release") as planned:
        choose(group, row)
    assert row in str(planned.value)
    with pytest.raises(ConfigError) as typo:
        choose(group, "zzz")
    assert "not part of this release" not in str(typo.value)


def test_mappings_become_the_dataclasses() -> None:
    config = make_config(
        unit={"classes": ["Block"], "min_bytes": 8},
        comm={"transport": "direct"},
        precision={"name": "bf16", "reduce_dtype": "bf16"},
    )
    assert config.unit == UnitConfig(classes=["Block"], min_bytes=8)
    assert config.comm == CommConfig(transport=Transport.direct)
    assert config.precision == PrecisionConfig(name=Precision.bf16, reduce_dtype=DType.bf16)


def test_settings_go_on_top_of_a_base_and_leave_it_alone() -> None:
    base = make_config(stage="zero2", prefetch_bytes=10)
    config = make_config(base, prefetch_bytes=20)
    assert (config.stage.name, config.prefetch_bytes) == (Stage.zero2, 20)
    assert base.prefetch_bytes == 10


def test_two_configs_share_no_lists() -> None:
    first, second = ZeroConfig(), ZeroConfig()
    first.unit.classes.append("Block")
    assert second.unit.classes == []


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_build_or_say_that_they_are_not_there_yet(name: str) -> None:
    row = PRESETS[name]
    if row.offload == "none":
        assert preset_config(name) == make_config(stage=row.stage)
    else:
        with pytest.raises(ConfigError, match=f"zero/offload={row.offload} is not part of this release"):
            preset_config(name)


@given(st.text())
def test_no_text_is_taken_for_a_stage_by_accident(text: str) -> None:
    if text in Stage.__members__ or text in {"0", "1", "2", "3"}:
        assert choose("stage", text).name in Stage.__members__
    else:
        with pytest.raises(ConfigError):
            choose("stage", text)


@given(st.integers(), st.integers())
def test_unit_bounds(low: int, high: int) -> None:
    if low >= 0 and high > 0 and low <= high:
        assert UnitConfig(min_bytes=low, max_bytes=high).min_bytes == low
    else:
        with pytest.raises(ConfigError):
            UnitConfig(min_bytes=low, max_bytes=high)


def test_every_setting_is_documented() -> None:
    undocumented = []

    def walk(cls: type) -> None:
        text = (cls.__doc__ or "").partition("Attributes:")[2]
        for f in fields(cls):
            value = f.default_factory() if callable(f.default_factory) else f.default
            if is_dataclass(value):
                walk(type(value))
            elif f"{f.name}:" not in text:
                undocumented.append(f"{cls.__name__}.{f.name}")

    walk(ZeroConfig)
    assert not undocumented
