"""Registration of the mirror device with torch, as a package of a hardware vendor does it.

`load` is also an entry point of the group `torch.backends`: torch then registers the device when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import backend_registration

from tools.gpu_sim.stub_library import built_library

NAME = "mirror"
SOURCE = Path(__file__).with_name("mirror.cpp")


def why_not() -> str:
    """Return why this machine cannot build the device, or ""."""
    if not sys.platform.startswith("linux"):
        return f"the mirror device is built for Linux, and this is {sys.platform}"
    return "" if shutil.which("g++") else "g++ is not on PATH; install it (Debian: apt install g++)"


class MirrorModule:
    """The module `torch.mirror`, with the functions that modules of accelerators have."""

    library: ClassVar[Any]

    @staticmethod
    def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=torch.device(NAME, MirrorModule.current_device()))

    @staticmethod
    def Event(enable_timing: bool = False) -> torch.Event:
        return torch.Event(device=torch.device(NAME, MirrorModule.current_device()), enable_timing=enable_timing)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return MirrorModule.Stream(device)

    default_stream = current_stream

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        yield

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def current_device() -> int:
        return MirrorModule.library.mirror_current()

    @staticmethod
    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        MirrorModule.library.mirror_set_current(index or 0)

    @staticmethod
    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = MirrorModule.current_device()
        MirrorModule.set_device(device)
        try:
            yield
        finally:
            MirrorModule.set_device(before)

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    # Operators run on the host, so they draw from its generator.

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return MirrorModule.library.mirror_allocated()

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return MirrorModule.library.mirror_peak()

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def load() -> None:
    """Register the device with torch in this process. A second call does nothing.

    Raises LaunchError if the library cannot be built.
    """
    if hasattr(torch, NAME):
        return
    library = ctypes.CDLL(str(built_library(SOURCE)))
    for name in ("mirror_allocated", "mirror_peak"):
        getattr(library, name).restype = ctypes.c_int64
    library.mirror_register()
    MirrorModule.library = library
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, MirrorModule)
    backend_registration.generate_methods_for_privateuse1_backend()


def package_in(folder: Path) -> None:
    """Write the metadata of a package that registers the device, into a folder for PYTHONPATH."""
    metadata = folder / "mirror_device-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mirror-device\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = tools.mirror_device.device:load\n")
