"""torch's profiler and the GPU's memory history in the steps of `train.profile`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weft.config.run_config import TrainSection
from weft.devices import access
from weft.memory.private_torch import record_memory, write_memory
from weft.train.folder import new_files_like


class StepProfiler:
    """Records the steps of `train.profile` on this rank, if it is one of `train.profile_ranks`.

    Args:
        train: the run's settings.
        rank: this rank.
        device: its device.
        run_folder: the files are in its folder `profile`.
    """

    def __init__(self, train: TrainSection, rank: int, device: torch.device, run_folder: Path):
        self._steps = train.profiled_steps if rank in train.profile_ranks else range(0)
        self._name, self._folder = f"steps_{train.profile}_rank{rank}", run_folder / "profile"
        self._device = device
        self._running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record this step, counted from 1, if it is one of the profiled steps.

        The files are written after the last recorded step, and on a CPU after an error.
        """
        if number not in self._steps:
            yield
            return
        if self._running is None:
            self._start()
        try:
            with record_function(f"step {number}"):
                yield
        except BaseException:
            if access.is_accelerator(self._device):
                self._running = None  # stopping waits for the device, and a stuck collective never ends
            self.close()
            raise
        if number == self._steps[-1]:
            self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += access.profiler_activities(self._device)
        if access.has_cuda_kernels(self._device):
            record_memory(True)
        self._running = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._running.start()

    def close(self) -> None:
        """Stop recording and write the files, if the profiler runs."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        with new_files_like(self._folder.parent):
            self._folder.mkdir(exist_ok=True)
            running.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))
            if access.has_cuda_kernels(self._device):
                write_memory(str(self._folder / f"{self._name}_memory.pickle"))
                record_memory(False)
