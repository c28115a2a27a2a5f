"""The script of docs/how-to/ragged.md runs as pasted, with equal results on two ranks, and its commands succeed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.test_examples import run
from weft.cli.app import run as weft

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "ragged.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.full
def test_page_script_gives_the_same_on_two_ranks(tmp_path):
    script = tmp_path / "finetune.py"
    script.write_text(blocks("python")[0])
    alone = run(str(script), home=tmp_path)
    assert re.fullmatch(r"loss \d\.\d{4}\n", alone)
    assert run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), home=tmp_path) == alone


@pytest.fixture
def pasted(tmp_path, monkeypatch):
    """Write all blocks to one file in the current folder, and unload it after the test."""
    (tmp_path / "finetune.py").write_text("\n\n".join(blocks("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("finetune", None)


@pytest.mark.full
@pytest.mark.parametrize("command", blocks("sh"))
def test_page_commands_succeed(command, pasted, capsys):
    assert weft(shlex.split(command)[1:]) == 0, capsys.readouterr()
