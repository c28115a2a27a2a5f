"""The C++ part of the simulated GPU: built with g++ on first use, and cached per torch version and source.

This module does not import torch, because the library must be loaded before torch queries the number of devices.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from weft import env
from weft.errors import LaunchError

#: Timeout of g++ in seconds. It takes about 3.
_BUILD_LIMIT_S = 300.0


def load_stub() -> ctypes.CDLL:
    """Load the library into this process, which then has one simulated CUDA device until it ends.

    Raises:
        LaunchError: after `import torch`, on systems other than Linux, without g++, or if the build fails.
    """
    if "torch" in sys.modules:
        raise LaunchError(
            "paper device: torch is loaded already, and has counted its devices. "
            "Start a process of its own: python tools/gpu_sim script SCRIPT."
        )
    return ctypes.CDLL(str(built_stub()), ctypes.RTLD_GLOBAL)


def why_not() -> str:
    """Return why this machine cannot simulate a GPU, or "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"the paper device is built for Linux, and this is {sys.platform}"
    if shutil.which("g++") is None:
        return "g++ is not on PATH; install it (Debian: apt install g++)"
    if (_torch_dir() / "lib" / "libtorch_cuda.so").exists():
        # The real hooks and the simulated ones cannot both be registered.
        return f"torch {version('torch')} is built for CUDA, and a simulated GPU needs torch's build for CPUs"
    return ""


def built_stub() -> Path:
    """Return the library of the simulated GPU for the installed torch, and build it if needed.

    Raises:
        LaunchError: if this machine cannot simulate a GPU, or the build fails.
    """
    if why := why_not():
        raise LaunchError(f"paper device: {why}.")
    return built_library(Path(__file__).with_name("stub.cpp"))


def built_library(source: Path) -> Path:
    """Return the library that a C++ file makes with the installed torch, and build it if needed.

    Raises:
        LaunchError: if the build fails.
    """
    torch_dir = _torch_dir()
    mark = hashlib.sha256(b"\0".join((source.read_bytes(), str(torch_dir).encode(), version("torch").encode())))
    built = env.cache_dir() / "paper" / f"{source.stem}-torch-{version('torch')}-{mark.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        _build(source, torch_dir, built)
    return built


def _torch_dir() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise LaunchError("paper device: torch is not installed. Install it: pip install torch.")
    return Path(found.origin).parent


def _build(source: Path, torch_dir: Path, built: Path) -> None:
    """Compile to a temporary file next to the target and rename it, so that concurrent builds do not conflict."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=built.parent)
    os.close(handle)
    libraries = torch_dir / "lib"
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch_dir / 'include'}"]
    command += [f"-I{torch_dir / 'include/torch/csrc/api/include'}", str(source), "-o", name]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S)
        if done.returncode:
            lines = done.stderr.splitlines()
            first = next((line for line in lines if "error" in line), "no message")
            raise LaunchError(
                f"paper device: g++ cannot build it for torch {version('torch')}: {first}. "
                f"Use a g++ that supports C++20 (11 or later)."
            )
        Path(name).replace(built)
    finally:
        Path(name).unlink(missing_ok=True)
