"""Published training runs from a CSV file: their jobs, settings and measurements."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from tools.planner.cells import Row, cluster_of, count, in_numbers, iteration_s, number, refused, shape_of, size
from tools.planner.stacks import counts_causal_half, stack_of
from weft.config.cluster import ClusterSpec
from weft.errors import ConfigError, Problem
from weft.planner.space.columns import PRECISIONS, Job

#: Required columns. A row without one of these cannot be predicted.
NEEDED = ("layers", "hidden", "heads", "seq_len", "gpu", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One row that can be predicted. Settings that the row does not contain are None; `scores.candidates` tries values.

    Attributes:
        source: the id without its number.
        group: rows that repeat one configuration.
        recompute: "none", "full", "attention", "selective", "half" (full in every second layer) or "experts" (experts
            and norms).
        interleaved: the pipeline has several chunks on each rank, if `virtual_stages` does not give their number.
        host_optimizer, host_activations: kept and computed on the host.
        counter: meaning of the memory value: "allocated", "reserved", "total" or "" (unspecified).
        out_of_memory: True if the run failed for this reason; None if unspecified.
    """

    id: str
    source: str
    table: str
    group: str
    core: bool
    job: Job
    cluster: ClusterSpec
    num_devices: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int | None
    zero: int | None
    shard: int
    sp: bool
    precision: str
    compile: bool
    virtual_stages: int | None
    interleaved: bool
    microbatch: int | None
    recompute: str | None
    measured_s: float | None
    measured_gib: float | None
    counter: str
    host_optimizer: bool
    host_activations: bool
    out_of_memory: bool | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Row that cannot be predicted, and its missing columns."""

    id: str
    reason: str


def read_runs(path: Path | str) -> tuple[list[PublishedRun], list[Skipped]]:
    """Return the runs of a CSV file, and the skipped rows.

    Raises:
        ConfigError: if it is not such a file.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            [Problem("score", f"score={path}: the file cannot be read ({error}). Check its path.")]
        ) from None
    runs: list[PublishedRun] = []
    skipped: list[Skipped] = []
    for line, row in enumerate(rows, 2):
        clean = {
            key: (value or "").strip()
            for key, value in row.items()
            if isinstance(key, str) and not isinstance(value, list)
        }
        name = clean.get("id") or f"line {line}"
        try:
            runs.append(_run(name, clean))
        except ConfigError as error:
            skipped.append(Skipped(name, "; ".join(str(problem) for problem in error.problems)))
    return runs, skipped


def _run(name: str, row: Row) -> PublishedRun:
    lacking = [key for key in NEEDED if not row.get(key)]
    if lacking:
        raise refused(row, f"no {', '.join(lacking)}")
    row = in_numbers(row)
    notes = row.get("notes", "")
    written = f"{row.get('source', '')}; {row.get('table', '')}; {notes}"
    text = written.lower()
    gpus = size(row, "gpus")
    per_node = size(row, "gpus_per_node", 8)
    stack, selective = stack_of(text, row["gpu"].lower())
    tp, pp, cp, ep = (size(row, key) for key in ("tp", "pp", "cp", "ep"))
    dp = count(row, "dp", 0) or max(1, gpus // (tp * pp * cp))
    if tp * pp * cp * dp != gpus:
        raise refused(row, f"tp x pp x cp x dp = {tp * pp * cp * dp}, not the {gpus} devices")
    batch = count(row, "global_batch", 0) or size(row, "micro_batch") * dp * (_noted(notes, r"micro_num (\d+)") or 1)
    shape = shape_of(row)
    job = Job(shape=shape, seq_len=size(row, "seq_len"), global_batch=max(batch, dp), stack=stack)
    precision = _precision(row)
    return PublishedRun(
        id=name,
        source=name.rsplit("-", 1)[0],
        table=row.get("table", ""),
        group=_found(notes, r"grp=(\w+)") or name,
        core="core=1" in notes,
        job=job,
        cluster=cluster_of(row["gpu"], gpus, per_node, written),
        num_devices=gpus,
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep if row.get("ep") or not shape.moe_layers else None,
        zero=count(row, "zero_stage", 0) if row.get("zero_stage") else _zero(dp),
        shard=_shard(text, dp, per_node),
        sp=row.get("sequence_parallel") in ("1", "true", "True"),
        precision=precision,
        compile=row.get("compile") in ("1", "true", "True"),
        virtual_stages=count(row, "virtual_stages", 0) or (1 if "before interleaving" in text or pp == 1 else None),
        interleaved="interleaved" in text and "before interleaving" not in text and pp > 1,
        microbatch=count(row, "micro_batch", 0) or None,
        recompute=_recompute(row.get("recompute", ""), selective),
        measured_s=iteration_s(row, shape, gpus, counts_causal_half(text)),
        measured_gib=number(row, "measured_mem_gib"),
        counter=_counter(text),
        host_optimizer=bool(re.search(r"zero[- ]offload|optimizer (?:step )?(?:on|to) (?:the )?(?:cpu|host)", text)),
        host_activations=bool(
            re.search(r"activations? (?:cpu )?offload|offload(?:ed|ing)? (?:of )?activations|proj_offloaded", text)
        ),
        out_of_memory={"1": True, "0": False}.get(_found(notes, r"OOM=([01])") or ""),
    )


def _zero(dp: int) -> int | None:
    """Return the ZeRO stage of a row that does not specify it: 0 with one data-parallel rank, else None."""
    return None if dp > 1 else 0


def _recompute(word: str, selective: str) -> str | None:
    if word == "selective":
        return selective
    return word if word in ("none", "full") else None


def _precision(row: Row) -> str:
    word = row.get("precision", "").lower()
    for narrow in ("fp8", "fp4"):
        if narrow in word:
            return narrow
    return word if word in PRECISIONS else "bf16"


def _shard(text: str, dp: int, per_node: int) -> int:
    """Return the number of ranks over which states are sharded, if it is not all of them."""
    inside = _noted(text, r"zero1=(\d+)") or _noted(text, r"fsdp(\d+) x tp")
    if inside is None and re.search(r"shard in node|hsdp", text):
        inside = per_node
    return min(dp, inside) if inside and inside > 0 and dp % min(dp, inside) == 0 else dp


def _counter(text: str) -> str:
    if "nvidia-smi or" in text:
        return ""
    if "nvidia-smi" in text:
        return "total"
    if "max_memory_reserved" in text or "torchtitan" in text:
        return "reserved"
    return "allocated" if "peak memory" in text or "peak_memory_usage" in text or "max_memory_allocated" in text else ""


def _noted(text: str, pattern: str) -> int | None:
    found = _found(text, pattern)
    return int(found) if found else None


def _found(text: str, pattern: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
