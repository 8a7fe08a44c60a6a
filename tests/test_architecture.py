"""The rules of the house, read from the sources."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure import imports_of, modules, name_of, nodes, private_names_of_lightning

LAYERS = ["settings", "planning", "device", "tiers", "ranks", "comm", "sequence", "optimizers"]
LAYERS += ["mesh", "pretrained", "timeline", "engine", "layerwise", "checkpoint", "lightning_api", "trainer", "fabric"]
LAYERS += ["report", "app"]
DOORS = {"train", "plan", "submit", "replay", "env", "__main__"}
# Modules of the root that are no layer of their own; the rest are found by their folder.
TOP_LEVEL = {"settings": "settings", "presets": "settings", "sharding": "layerwise"} | dict.fromkeys(DOORS, "app")
USES_HYDRA = {"app.train", "app.plan", "app.submit", "app.schema", "app.overrides", "app.parts"}
USES_HYDRA |= {"app.sweep", "app.replay", "app.unread", "report.compare"}
MOST_REPLACED = 23  # methods of Lightning's that objects of a run override
BELOW_LIGHTNING = LAYERS[: LAYERS.index("lightning_api")]
# What the main job trains. Layers do not import it.
MAIN_JOB = {"models", "data"}
COLLECTIVES = re.compile(
    r"^(all_gather|all_reduce|reduce_scatter|all_to_all|broadcast|scatter|gather|reduce|send|recv|isend|irecv|barrier"
    r"|monitored_barrier|new_group|batch_isend_irecv)(_.*)?$"
)


def layer_of(name: str) -> str | None:
    first = name.split(".")[0]
    if first in TOP_LEVEL:
        return TOP_LEVEL[first]
    return first if first in LAYERS else None


def calls_of(path: Path) -> Iterator[tuple[str, str]]:
    """Calls as (what it is called on, name)."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr


def in_layer(*layers: str) -> list[Path]:
    return [p for p in modules() if layer_of(name_of(p)) in layers]


def test_every_module_has_a_place_in_the_house() -> None:
    for path in modules():
        name = name_of(path)
        assert layer_of(name) or name in ("", "__init__") or name.split(".")[0] in MAIN_JOB, f"which layer is {name}?"


def test_a_folder_says_where_to_look() -> None:
    for path in [m for m in modules() if m.stem == "__init__" and layer_of(name_of(m))]:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        inside = [p.stem for p in path.parent.glob("*.py")] + [p.parent.name for p in path.parent.glob("*/__init__.py")]
        for name in inside:
            assert name == "__init__" or re.search(rf"\b{name}\b", text), f"{name_of(path)}: {name}?"


def test_imports_run_one_way() -> None:
    for path in modules():
        own = layer_of(name_of(path))
        for imported in imports_package(path, "lightning_zero") if own else []:
            if imported == "lightning_zero":
                continue
            other = layer_of(imported.removeprefix("lightning_zero."))
            assert other is not None or own == "app", f"{imported} is no layer"
            if other is not None:
                assert LAYERS.index(other) <= LAYERS.index(own), f"{own} imports {imported}"


def test_files_below_the_strategy_import_one_way() -> None:
    files = {name_of(path): path for path in in_layer(*BELOW_LIGHTNING) if path.stem != "__init__"}
    imported = {name: {i.removeprefix("lightning_zero.") for i in imports_of(files[name])} for name in files}
    graphlib.TopologicalSorter({name: found & files.keys() for name, found in imported.items()}).prepare()


def imports_package(path: Path, *packages: str) -> list[str]:
    return [i for i in imports_of(path) if any(i == p or i.startswith(p + ".") for p in packages)]


def test_layers_below_the_strategy_know_no_lightning() -> None:
    for path in in_layer(*BELOW_LIGHTNING):
        assert not imports_package(path, "lightning", "pytorch_lightning", "lightning_zero.lightning_api")


def test_private_names_of_lightning_are_taken_by_one_file() -> None:
    for path in modules():
        imported = [name for name in imports_package(path, "lightning") if name.rpartition(".")[2].startswith("_")]
        assert not imported
        assert not private_names_of_lightning(path) or name_of(path) == "lightning_api"


def test_methods_of_lightning_that_are_overridden_for_a_run_are_listed() -> None:
    from lightning_zero.trainer import adapted
    from lightning_zero.trainer.loops import ADAPTED

    listed = re.sub(r"\s+", " ", adapted.__doc__ or "")
    found = [
        (ours.__base__.__name__, name)
        for ours in ADAPTED
        for name in vars(ours)
        if not name.startswith("__") and hasattr(ours.__base__, name)
    ]
    assert 0 < len(found) <= MOST_REPLACED
    for theirs, name in found:
        assert re.search(rf"\b{theirs}\b[^:]*\b{name}\b", listed), f"trainer/adapted.py: {theirs}.{name}?"


