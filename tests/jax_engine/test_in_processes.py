"""Start the other test files of this folder, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax_engine.conftest import INSIDE

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[1]
_NONE_CHOSEN = 5


@pytest.mark.parametrize("file", sorted(path.name for path in _FOLDER.glob("test_*.py") if path != Path(__file__)))
def test_file(file: str, request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    chosen = request.config.getoption("markexpr")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", chosen]
    command = [sys.executable, "-m", "pytest", *options, str(_FOLDER / file)]
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    environment = {**os.environ, INSIDE: "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == _NONE_CHOSEN:
        pytest.skip("all tests of this file are marked full")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
