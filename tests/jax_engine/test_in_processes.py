"""Run the other test files of this folder in one process of their own."""

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
#: Files whose programs need several devices. The first one to use jax sets their number for the process.
_SEVERAL_DEVICES = ("test_compiled.py", "test_plans.py", "test_program.py")
#: LLVM's optimizations took a quarter of the time. Results, collectives and their bytes do not depend on them.
_FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def test_files_that_import_jax(request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    others = sorted(path.name for path in _FOLDER.glob("test_*.py") if path != Path(__file__))
    files = [*_SEVERAL_DEVICES, *(name for name in others if name not in _SEVERAL_DEVICES)]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", request.config.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", *options, *(str(_FOLDER / name) for name in files)]
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    environment = {**os.environ, INSIDE: "1", "PYTHONPATH": path, "XLA_FLAGS": _FAST_COMPILATION}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
