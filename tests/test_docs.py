"""What the documentation names is there: settings, files of groups, objects, examples, links, and messages."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_module
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from omegaconf import OmegaConf
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lightning_zero
from lightning_zero.app.schema import register_schema
from lightning_zero.presets import PRESETS
from lightning_zero.settings import ZeroConfig
from lightning_zero.settings.zero_config import as_arguments
from tests.harness import ROOT, run_command
from tests.structure import count_keys, modules, nodes

CONF = ROOT / "lightning_zero" / "conf"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = {f.parent.relative_to(CONF).as_posix() for f in CONF.rglob("*.yaml")} - {"."}
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@functools.cache
def settings() -> frozenset[str]:
    """Every setting, with dots, of a run, a plan and a submission."""
    register_schema()
    found: set[str] = set()

    def walk(node: object, path: str) -> None:
        for key, inner in node.items() if isinstance(node, dict) else ():
            found.add(f"{path}{key}")
            walk(inner, f"{path}{key}.")

    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        others = (["callbacks=early_stopping", "logger=many"], ["model=hf"], ["model=llama"], ["data=dataset"])
        for job in (*map(compose, ("train", "plan", "submit")), *(compose("train", other) for other in others)):
            walk(OmegaConf.to_container(job, resolve=False), "")
    return frozenset(found)


@by_page
def test_settings_are_there(page: Path) -> None:
    roots = "|".join(sorted({name.split(".")[0] for name in settings() if "." in name}))
    set_as_code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    named = {m for code in set_as_code for m in re.findall(rf"(?<![\w./`@])\+?((?:{roots})(?:\.[a-z_]\w*)+)", code)}
    mine = {n for n in named if n.startswith(("zero.", "cluster.", "machine.", "data.", "trainer."))}
    assert {n for n in mine if n != "zero.x" and not _is_object(n)} <= settings()


def _is_object(name: str) -> bool:
    """``trainer.save_checkpoint`` and the like: attributes of Python objects, not settings."""
    first, attribute = name.split(".")[:2]
    return first == "trainer" and (attribute == "should_stop" or hasattr(Trainer, attribute))


@by_page
def test_files_of_groups_are_there(page: Path) -> None:
    text = page.read_text()
    for group, value in re.findall(r"(?<![\w/.])((?:zero/)?[a-z_]+)=([a-z][a-z0-9_]*)\b(?![\w.(/'\"])", text):
        if group in GROUPS and not re.search(rf"got {group}={value}", text):
            assert (CONF / group / f"{value}.yaml").is_file(), f"{page.name}: {group}={value}"


@by_page
def test_objects_and_commands_are_there(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\blightning_zero\.(\w+)\(|`lightning_zero\.([A-Z]\w+)`", text):
        name = "".join(name)
        assert hasattr(lightning_zero, name), f"{page.name}: lightning_zero.{name}"
    for name in set(re.findall(r"python -m (lightning_zero[\w.]*)", text)):
        spec = importlib.util.find_spec(name)
        assert spec is not None and (
            spec.submodule_search_locations is None or importlib.util.find_spec(f"{name}.__main__")
        )
    for name in set(re.findall(r"`(zero\d\w*)`", text)):
        assert name in PRESETS or (CONF / "zero" / "stage" / f"{name}.yaml").is_file() or "notebook" in name, name
    for file in set(re.findall(r"`((?:examples|docs|lightning_zero|tests|benchmarks)/[\w/.]+\.\w+)`", text)):
        assert (ROOT / file).is_file(), f"{page.name}: {file}"


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower())
        found.add(plain.replace(" ", "-"))
    return found


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of Hydra in a page's shell blocks: which one, and its overrides."""
    for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").replace("$run", "outputs/run").splitlines():
            words = [word.removeprefix("ARGS=") for word in shlex.split(line, comments=True)]
            names = [word.removeprefix("lightning_zero.") for word in words]
            if "..." not in words and (
                found := [n for n, name in enumerate(names) if name in ("train", "plan", "submit")]
            ):
                own = words[: words.index("--")] if "--" in words else words
                yield (
                    names[found[0]],
                    [word for word in own[found[0] + 1 :] if not word.startswith("--") and "=" in word],
                )


@by_page
def test_commands_compose(page: Path) -> None:
    register_schema()
    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        for job, overrides in commands(page):
            if "hparams_search=optuna" not in overrides:  # whose package is not there
                compose(job, [re.sub(r"=([\w.-]+),[\w.,-]+$", r"=\1", override) for override in overrides])


