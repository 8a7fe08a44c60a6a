"""Makes from the code what the documentation repeats of it; MkDocs calls it as a hook.

``python docs/made.py`` writes the types of keywords into ``lightning_zero/settings/keywords.py``, and ``python
docs/made.py settings`` prints the table of settings. ``mkdocs build`` puts this table into ``docs/settings.md``, and
adds the pages that are kept outside of ``docs/`` and a page of the public names.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `mkdocs`, which does not look into the current folder

import lightning_zero  # noqa: E402
from lightning_zero.settings import MIB, ZeroConfig  # noqa: E402
from lightning_zero.settings.names import ALSO, CONF, ROWS, NBytes, kinds_of  # noqa: E402  # noqa: E402

BEGIN, END = "<!-- settings -->", "<!-- end -->"  # around what the site replaces with the table of settings
# Pages of the site that are kept outside of docs/, by their name there.
OTHERS = {
    "index.md": "README.md",
    "images.md": "docker/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
API = "api.md"
# Where more is said about a setting, by the beginning of its name.
MORE = {
    "zero.fingerprint": "monitoring.md#fingerprints-and-replaying-steps",
    "zero.uneven": "lightning.md",
    "zero.loss": "parameters.md#a-mean-over-all-tokens",
    "zero/stage": "#groups",
    "zero/offload": "offload.md",
    "zero.offload": "offload.md#the-folder-for-files",
    "zero.hybrid_shard": "communication.md#nodes",
    "zero/checkpoint": "checkpoints.md",
    "zero.checkpoint.background": "checkpoints.md#in-the-background",
    "zero.optimizer.sharding": "optimizers.md",
    "zero.optimizer.state_dtype": "offload.md#state-in-bf16",
    "zero/compile": "#torchcompile",
    "zero.timeline": "monitoring.md#timeline",
    "zero.init_from": "checkpoints.md#hugging-face",
    "zero.gather_after_fit": "parameters.md#after-a-run",
    "zero.sequence_parallel": "long_sequences.md",
}


def meanings(config: Any) -> dict[str, str]:
    """Return what the docstring of a dataclass says about each attribute."""
    _, _, attributes = inspect.cleandoc(type(config).__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`").replace("`None`", "`null`") for name, text in found}


def settings(config: Any, path: str = "zero") -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of each setting in a dataclass, with those of its groups behind its own."""
    said, groups = meanings(config), []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            groups.append((value, f"{path}.{field.name}"))
        else:
            name = "/".join(path.rsplit(".", 1)) if field.name == "name" else f"{path}.{field.name}"
            yield name, _shown(value), said[field.name]
    for value, inner in groups:
        yield from settings(value, inner)


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"`{value.name}`"
    if isinstance(value, int) and not isinstance(value, bool) and value >= MIB:
        return f"{value // MIB} MiB"
    words = {None: "`null`", True: "`true`", False: "`false`"}
    if isinstance(value, list | dict | float):
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`".replace("'", "")
    return words.get(value, f"`{value}`") if isinstance(value, bool | None) else f"`{value}`"


def settings_table() -> str:
    """Return the rows of all settings of ``zero``."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, default, meaning in settings(ZeroConfig()):
        page = next((page for start, page in reversed(MORE.items()) if name.startswith(start)), None)
        shown = f"[`{name}`]({page})" if page else f"`{name}`"
        lines.append(f"| {shown} | {default} | {meaning[0].upper()}{meaning[1:]} |".replace("  ", " "))
    return "\n".join(lines)


def with_made(page: str) -> str:
    """Return ``docs/settings.md`` with the table in place of the words that say how to see it."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in docs/settings.md")
    return f"{head}{settings_table()}{tail}"


# -- lightning_zero/settings/keywords.py ----------------------------------------------------------------------------

KEYWORDS = ROOT / "lightning_zero" / "settings" / "keywords.py"
HEAD = '''"""The types of the keywords of ZeroStrategy, made from the dataclasses by ``python docs/made.py``."""

# fmt: off
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from lightning_zero.settings import groups, zero_config
'''


def keywords() -> str:
    """Return the module of the keywords' types: one for each group, for all stages, and for the rest."""
    kinds = dict(kinds_of(ZeroConfig))
    groups = {key: kind for key, kind in kinds.items() if dataclasses.is_dataclass(kind)}
    parts = [_typed_dict(_settings_of(kind), kinds_of(kind), key) for key, kind in groups.items()]
    for key in ("stage", "precision"):  # which a signature may name
        parts += [_filled(f"{key.title()} = {_type_of(key, kinds.pop(key))}") + "\n"]
    parts += [_typed_dict("FabricKeywords", kinds)]
    parts += ["class Keywords(FabricKeywords, total=False):\n    precision: Precision\n"]
    documented = [f"({_settings_of(kind)}, groups.{kind.__name__})" for kind in groups.values()]
    documented += [f"({name}, zero_config.ZeroConfig)" for name in ("FabricKeywords", "Keywords")]
    pairs = "".join(f"    {pair},\n" for pair in documented)
    parts += [f"_DOCUMENTED: list[tuple[Any, Any]] = [\n{pairs}]\n"]
    parts[-1] += "for _made, _config in _DOCUMENTED:\n    _made.__doc__ = _config.__doc__\n"
    return "\n\n".join([HEAD, *parts])


def _typed_dict(name: str, kinds: dict[str, Any], group: str = "") -> str:
    types = {key: _names(group) if key == "name" else _type_of(key, kind) for key, kind in kinds.items()}
    fields = "\n".join(_filled(f"    {key}: {kind}") for key, kind in types.items())
    return f"class {name}(TypedDict, total=False):\n{fields}\n"


def _settings_of(kind: type) -> str:
    return kind.__name__.replace("Config", "Settings")


def _type_of(key: str, kind: Any) -> str:
    """Return the type of what callers may write for the setting ``key`` of type ``kind``."""
    if NoneType in get_args(kind):
        (kind,) = (inner for inner in get_args(kind) if inner is not NoneType)
        return f"{_type_of(key, kind)} | None"
    if dataclasses.is_dataclass(kind):
        files = sorted(path.stem for path in (CONF / "zero" / key).glob("*.yaml"))
        names = f"{_names(key, *files)} | " if key in ROWS else ""
        return f"{names}{_settings_of(kind)} | groups.{kind.__name__} | None"
    if isinstance(kind, enum.EnumType):
        return f"Literal[{', '.join(map(repr, kind.__members__))}]"
    if get_origin(kind) is dict:
        return f"Mapping[str, {_type_of('', get_args(kind)[1])}]"
    if get_origin(kind) is list:
        return f"Sequence[{get_args(kind)[0].__name__}]"
    simple = {NBytes: "int | str", str: "str | Path", Any: "Any"}
    return simple.get(kind) or kind.__name__


def _names(group: str, *more: str) -> str:
    """Return the Literal of the names of ``zero/<group>``, with ``more``, and with other names that are taken."""
    words = [*ROWS[group].__members__, *more, *(int(w) if w.isdigit() else w for w in ALSO.get(group, {}))]
    return f"Literal[{', '.join(map(repr, dict.fromkeys(words)))}]"


def _filled(line: str) -> str:
    """Return ``line``, ``name: type``, in several lines if it is long."""
    line = line.replace("'", '"')
    if len(line) <= 120:
        return line
    name, sign, kind = re.split(r"( = |: )", line, maxsplit=1)
    inner = textwrap.fill(kind, 112, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    return f"{name}{sign}(\n{inner}\n    )"


# -- API --------------------------------------------------------------------------------------------------------------

MEMBERS = {"ZeroStrategy": ("export", "restage")}  # whose methods users call


def api() -> str:
    """Return the page of the public names, from their signatures and docstrings."""
    lines = [
        "# API",
        "",
        "What `import lightning_zero` offers. [Groups and settings](settings.md) describes the settings.",
        "",
    ]
    for name in lightning_zero.__all__[1:]:
        thing = getattr(lightning_zero, name)
        lines += _entry(f"## {name}", name, thing)
        for member in MEMBERS.get(name, ()):
            lines += _entry(f"### {name}.{member}", member, getattr(thing, member))
    return "\n".join(lines)


def _entry(heading: str, name: str, thing: Any) -> list[str]:
    parameters = dict(inspect.signature(thing).parameters)
    parameters.pop("self", None)
    if name in ("ZeroStrategy", "ZeroFabricStrategy"):  # whose keywords are those of ZeroConfig
        named = set(parameters) - {field.name for field in dataclasses.fields(ZeroConfig)} | {"stage", "precision"}
        parameters = {key: parameter for key, parameter in parameters.items() if key in named}
        parameters["settings"] = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters.values()]
    shown = str(inspect.Signature(plain)).replace("<factory>", "...")
    shown = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", shown)
    signature = textwrap.fill(f"{name}{shown}", 100, subsequent_indent="    ", break_long_words=False)
    return [heading, "", "```python", signature, "```", "", _markdown(inspect.getdoc(thing) or ""), ""]


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: its sections as lists, its roles and literals as code."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("`None`", "None")
    text = re.sub(r"^(Args|Attributes|Raises):\n", r"**\1**\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"^        (?=\S)", "    ", text, flags=re.MULTILINE)


# -- hooks of MkDocs ----------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are kept outside of ``docs/``."""
    from mkdocs.structure.files import File

    for name, source in OTHERS.items():
        files.append(File.generated(config, name, content=_moved((ROOT / source).read_text(), source)))
    files.append(File.generated(config, API, content=api()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the table of settings, and turn links to files outside of ``docs/`` into links to their pages."""
    name = page.file.src_uri
    if name == "settings.md":
        markdown, page.meta["search"] = with_made(markdown), {"boost": 2}
    return markdown if name in {*OTHERS, API} else _moved(markdown, f"docs/{name}")


def _moved(text: str, source: str) -> str:
    """Rewrite the links of a file of the repository for the site, whose pages are all in one folder. A link whose text
    is the name of a file gets the title of that page."""
    pages = {file: name for name, file in OTHERS.items()}

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if file not in pages and not file.startswith("docs/"):
            return match[1]  # a file that is no page: its name alone
        named = match[1] in (file, posixpath.basename(file))  # a link to a page by its file's name
        title = re.search(r"^# (.+)$", (ROOT / file).read_text(), re.MULTILINE) if named else None
        words = title[1] if title else match[1]
        return f"[{words}]({pages.get(file, file.removeprefix('docs/'))}{anchor and '#' + anchor})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)


if __name__ == "__main__":
    if sys.argv[1:] == ["settings"]:
        print(settings_table())
    else:
        KEYWORDS.write_text(keywords())
