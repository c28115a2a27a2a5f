"""Systems other than Linux: no calls that macOS lacks, and Windows refused. Extras and container files are current."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft import env

ROOT = Path(__file__).parents[1]
#: Imported by Python when it starts.
WITHOUT = """
import os, select, mmap
for module, names in (
    (os, ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "posix_fallocate")),
    (select, ("epoll",)),
    (mmap, ("MADV_HUGEPAGE",)),
):
    for name in names:
        vars(module).pop(name, None)
"""


@pytest.mark.full
def test_two_ranks_train_without_the_calls_that_macos_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "data.txt").write_text("some words to train on\n" * 200)
    settings = ("data.train=data.txt", "train.steps=2", "launch.ranks=2", "plan.dp_shard=2", "plan.zero=3")
    paths = f"{ROOT / 'src'}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "weft", "train", *settings],
        cwd=tmp_path,
        env=env.child_env(WEFT_HOME=str(tmp_path), OMP_NUM_THREADS="1", PYTHONPATH=paths),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "no memfd_create" in done.stdout + done.stderr


def test_windows_is_refused():
    code = "import sys; sys.platform = 'win32'; import weft"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ImportError: Weft runs on Linux and macOS. On Windows, install it in WSL 2."


def test_every_extra_is_listed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/start/install.md").read_text().partition("## Extras")[2].partition("## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(extras)


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_have_what_the_package_is_built_from(name):
    lines = (ROOT / "docker" / name).read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == kept
    assert all((ROOT / one).exists() for one in kept)
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    assert not [line for line in lines if line.startswith("FROM") and ":" not in line]


def test_the_dev_container_calls_an_existing_target():
    command = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"]
    assert command.removeprefix("make .venv/") == ".ready-to-develop"
    assert "$(VENV)/.ready-to-develop:" in (ROOT / "Makefile").read_text()
