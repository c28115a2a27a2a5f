"""Metrics of runs and machines: name, unit, help and label of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: Whose number it is. run: one for all ranks. rank: each rank has one. host: each machine has one.
Owner = Literal["run", "rank", "host"]

_SERIES = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*)(?:\{([^{}]*)\})?")
_PLAIN = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One kind of metric.

    name: dotted, as in conditions and events. unit: "s", "bytes", "ratio", ... or "" for a plain number. label: the
    label of its series, such as "phase", or "" for a single series. owner: the rank, machine or run that it measures.
    grows: it is a total that only rises during a run. worse: the bad direction, or "".
    """

    name: str
    unit: str
    help: str
    label: str = ""
    owner: Owner = "run"
    grows: bool = False
    worse: Literal["high", "low", ""] = ""

    @property
    def exported(self) -> str:
        """Its name for Prometheus and OpenTelemetry: one prefix, base units, "_total" for what grows."""
        unit = {"bytes/s": "bytes_per_second", "s": "seconds", "W": "watts", "C": "celsius", "Hz": "hertz"}
        words = [_PLAIN.sub("_", self.name.removesuffix("_s") if self.unit == "s" else self.name)]
        suffix = unit.get(self.unit, self.unit if self.unit in ("bytes", "ratio") else "")
        stem = words[0]
        for ending in ("_bytes_per_s", "_bytes", "_per_s"):
            if suffix.startswith("bytes") and stem.endswith(ending):
                stem = stem.removesuffix(ending)
        if stem.endswith("_per_s"):
            stem = f"{stem.removesuffix('_per_s')}_per_second"
        parts = ["weft", stem, *([suffix] if suffix and not stem.endswith(suffix) else [])]
        return "_".join([*parts, *(["total"] if self.grows else [])])


def series(name: str, label: str = "") -> str:
    """Return the text that names one series: "step_s" or "phase_s{forward}"."""
    return f"{name}{{{label}}}" if label else name


def split_series(text: str) -> tuple[str, str]:
    """Return (name, label) of a series' text; the label may be "".

    Raises:
        ValueError: if the text is neither `name` nor `name{label}`.
    """
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no figure. Write a name such as loss, or phase_s{{forward}}")
    return match[1], match[2] or ""


# Every figure of a run: the one list that events, sinks, alerts, the page and the docs read.

