"""Published fine-tuning runs: full, LoRA and QLoRA, with their peak memory and speed.

Each column has a closed vocabulary. A row with an unknown or missing value is refused, with the reason.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.planner.cells import Row, device_named, number, refused, size
from tools.planner.stacks import known_facts, value_in
from weft.config.cluster import ClusterSpec
from weft.config.plan import RECOMPUTES
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import Shape, Stack
from weft.planner.space.trained_part import AdapterSize, attention_products

#: How the base is stored, by the column `quantization`.
_BASES = {"": "stored", "nf4": "nf4", "bnb-nf4": "nf4", "int4 (gptq)": "nf4", "int4 (bnb)": "nf4",
          "int8 (gptq)": "int8", "fp8": "int8", "fp4": "nf4"}  # fmt: skip
_METHODS = ("full", "lora", "qlora")
_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp4": "fp4",
            "fp8 (most submissions; fp4 where said)": "fp8"}  # fmt: skip
#: Whether the ranks shard the model's states, by the column `sharding`.
_SHARDED = {"": True, "none": False, "FSDP": True, "FSDP2": True, "ZeRO-3": True}
_UNITS = {"GiB": 2.0**30, "MiB": 2.0**20, "GB": 1e9, "Gb": 1e9}
_SPEEDS = ("samples/s", "samples/s of the job", "tokens/s (total)", "tokens/s", 'tokens/sec (column "Tokens/sec *")')
#: Rank of an adapter whose row states none.
_RANK = 8
#: Ratio of reserved to allocated bytes, for memory that is allocated and freed within a step, if lengths vary.
_VARIED_RESERVE = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRun:
    """One row.

    Attributes:
        measured_s: seconds of an optimizer step, or None.
        measured_gib: peak memory of one GPU, or None.
        varied: True if lengths vary between batches, and seq_len is their maximum.
    """

    id: str
    source: str
    method: str
    counter: str
    job: Job
    cluster: ClusterSpec
    columns: Columns
    measured_s: float | None
    measured_gib: float | None
    out_of_memory: bool
    varied: bool


@functools.cache
def _models() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def shape_named(name: str) -> Shape | None:
    """Return the shape of a model by its published name, or None if models.toml lacks it."""
    values = _models().get(name.rpartition("/")[2].lower())
    if values is None:
        return None
    values = dict(_models()[values["like"]] if "like" in values else values)
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    fields: dict[str, Any] = {"gated": True, "tied": False, "ffn": 0, **values}
    return Shape(**fields)


def finetune_run(name: str, row: Row) -> FinetuneRun:
    """Return a row's run.

    Raises:
        ConfigError: for a missing value, or one that is not in its column's vocabulary.
    """
    shape = shape_named(row["model"])
    if shape is None:
        raise refused(row, f"model={row['model']}: its shape is not known")
    for key in ("gpu", "micro_batch", "seq_len"):
        if not row.get(key):
            raise refused(row, f"no {key}")
    for key, known in (("method", _METHODS), ("quantization", _BASES), ("precision", _FORMATS), ("sharding", _SHARDED)):
        value = row.get(key, "").lower() if key == "quantization" else row.get(key, "")
        if value not in known:
            raise refused(row, f"{key}={row.get(key, '')}: not one of {', '.join(filter(None, known))}")
    if row.get("gpus") not in ("", "1") and not row.get("sharding"):
        raise refused(row, "no sharding: how the ranks divide the model is not stated")
    if "cumulative" in row.get("notes", ""):
        raise refused(row, "notes: the row adds features that no column states")
    ranks, micro, steps = size(row, "gpus"), size(row, "micro_batch"), size(row, "grad_accum")
    bound = row["seq_len"].startswith("<=")
    seq_len = int(row["seq_len"].removeprefix("<="))
    method, base = row["method"], _BASES[row.get("quantization", "").lower()]
    adapter = None if method == "full" else _adapter(shape, row, base)
    job = Job(shape=shape, seq_len=seq_len, global_batch=micro * steps * ranks, adapter=adapter, stack=_stack(row))
    spec = device_named(row["gpu"].split(" (")[0])
    sharded = ranks > 1 and _SHARDED[row.get("sharding", "")]
    columns = Columns.make(
        1,
        dp_shard=ranks if sharded else 1,
        dp_replicate=1 if sharded else ranks,
        zero=3 if sharded else 0,
        microbatch=micro,
        num_micro=steps,
        recompute=RECOMPUTES.index("none" if row.get("recompute") == "none" else "full"),
        precision=PRECISIONS.index(_FORMATS[row["precision"]]),
        compile=False,
    )
    speed = None if bound else _step_s(row, job, ranks)
    return FinetuneRun(
        id=name,
        source=name.rsplit("-", 1)[0],
        method=method,
        counter=value_in("counter", row.get("mem_counter", "")) or "",
        job=job,
        cluster=ClusterSpec(nodes=max(1, -(-ranks // 8)), devices_per_node=min(ranks, 8), device=spec),
        columns=columns,
        measured_s=speed,
        measured_gib=_gib(row, ranks),
        out_of_memory=row.get("oom") == "1",
        varied=bound,
    )


def _adapter(shape: Shape, row: Row, base: str) -> AdapterSize:
    rank = int(number(row, "lora_r") or _RANK)
    fused = "torchtune" not in row.get("source", "").lower()  # which unpacks by eager kernels, as Weft does
    if shape.moe_layers:  # adapters on attention alone
        if base != "stored":
            raise refused(row, "quantization: a packed base of experts is not modelled")
        chosen = attention_products(shape) * shape.layers
        return AdapterSize.of_widths(rank, shape.layers, chosen)
    return replace(AdapterSize.of_shape(shape, rank, base), fused=fused)


def _stack(row: Row) -> Stack:
    """Return the software: eager PyTorch, unless the column `kernels` names fused ones."""
    kernels = row.get("kernels", "").lower()
    fused = any(word in kernels for word in ("foak", "unsloth", "surogate")) or not kernels
    values: dict[str, Any] = {
        "name": "torch",
        "fused": fused,
        "cut_loss": "unsloth" in kernels or "surogate" in kernels,
    }
    values["residual_bytes"] = 4.0 if kernels == "baseline-peft-bnb" or "bnb" in row.get("quantization", "") else 2.0
    if "foak" in kernels or "accelerated" in kernels:
        values["residual_bytes"] = 2.0
    values |= {"loss_bytes": 13.0, "host_ops": 4.0, "fused_norm": fused}
    if row["method"] == "full":
        values |= {"main_bytes": 4.0, "master": False, "step_bytes": 2.0}  # states in the format of the weights
    if known_facts(row.get("source", "")).get("states") == "fp32":
        values |= {"main_bytes": 12.0, "master": True, "step_bytes": 4.0}
    return Stack(**values, grad_bytes=2.0, reduce_bytes=2.0)  # PEFT trains adapters in fp32


def _gib(row: Row, ranks: int) -> float | None:
    text, unit = row.get("peak_mem", "").removeprefix("~"), row.get("mem_unit_as_printed", "")
    if not text or not unit:
        return None
    known = next((scale for name, scale in _UNITS.items() if unit.startswith(name)), None)
    if known is None:
        raise refused(row, f"mem_unit_as_printed={unit}: not one of {', '.join(_UNITS)}")
    value = float(text) * known / 2**30
    return value / ranks if "sum of the GPUs" in unit else value


def _step_s(row: Row, job: Job, ranks: int) -> float | None:
    if seconds := number(row, "iter_s"):
        return seconds
    if rate := number(row, "tokens_per_s_per_gpu"):
        return job.tokens / (rate * ranks)
    match = re.fullmatch(r"([\d.]+)(k?) (.+)", row.get("other_speed", ""))
    if match is None or match[3] not in _SPEEDS:
        return None
    rate = float(match[1]) * (1000 if match[2] else 1)
    return (job.global_batch if match[3].startswith("samples") else job.tokens) / rate


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """Relative errors of a run's predicted memory and step time; None without a measurement."""

    run: FinetuneRun
    step_s: float
    memory_gib: float
    fits: bool

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory."""
        return self.memory_gib / self.run.measured_gib - 1 if self.run.measured_gib else None

    @property
    def time_error(self) -> float | None:
        """Relative error of the step time."""
        return self.step_s / self.run.measured_s - 1 if self.run.measured_s else None


def predict_finetune(run: FinetuneRun) -> FinetuneResult:
    """Predict the memory and the step time of one run."""
    tables = Tables.of(run.cluster.device)
    if run.varied:  # blocks of every length remain in torch's allocator
        tables = tables.changed(reserve=_VARIED_RESERVE)
    found = estimate(run.job, run.cluster, run.columns, tables)
    memory = {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}.get(run.counter, found.total_bytes)
    return FinetuneResult(run, float(found.step_s[0]), float(memory[0]) / 2**30, bool(found.fits_probability[0] > 0.5))


def finetune_summary(results: Sequence[FinetuneResult]) -> Mapping[str, Any]:
    """Return mean absolute errors of memory and time by method, as means over sources, and the verdicts' accuracy."""
    found: dict[str, Any] = {}
    for method in _METHODS:
        own = [each for each in results if each.run.method == method]
        for name, of in (("memory", "memory_error"), ("time", "time_error")):
            by_source: dict[str, list[float]] = {}
            for each in own:
                error = getattr(each, of)
                if error is not None and not each.run.out_of_memory:
                    by_source.setdefault(each.run.source, []).append(error)
            if by_source:
                means = {source: float(np.mean(np.abs(errors))) for source, errors in by_source.items()}
                biases = {source: float(np.mean(errors)) for source, errors in by_source.items()}
                found[f"{method} {name}"] = {
                    "macro": float(np.mean(list(means.values()))), "count": sum(map(len, by_source.values())),
                    "sources": means, "bias": biases,
                }  # fmt: skip
    judged = [each.fits != each.run.out_of_memory for each in results]
    return found | {"verdicts": {"count": len(judged), "accuracy": float(np.mean(judged)) if judged else None}}
