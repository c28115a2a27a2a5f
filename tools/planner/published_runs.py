"""Published training runs from a CSV file: their jobs, settings and measurements."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.planner.cells import Row, cluster_of, count, in_numbers, iteration_s, number, refused, shape_of, size
from tools.planner.finetune import FinetuneRun, finetune_run
from tools.planner.stacks import counts_causal_half, facts_of, known_network, stack_of, unread
from weft.config.cluster import ClusterSpec
from weft.errors import ConfigError, Problem
from weft.planner.space.columns import PRECISIONS, Job
from weft.planner.space.shape import Stack

#: Required columns. A row without one of these cannot be predicted.
NEEDED = ("layers", "hidden", "heads", "seq_len", "gpu", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One row that can be predicted. Settings that the row does not contain are None; `scores.candidates` tries values.

    Attributes:
        source: the id without its number.
        publisher: who published the source.
        group: rows that repeat one configuration.
        recompute: "none", "full", "attention", "selective", "half" (full in every second layer) or "experts" (experts
            and norms).
        interleaved: the pipeline has several chunks on each rank, if `virtual_stages` does not give their number.
        host_optimizer, host_activations: kept and computed on the host.
        counter: meaning of the memory value: "allocated", "reserved", "total" or "" (unspecified).
        out_of_memory: True if the run failed for this reason; None if unspecified.
        unread: parts of the notes that the vocabulary does not understand.
    """

    id: str
    source: str
    publisher: str
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
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """Row that cannot be predicted, and its missing columns."""

    id: str
    reason: str


def read_rows(path: Path | str) -> Iterator[PublishedRun | FinetuneRun | Skipped]:
    """Yield the rows of a CSV file as runs, or as skipped rows with their reasons.

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
    for line, row in enumerate(rows, 2):
        clean = {
            key: (value or "").strip()
            for key, value in row.items()
            if isinstance(key, str) and not isinstance(value, list)
        }
        name = clean.get("id") or f"line {line}"
        try:
            yield finetune_run(name, clean) if "peak_mem" in clean else _run(name, clean)
        except ConfigError as error:
            yield Skipped(name, "; ".join(str(problem) for problem in error.problems))


def read_runs(path: Path | str) -> tuple[list[PublishedRun], list[Skipped]]:
    """Return the runs of a CSV file, and the skipped rows.

    Raises:
        ConfigError: if it is not such a file.
    """
    rows = list(read_rows(path))
    return [each for each in rows if isinstance(each, PublishedRun)], [
        each for each in rows if isinstance(each, Skipped)
    ]


def _run(name: str, row: Row) -> PublishedRun:
    lacking = [key for key in NEEDED if not row.get(key)]
    if lacking:
        raise refused(row, f"no {', '.join(lacking)}")
    row = in_numbers(row)
    notes = row.get("notes", "")
    marks = dict(part.strip().split("=", 1) for part in notes.split(";") if "=" in part)
    facts, stack = facts_of(row), stack_of(row)
    gpus = size(row, "gpus")
    per_node = size(row, "gpus_per_node", 8)
    tp, pp, cp, ep = (size(row, key) for key in ("tp", "pp", "cp", "ep"))
    dp = count(row, "dp", 0) or max(1, gpus // (tp * pp * cp))
    if tp * pp * cp * dp != gpus:
        raise refused(row, f"tp x pp x cp x dp = {tp * pp * cp * dp}, not the {gpus} devices")
    batch = count(row, "global_batch", 0) or size(row, "micro_batch") * dp
    shape = shape_of(row)
    job = Job(shape=shape, seq_len=size(row, "seq_len"), global_batch=max(batch, dp), stack=stack)
    precision = _precision(row)
    is_causal = facts.get("attention_flops") == "causal" or counts_causal_half(f"{row.get('table', '')};{notes}")
    return PublishedRun(
        id=name,
        source=name.rsplit("-", 1)[0],
        publisher=facts.get("publisher") or name.rsplit("-", 1)[0],
        table=row.get("table", ""),
        group=marks.get("grp", name),
        core=marks.get("core") == "1",
        job=job,
        cluster=cluster_of(row["gpu"] + ("-limited" if "power" in facts else ""), gpus, per_node, _network_text(row)),
        num_devices=gpus,
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep if row.get("ep") or not shape.moe_layers else None,
        zero=count(row, "zero_stage", 0) if row.get("zero_stage") else _zero(dp),
        shard=per_node if facts.get("shards") == "node" and dp % per_node == 0 else dp,
        sp=row.get("sequence_parallel") in ("1", "true", "True"),
        precision=precision,
        compile=row.get("compile") in ("1", "true", "True"),
        virtual_stages=count(row, "virtual_stages", 0) or (1 if facts.get("schedule") == "plain" or pp == 1 else None),
        interleaved=facts.get("schedule") == "interleaved" and pp > 1,
        microbatch=count(row, "micro_batch", 0) or None,
        recompute=_recompute(row.get("recompute", ""), stack, facts.get("selective", "")),
        measured_s=iteration_s(row, shape, gpus, is_causal),
        measured_gib=number(row, "measured_mem_gib"),
        counter=facts.get("counter", "").replace("unknown", ""),
        host_optimizer=facts.get("offload_optimizer") == "yes",
        host_activations=facts.get("offload_activations") == "yes",
        out_of_memory={"1": True, "0": False}.get(marks.get("OOM", "")),
        unread=tuple(unread(row)),
    )


def _network_text(row: Row) -> str:
    """Return the text in which a row may state rates of network and memory, in its original case."""
    text = "; ".join(row.get(name, "") for name in ("network", "source", "table", "notes"))
    known = known_network(text)
    return f"network {known} per node; {text}" if known else text


def _zero(dp: int) -> int | None:
    """Return the ZeRO stage of a row that does not specify it: 0 with one data-parallel rank, else None."""
    return None if dp > 1 else 0


def _recompute(word: str, stack: Stack, detail: str) -> str | None:
    """Return the policy that a row's word stands for: "selective" is attention alone in Megatron."""
    if word != "selective":
        return word if word in ("none", "full") else None
    if detail in ("half", "experts"):
        return detail
    return "selective" if detail == "norms" or stack.selective_half else "attention"


def _precision(row: Row) -> str:
    word = row.get("precision", "").lower()
    for narrow in ("fp8", "fp4"):
        if narrow in word:
            return narrow
    return word if word in PRECISIONS else "bf16"