_TRAINING = (
    Figure(name="loss", unit="", help="Mean training loss of the step, before its update.", worse="high"),
    Figure(name="lr", unit="", help="Learning rate of the step."),
    Figure(name="grad_norm", unit="", help="Global norm of the gradient before clipping.", worse="high"),
    Figure(
        name="update_ratio",
        unit="ratio",
        help="Norm of a step's update over the norm of the trained weights, every monitor.update_ratio_every steps.",
        worse="high",
    ),
    Figure(name="loss_scale", unit="", help="Factor on the loss in fp16.", worse="low"),
    Figure(name="skipped_steps", unit="", help="Steps whose update was left out.", grows=True, worse="high"),
    Figure(name="step", unit="", help="Steps done.", grows=True),
    Figure(name="eval.loss", unit="", help="Mean loss of the last evaluation.", worse="high"),
    Figure(name="eval.metric", unit="", help="A metric of the last evaluation.", label="metric"),
)
_SPEED = (
    Figure(name="step_s", unit="s", help="Seconds of one step.", worse="high"),
    Figure(
        name="tokens_per_s",
        unit="",
        help="What the run counts (tokens of a decoder) per second, over all ranks.",
        worse="low",
    ),
    Figure(name="samples_per_s", unit="", help="Samples per second, over all ranks.", worse="low"),
    Figure(name="mfu", unit="ratio", help="Share of the devices' peak FLOP/s that the model uses.", worse="low"),
    Figure(
        name="phase_s",
        unit="s",
        help="Seconds of a step by phase: forward, backward, data, reduce, optimizer, wait.",
        label="phase",
        owner="rank",
    ),
    Figure(
        name="exposed_s",
        unit="s",
        help="Seconds of a step that the computation waited for other ranks, by axis.",
        label="axis",
        owner="rank",
        worse="high",
    ),
    Figure(
        name="sent_bytes",
        unit="bytes",
        help="Bytes of a step that collectives moved, by axis.",
        label="axis",
        owner="rank",
    ),
    Figure(
        name="data_wait_s", unit="s", help="Seconds of a step that a rank waited for data.", owner="rank", worse="high"
    ),
    Figure(
        name="busy_s",
        unit="s",
        help="Seconds of a step in which a rank computed without waiting for others.",
        owner="rank",
        worse="high",
    ),
    Figure(
        name="rank.lag",
        unit="ratio",
        help="A rank's busy seconds over the median of the others of its pipeline stage; above 1 they wait for it.",
        owner="rank",
        worse="high",
    ),
    Figure(
        name="rank.silent",
        unit="",
        help="Ranks that have not reported for three intervals (monitor.every).",
        worse="high",
    ),
)
_MEMORY = (
    Figure(
        name="memory.bytes",
        unit="bytes",
        help="Memory of a rank's device by class: weights, gradients, optimizer, rest (activations and buffers), peak.",
        label="class",
        owner="rank",
        worse="high",
    ),
    Figure(
        name="process.memory_bytes",
        unit="bytes",
        help="Resident memory of a rank's process.",
        owner="rank",
        worse="high",
    ),
    Figure(name="process.cpu", unit="", help="CPU cores that a rank's process keeps busy.", owner="rank"),
)
_GPU = (
    Figure(
        name="gpu.utilization",
        unit="ratio",
        help="Share of time in which the GPU ran a kernel.",
        owner="rank",
        worse="low",
    ),
    Figure(name="gpu.memory_bytes", unit="bytes", help="Memory in use on the GPU, of all its users.", owner="rank"),
    Figure(name="gpu.power", unit="W", help="Power that the GPU draws.", owner="rank"),
    Figure(name="gpu.temperature", unit="C", help="Temperature of the GPU.", owner="rank", worse="high"),
    Figure(name="gpu.sm_clock", unit="Hz", help="Clock of the GPU's processors.", owner="rank", worse="low"),
    Figure(name="gpu.memory_clock", unit="Hz", help="Clock of the GPU's memory.", owner="rank", worse="low"),
    Figure(
        name="gpu.throttled",
        unit="",
        help="1 while the GPU is slowed down by heat or by its power brake, else 0.",
        owner="rank",
        worse="high",
    ),
    Figure(
        name="gpu.xid_errors",
        unit="",
        help="Xid errors of the driver about this GPU.",
        owner="rank",
        grows=True,
        worse="high",
    ),
    Figure(
        name="gpu.ecc_errors",
        unit="",
        help="Uncorrected memory errors of the GPU.",
        owner="rank",
        grows=True,
        worse="high",
    ),
    Figure(name="gpu.nvlink_bytes_per_s", unit="bytes/s", help="NVLink traffic of the GPU, both ways.", owner="rank"),
    Figure(name="gpu.pcie_bytes_per_s", unit="bytes/s", help="PCIe traffic of the GPU, both ways.", owner="rank"),
)
_HOST = (
    Figure(name="host.cpu", unit="ratio", help="Share of the machine's CPU time in use.", owner="host"),
    Figure(
        name="host.memory_free_bytes",
        unit="bytes",
        help="Memory of the machine that programs can still have.",
        owner="host",
        worse="low",
    ),
    Figure(
        name="disk.free_bytes",
        unit="bytes",
        help="Free space on the disk of the run folder.",
        owner="host",
        worse="low",
    ),
    Figure(name="disk.read_bytes_per_s", unit="bytes/s", help="Bytes that the machine's disks read.", owner="host"),
    Figure(name="disk.write_bytes_per_s", unit="bytes/s", help="Bytes that the machine's disks write.", owner="host"),
    Figure(name="net.sent_bytes_per_s", unit="bytes/s", help="Bytes that the machine sends, without loopback.",
           owner="host"),
    Figure(name="net.received_bytes_per_s", unit="bytes/s", help="Bytes that the machine receives, without loopback.",
           owner="host"),
)  # fmt: skip
_RUN = (
    Figure(name="checkpoint.stall_s", unit="s", help="Seconds that training waited for the last save.", worse="high"),
    Figure(
        name="checkpoint.durable_s",
        unit="s",
        help="Seconds until the last checkpoint was committed.",
        worse="high",
    ),
    Figure(name="failures", unit="", help="Failures of ranks since the run began.", grows=True, worse="high"),
    Figure(
        name="dropped_figures",
        unit="",
        help="Steps whose figures a rank dropped because its queue was full.",
        owner="rank",
        grows=True,
        worse="high",
    ),
    Figure(
        name="planned",
        unit="",
        help="What the planner expects of a figure of this run, by that figure's name.",
        label="figure",
    ),
    Figure(
        name="plan.drift",
        unit="ratio",
        help=(
            "Ratio of measured to planned, for a step, its parts and memory. Example in an alert: "
            "plan.drift{over dp} > 1.15."
        ),
        label="part",
        worse="high",
    ),
)

#: By name, in the order of the docs.
FIGURES: Mapping[str, Figure] = {
    figure.name: figure for figure in (*_TRAINING, *_SPEED, *_MEMORY, *_GPU, *_HOST, *_RUN)
}
#: Short names in conditions, and the full names of their metrics.
SHORT: Mapping[str, str] = {"disk.free": "disk.free_bytes", "host.memory_free": "host.memory_free_bytes"}
