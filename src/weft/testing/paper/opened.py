"""The paper device of this process, once the library is loaded: opened, and a script run on it."""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from weft import env
from weft.testing.paper.compiled import count_compiled
from weft.testing.paper.cuda import install
from weft.testing.paper.device import PaperDevice
from weft.testing.paper.mode import PaperMode


@contextmanager
def opened(stub: ctypes.CDLL) -> Iterator[PaperDevice]:
    """Tensors of cuda:0 can be made inside. stub: what `build.load_stub` gave. Once a process."""
    device = PaperDevice()
    install(device, stub)
    with PaperMode(device) as mode:
        count_compiled(mode)
        yield device


def join_silent_ranks(num_ranks: int, rank: int) -> None:
    """Be one of several ranks, on torch's fake process group: the others answer with what this one has."""
    place = env.RankEnv(
        rank, num_ranks, 0, 1, env.LOOPBACK, 29500, "torchrun"
    )  # alone on its machine, which has one GPU
    env.export_rank(place)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=HashStore())


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a Python file as `python path arguments` would, on the open device."""
    script = Path(path).resolve()
    sys.argv = [path, *arguments]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
