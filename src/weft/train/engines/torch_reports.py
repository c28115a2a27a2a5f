"""Reports of a torch engine: lines for users, sizes, and the measurements of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.comm.store import StoreReports
from weft.config.cluster import device_by_torch_name
from weft.config.metrics import series
from weft.devices import access
from weft.memory.offload import offload_lines
from weft.memory.recompute import recompute_of
from weft.models.adapters import adapted
from weft.monitor.metrics import LocalReports
from weft.monitor.step_times import TimeBook
from weft.parallel.state.gradients import originals
from weft.parallel.state.precision import Precision
from weft.train.engine import EngineJob, Measures
from weft.train.engines.replica_engine import OtherWorlds
from weft.train.joined_rank import JoinedRank
from weft.train.loop.time_report import report_times
from weft.train.states.model_state import expected_bytes
from weft.train.step.errors import live_bytes
from weft.train.step.train_step import TrainStep
from weft.train.weights.run_adapter import with_adapter
from weft.units import format_count


class TorchReports:
    """Reports of one rank's engine; implements `EngineReports`."""

    def __init__(
        self, job: EngineJob, rank: JoinedRank, step: TrainStep, kernels: Sequence[str], replicas: OtherWorlds | None
    ):
        self._job, self._rank, self._step, self._kernels, self._replicas = job, rank, step, kernels, replicas
        self._mesh = rank.mesh

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def opening(self) -> Sequence[str]:
        model, plan = self._step.model, self._mesh.plan
        recompute = recompute_of(model)
        lines = [f"format  {Precision.of(plan)}", *self._kernels, *_adapter_lines(model)]
        lines += self._replicas.lines() if self._replicas else []
        if recompute and recompute.setting != "none":
            lines.append(f"memory  recompute {recompute.describe()}")
        return [*lines, *(f"offload {line}" for line in offload_lines(self._mesh.stage_plan, self._mesh.device))]

    def checkpoint_bytes(self) -> int:
        config = self._job.config
        shapes = with_adapter(self._job.task.shapes(), config)
        return expected_bytes(shapes, config.optimizer, Precision.of(self._mesh.plan).master)

    def peak_flops(self) -> float | None:
        if not access.is_accelerator(self._mesh.device):
            return None
        device = device_by_torch_name(access.device_name(self._mesh.device))
        return device.peak_flops(self._mesh.plan.precision) if device else None

    def times(self, book: TimeBook, start_step: int) -> Sequence[str]:
        self._step.wait_for_weights()
        return report_times(self._job.folder, self._mesh, self._step.model, book, self._job.task, start_step)

    def measures(self) -> Measures:
        rank, number, device = self._mesh.rank, self._mesh.world_size, self._mesh.device
        step, ledger = self._step, self._rank.ledger

        def memory() -> dict[str, float]:
            live = live_bytes(step.model, step.optimizer, step.local_gradients())
            weights = live.parameters + live.buffers
            classes = {"weights": weights, "gradients": live.gradients, "optimizer": live.optimizer}
            return {series("memory.bytes", name): float(num_bytes) for name, num_bytes in classes.items()}

        return Measures(
            board=StoreReports(rank, number) if number > 1 else LocalReports(),
            traffic=lambda: {series("sent_bytes", axis): total for axis, total in ledger.sent().items()},
            memory=memory,
            gpu=access.uuid_of(device),
        )


def _adapter_lines(model: nn.Module) -> list[str]:
    """Return a line on the adapter of a parallelized model, and its share of trained parameters."""
    adapter = adapted(model)
    if adapter is None:
        return []
    params = [one for one in originals(model).values() if one.is_parameter]
    trained, every = sum(one.numel for one in params if one.is_trained), sum(one.numel for one in params)
    counts = f"{format_count(trained)} of {format_count(every)} parameters trained"
    return [f"adapter {adapter.kind}, on {len(adapter.layers)} layers: {counts}"]
