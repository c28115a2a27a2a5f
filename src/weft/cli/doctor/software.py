"""Versions, and what torch was built with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

import weft
from weft.cli.doctor.line import CheckLine
from weft.errors import install_extra

_NEEDED = ("numpy", "pydantic", "typer", "rich", "safetensors", "tokenizers", "pyarrow", "psutil", "matplotlib",
           "tomli-w", "nvidia-ml-py")  # fmt: skip
_OPTIONAL = ("transformers",)


#: This project's distribution; the one that is called `weft` is another project's.
_DISTRIBUTION, _STRANGER = "weft-train", "weft"


def namesake() -> Iterator[CheckLine]:
    """Whether another distribution claims `import weft` and the `weft` command."""
    try:
        found = metadata.metadata(_STRANGER)
    except metadata.PackageNotFoundError:
        return
    ours = (found["Summary"] or "").startswith("One plan for training")
    whose = f"an old install of this project, now {_DISTRIBUTION}" if ours else "another project"
    text = f"{_STRANGER} {found['Version']} is installed too: {whose}, with the same import and command"
    remedy = f"Run: pip uninstall {_STRANGER}, then install Weft again: pip install -e . in its checkout"
    yield CheckLine("software", "name clash", text, "warn", remedy)


def versions() -> Iterable[CheckLine]:
    """Weft, Python and the packages Weft stands on."""
    yield CheckLine("software", "weft", weft.__version__)
    yield CheckLine(
        "software", "python", f"{platform.python_version()} ({platform.python_implementation()}, {_home()})"
    )
    found, missing = [], []
    for package in (*_NEEDED, *_OPTIONAL):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    yield CheckLine("software", "packages", ", ".join(found))
    needed = [package for package in missing if package in _NEEDED]
    if needed:
        remedy = f"Run: pip install {' '.join(needed)}"
        yield CheckLine("software", "missing", ", ".join(needed), "fail", remedy)
    optional = [package for package in missing if package in _OPTIONAL]
    if optional:
        yield CheckLine("software", "not installed", f"{', '.join(optional)} (optional). {install_extra('hf')}.")


def torch_build() -> Iterator[CheckLine]:
    """torch, its CUDA, the devices it sees, and the backends its ranks can talk through."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    cuda = torch.version.cuda or "none (CPU build)"
    yield CheckLine(
        "software", "torch", f"{torch.__version__}, CUDA {cuda}, cuDNN {torch.backends.cudnn.version() or 'none'}"
    )
    if not dist.is_available():
        remedy = "Install a build of torch with distributed support."
        yield CheckLine("software", "distributed", "torch was built without it", "fail", remedy)
        return
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    release = f"; NCCL {'.'.join(map(str, nccl.version()))}" if "nccl" in backends else ""
    status, remedy = ("ok", "") if "gloo" in backends else ("fail", "Install a build of torch with gloo.")
    yield CheckLine("software", "backends", f"{', '.join(backends)}{release}", status, remedy)
    count = torch.cuda.device_count()
    devices = f"{count} x cuda" if count else "cpu only"
    yield CheckLine("software", "torch devices", f"{devices}; {torch.get_num_threads()} threads in one process")


def _home() -> str:
    return "virtual environment" if sys.prefix != sys.base_prefix else "system"