# -- the site, and what is made from the code ----------------------------------------------------------------------


@functools.cache
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs" / "made.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mappings_for_the_command_line_are_as_hydra_reads_them() -> None:
    register_schema()
    files = [*PAGES, *(ROOT / "lightning_zero").rglob("*.py")]
    found = [each for file in files for each in re.findall(r"'(\+?zero\.[\w.]+=\{[^'\n]*)'", file.read_text())]
    assert len(found) >= 2
    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        for override in found:
            assert compose("train", [override]).zero.tensor_plan


def test_the_table_of_settings_is_that_of_the_code() -> None:
    page = made().with_made((ROOT / "docs" / "settings.md").read_text())
    assert made().settings_table() in page and "made.py" not in page, "markers around what the table replaces"
    rows = re.findall(r"^\| \[?`(zero[./][\w.]+)`", made().settings_table(), re.MULTILINE)
    assert len(rows) == len(set(rows)) == count_keys(ZeroConfig())


def test_types_of_keywords_are_those_of_the_code() -> None:
    assert made().keywords() == made().KEYWORDS.read_text(), "python docs/made.py writes it"


def raised(node: ast.AST) -> Iterator[str]:
    """The message of a ``raise`` whose exception is made of a text; ``...`` for what is filled in."""
    call = node.exc if isinstance(node, ast.Raise) else None
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(first, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in first.values)
    elif isinstance(first, ast.Constant) and isinstance(first.value, str) and " " in first.value:
        yield first.value


def test_every_message_can_name_arguments() -> None:
    """No setting is left as Hydra writes it, and what names arguments stays as it is."""
    told = [as_arguments(text) for path in modules() for node in nodes(path.read_text()) for text in raised(node)]
    assert len(told) > 300
    for text in (each for each in told if "this Hydra app" not in each):
        assert not re.search(r"(?<![\w/])zero[./][a-z]", text) and as_arguments(text) == text


def test_the_page_of_the_api_has_all_public_names() -> None:
    page = made().api()
    assert all(f"\n## {name}\n" in page for name in lightning_zero.__all__[1:])
    assert "- `every_n_steps`: optimizer steps between two logs" in page and ":class:" not in page


@pytest.mark.full
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    run_command(
        "python", "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "--site-dir", tmp_path, code=0
    )
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert {"index.html", "images.html", "api.html"} <= set(pages)
    assert pages["settings.html"].count("<tr>") > count_keys(ZeroConfig()), "the table of settings"
    for name, text in pages.items():
        assert not re.search(r"<a [^>]*>[\w/]+\.md</a>", text), f"{name} shows the name of a file for a link"
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^ \">]+)", text)
        assert not loaded, f"{name} loads {loaded}"
    # Search in pages that are opened from a folder.
    assert '<script src="iframe-worker.js">' in pages["index.html"] and (tmp_path / "iframe-worker.js").is_file()
    assert "nvme_path" in (tmp_path / "search" / "search_index.js").read_text()


def test_every_argument_of_others_is_answered() -> None:
    fsdp = (FSDPStrategy.__init__, ModelParallelStrategy.__init__, FullyShardedDataParallel.__init__, fully_shard)
    for other, calls in {"fsdp": fsdp, "deepspeed": (DeepSpeedStrategy.__init__,)}.items():
        page = (ROOT / "docs" / f"from_{other}.md").read_text()
        names = {name for call in calls for name in inspect.signature(call).parameters} - {"self"}
        assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


# -- messages -----------------------------------------------------------------------------------------------------

OF_OTHERS = (  # messages that are not ours
    "CUDA out of memory",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
    "Could not override",
    "Error merging override",
    "Could not find",
    "You selected an invalid strategy name",
    "must have the same dtype",
    "expected dtype float for",
    "not implemented for 'BFloat16'",
)


@functools.cache
def said() -> str:
    """All texts of the package, each in a line; what is filled in is ``...``."""
    found = []
    for path in modules():
        tree = ast.parse(path.read_text())
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                found.append(node.value)
    return "\n".join(found)


def test_messages_of_troubleshooting_are_those_of_the_package() -> None:
    headings = re.findall(r"^### (.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 25
    for heading in headings:
        for message in re.findall(r"`([^`]+)`", heading):
            if message in OF_OTHERS:
                continue
            pieces = [p.strip() for p in message.split("...") if len(p.strip(" :,.")) > 3]
            assert pieces and all(piece in said() for piece in pieces), message