def test_classes_of_lightning_stay_as_they_are() -> None:
    from lightning_zero.trainer.loops import ADAPTED

    for ours in ADAPTED:
        assert len(ours.__bases__) == 1
        methods = [value for value in vars(ours.__bases__[0]).values() if inspect.isfunction(value)]
        assert methods and all("lightning_zero" not in method.__code__.co_filename for method in methods)


def test_only_entry_points_know_hydra_and_planning_no_process_group() -> None:
    assert not [path for path in in_layer("settings", "planning") if "torch.distributed" in path.read_text()]
    for path in modules():
        if name_of(path) not in USES_HYDRA:
            assert not imports_package(path, "hydra", "omegaconf")


def test_one_folder_calls_collectives() -> None:
    for path in in_layer(*BELOW_LIGHTNING):
        if name_of(path).startswith("comm."):
            continue
        for target, name in calls_of(path):
            if target in ("dist", "torch.distributed"):
                assert not COLLECTIVES.match(name), f"{target}.{name}: only comm/ calls collectives"
        for imported in imports_package(path, "torch.distributed"):
            assert not COLLECTIVES.match(imported.rpartition(".")[2]), imported


# Modules that can run code which is in bytes from elsewhere, and what the files that import them do with them.
UNPICKLES = re.compile(
    r"((_|c)?[pP]ickle|cloudpickle|dill|marshal|shelve|joblib|jsonpickle|yaml|(torch\.)?multiprocessing|torch\.(package|hub))"
    r"\b.*|torch\.distributed\.\w+_object(_list)?|torch\.load"
)
USES_PICKLE = {
    "checkpoint.archive": "writes: torch.save takes its Pickler",
    "checkpoint.sharded.index": "writes DCP's index, and makes the classes of such an index, without running anything",
    "trainer.saves.checkpoint_io": "has the name of an exception; weights_only of torch.load is the user's word",
    "trainer.saves.sharded_checkpoints": "has the name of an exception",
    "checkpoint.sharded.read": "weights_only of torch.load is the user's word",
    "trainer.launchers": "forks; Lightning gets the result of a child from a queue that only the two have",
    "ranks.watchdog": "has a function called when a process of multiprocessing ends",
    "trainer.saves.held": "copies objects of this process, by bytes that never leave its memory",
    "app.check": "a child takes its arguments from its parent, by a pipe",
}


def test_nothing_from_elsewhere_is_unpickled() -> None:
    """Neither from a store, nor a file, nor a socket: a pickle runs what is in it."""
    for path in modules():
        used = [name for name in imports_of(path) if UNPICKLES.fullmatch(name)]
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Call):
                called = re.sub(r"^dist\.", "torch.distributed.", ast.unparse(node.func))
                settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                unsafe = UNPICKLES.fullmatch(called) and settings.get("weights_only") != "True"
                if unsafe or called in ("eval", "exec") or settings.get("allow_pickle", "False") != "False":
                    used.append(called)
        assert bool(used) == (name_of(path) in USES_PICKLE), f"{name_of(path)}: {used}"


def test_one_file_calls_cuda() -> None:
    """So that a test can put another accelerator in its place."""
    for path in modules():
        if name_of(path) == "device.cuda":
            continue
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Attribute):
                assert not re.match(r"torch\.(cuda|cpu|accelerator)\b", ast.unparse(node)), ast.unparse(node)
                assert node.attr not in {"is_cuda", "pin_memory", "record_stream"}, ast.unparse(node)
        assert not imports_package(path, "torch.cuda")


def test_each_note_is_written_once_and_named_elsewhere() -> None:
    text = "\n".join(path.read_text() for path in modules())
    written, named = re.findall(r"^\[Note: (.+)\]$", text, re.MULTILINE), re.findall(r"\[Note: ([^\]]+)\]", text)
    assert len(written) == len(set(written)) and set(named) == set(written) and min(map(named.count, written)) > 1


def test_the_engine_asks_for_placements_and_not_for_stages() -> None:
    for path in in_layer("engine"):
        source = path.read_text()
        code = ast.unparse(ast.parse(source))
        assert not re.search(r"Stage\.zero\d|['\"]zero[0-3]['\"]", code)
        for node in nodes(source):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not re.search(r"\bstage\b", text), f"{name_of(path)} asks: {text}"


def test_the_rules_find_what_breaks_them(tmp_path: Path) -> None:
    """The checks above look for something: each finds its own example."""
    example = tmp_path / "example.py"
    example.write_text(
        "import hydra.core\nfrom lightning.pytorch import Trainer\nimport torch.distributed as dist\n"
        "dist.all_reduce(x)\n"
    )
    assert imports_package(example, "hydra") and imports_package(example, "lightning")
    calls = list(calls_of(example))
    assert COLLECTIVES.match(calls[0][1]) and calls[0][0] == "dist"
    assert layer_of("engine.units.unit") == "engine" and layer_of("train") == "app"
