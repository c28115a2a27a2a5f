"""If no simulated GPU is available, one message gives the reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_sim import stub_library as build
from tools.gpu_sim.stub_library import why_not
from weft.errors import LaunchError


def test_missing_compiler_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert why_not() == "g++ is not on PATH; install it (Debian: apt install g++)"
    with pytest.raises(LaunchError, match=r"^paper device: g\+\+ is not on PATH; install it"):
        build.built_stub()


def test_cuda_build_of_torch_keeps_its_own_devices(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(build, "_torch_dir", lambda: tmp_path)
    assert why_not().endswith("is built for CUDA, and a simulated GPU needs torch's build for CPUs")


def test_process_that_imported_torch_cannot_load_the_stub():
    import torch  # noqa: F401

    with pytest.raises(LaunchError, match=r"torch is loaded already.*python tools/gpu_sim script SCRIPT"):
        build.load_stub()


@pytest.mark.paper
def test_compile_error_is_reported_and_leaves_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(build.env, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "_torch_dir", lambda: tmp_path)  # no headers
    with pytest.raises(LaunchError, match=r"g\+\+ cannot build it for torch .* Use a g\+\+ that supports C\+\+20"):
        build.built_stub()
    assert list((tmp_path / "paper").iterdir()) == []


@pytest.mark.full  # starts a process
def test_plan_that_breaks_a_rule_prints_no_traceback():
    if why_not():
        pytest.skip(why_not())
    done = subprocess.run(
        [sys.executable, str(Path(build.__file__).parent), "plans", "zero=3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert Path(build.__file__).name not in done.stderr
