"""Guides of the documentation do what they say: their files are written, their commands run, their outputs appear.

A Python block whose first line is ``# name.py`` is a file; the one of the README is run as a script. A block of plain
text holds lines that the commands of the ``bash`` block before it print; ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_command

GUIDES = ["own_module", "one_gpu", "cli_and_fabric", "teachers", "huggingface"]


@pytest.mark.full
def test_the_first_commands_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().partition("## Get started")[2].partition("## Why")[0]
    text = re.sub(r"^pip install .*\n", "", text, flags=re.MULTILINE).replace("2026-11-29_12-00-00", "...")
    does_what_it_says(re.sub(r"^```python\n", r"\g<0># train.py\n", text, flags=re.MULTILINE), tmp_path)
    run_command("python", "train.py", folder=tmp_path, code=0)
    assert (tmp_path / "whole.ckpt").is_file()


@pytest.mark.full
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_does_what_it_says(name: str, tmp_path: Path) -> None:
    does_what_it_says((ROOT / "docs" / f"{name}.md").read_text(), tmp_path)


def does_what_it_says(text: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("outputs"))
    printed = None
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        file = re.match(r"# (\S+\.(?:py|yaml))\n", block)
        if file is not None:
            path = tmp_path / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        elif kind == "bash":
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
            asked = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
            done = run_command("bash", "-ec", block, folder=tmp_path, code=0, **asked)
            printed = [re.sub(r"[│┃]", " ", line) for line in (done.stdout + done.stderr).splitlines()]
        elif not kind:
            assert printed is not None, block
            for line in block.splitlines():
                expected = re.sub(r"\\ +", r"\\s+", re.escape(line)).replace(r"\.\.\.", ".*")
                assert any(re.search(expected, each) for each in printed), (line, printed)
