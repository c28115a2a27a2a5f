"""Choice of the start method for the ranks of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.launch.fork_server import ForkServer
from weft.cli.launch.launch import threads_variables
from weft.cli.launch.start import Programs, Starter, preloaded_modules

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig


@contextmanager
def rank_starter(run_dir: Path, config: RunConfig, num_ranks: int, cores: int) -> Generator[Starter]:
    """Yield the starter of a run's ranks: if possible a fork server, which begins to import their modules.

    Args:
        run_dir: the run's folder.
        config: the run's config.
        num_ranks: number of ranks of the first start.
        cores: cores of this machine, which the ranks divide.
    """
    starter: Starter = Programs([sys.executable, "-m", "weft.cli.launch.rank", str(run_dir)])
    with ExitStack() as until_over:
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            with suppress(OSError):  # then starting the ranks reports the error
                server = ForkServer(run_dir, threads_variables(num_ranks, cores), preloaded_modules(config), starter)
                starter = until_over.enter_context(closing(server))
        yield starter
