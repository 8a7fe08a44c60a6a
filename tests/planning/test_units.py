"""Which modules are units, and who owns a parameter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_zero.planning.units import choose_units, owner_of
from lightning_zero.settings import ConfigError, UnitConfig
from tests.models import Block, Model


class Hinted(Model):
    _no_split_modules = ("Linear",)


def choose(module: nn.Module, **settings: object) -> list[str]:
    return choose_units(module, UnitConfig(**settings))  # type: ignore[arg-type]


def wide(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(into, out), nn.ReLU(), nn.Linear(out, into))


def under(name: str, part: nn.Module) -> nn.Module:
    model = nn.Module()
    setattr(model, name, part)
    return model


NESTED = ["blocks.0", "blocks.0.up", "blocks.0.down", "head"]
LINEAR = [f"blocks.{number}.{name}" for number in range(3) for name in ("up", "down")]
PARTS = [f"blocks.{number}.{name}" for number in range(3) for name in ("norm", "up", "down")]
CASES: dict[str, tuple[nn.Module, dict[str, Any], list[str]]] = {
    "repeated blocks": (Model(4), {}, ["blocks.0", "blocks.1", "blocks.2"]),
    "of a Sequential": (nn.Sequential(nn.Linear(4, 4), Block(4), Block(4), nn.Linear(4, 4)), {}, ["1", "2"]),
    "a single block": (Model(4, depth=1), {}, []),
    "bare layers": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), {}, []),
    "blocks inside of blocks": (nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2)), {}, ["0", "1"]),
    "class names, before hints": (Hinted(), {"classes": ["Block"]}, ["blocks.0", "blocks.1", "blocks.2"]),
    "class names, nested": (Model(4, depth=1), {"classes": ["Block", "Linear"]}, NESTED),
    "the class of the model itself": (Model(4), {"classes": ["Model"]}, []),
    "large, without blocks": (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), {"max_bytes": 100}, ["0", "1"]),
    "cannot be divided": (nn.Sequential(nn.GRU(128, 256, num_layers=3), nn.Linear(256, 10)), {}, ["0", "1"]),
    "hints of Hugging Face": (Hinted(), {}, [*LINEAR, "head"]),
    "large blocks": (Model(4), {"max_bytes": 100}, PARTS),
    "containers": (under("parts", nn.ModuleDict({"a": nn.Linear(4, 4)})), {"max_bytes": 70}, ["parts.a"]),
    "most in blocks": (nn.Sequential(nn.Embedding(4096, 256), *(Block(512) for _ in range(4))), {}, list("1234")),
    "small": (wide(64, 512), {}, []),
    "without parameters": (nn.ModuleList(nn.Sequential(nn.Flatten(), nn.ReLU()) for _ in range(3)), {}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_units_are_repeated_blocks_or_what_settings_name(case: str) -> None:
    model, settings, expected = CASES[case]
    assert choose(model, **settings) == expected


def test_an_unknown_class_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"zero\.unit\.classes.*'Blok'.*Block"):
        choose(Model(4), classes=["Blok"])


def test_a_model_without_repeated_blocks_is_divided_by_size() -> None:
    """A GAN: two networks of different classes, of which none is a block."""

    class Generator(nn.Sequential):
        pass

    model = nn.Module()
    model.generator = Generator(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784))
    model.critic = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 1))
    assert choose(model) == ["generator.0", "generator.2", "generator.4", "critic.0", "critic.2"]


def test_where_repeated_blocks_are_the_smaller_part_the_rest_is_divided_too() -> None:
    model = nn.Module()
    model.stem = wide(64, 4096)
    model.blocks = nn.ModuleList(Block(4) for _ in range(2))
    model.tower = nn.ModuleDict({"a": wide(64, 8192), "b": wide(64, 8192)})
    assert choose(model) == ["stem.0", "stem.2", "blocks.0", "blocks.1"] + [
        f"tower.{name}.{i}" for name in "ab" for i in (0, 2)
    ]


def test_what_two_modules_share_stays_with_the_root() -> None:
    model = nn.Module()
    model.embed, model.middle, model.head = nn.Embedding(2000, 256), wide(256, 1024), nn.Linear(256, 2000, bias=False)
    assert choose(model) == ["embed", "middle.0", "middle.2", "head"]
    model.head.weight = model.embed.weight
    assert choose(model) == ["middle.0", "middle.2"]


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.lists(paths, min_size=1, max_size=4), st.sets(paths, max_size=5))
def test_owner_is_the_longest_unit_above_all_users(users: list[str], units: set[str]) -> None:
    above = [u for u in units if all(user == u or user.startswith(u + ".") for user in users)]
    assert owner_of(users, units) == max(above, key=len, default="")
