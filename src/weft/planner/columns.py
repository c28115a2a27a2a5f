"""Plans as columns of numpy arrays, one row per plan, and the job that they are plans of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from weft import units
from weft.planner.shape import Shape
from weft.planner.stack import Stack
from weft.spec.plan import PRECISIONS as PLAN_PRECISIONS
from weft.spec.plan import RECOMPUTES, REDUCES, RESHARDS, SCHEDULES, Plan

#: What a code in `Columns.precision` stands for; fp8 and fp4 (matmuls of layers alone) are no plans of the runtime yet.
PRECISIONS = (*PLAN_PRECISIONS, "fp8", "fp4")
#: What a code in `Columns.cp_mode` stands for.
CP_MODES = ("ring", "all_gather", "ulysses")

Ints = NDArray[np.int64]
Codes = NDArray[np.uint8]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, whatever the plan: the model, the batch, the optimizer, and the software.

    seq_len: tokens of a sequence. global_batch: sequences of one optimizer step.
    optimizer: "adamw", "sgd" or "muon".
    """

    shape: Shape
    seq_len: int
    global_batch: int
    optimizer: str = "adamw"
    stack: Stack = field(default_factory=Stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One row per plan. Sizes as in `Plan`.

    schedule, recompute, precision, reduce, reshard, cp_mode: codes, positions in SCHEDULES, RECOMPUTES, PRECISIONS,
    REDUCES, RESHARDS, CP_MODES. microbatch: sequences of one pass on one data-parallel rank. num_micro: passes of one
    step.
    recompute_share: part of the layers to which `recompute` applies, 0 to 1. activation_budget: bytes that saved
    activations may take on one rank (inf: no budget; below 1: share of what recompute=none keeps).
    offload_*: share on the host, 0 to 1. tp_stride: ranks from one tp neighbour to the next.
    """

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    zero: Codes
    sp: NDArray[np.bool_]
    schedule: Codes
    virtual_stages: Ints
    microbatch: Ints
    num_micro: Ints
    recompute: Codes
    recompute_share: Floats
    activation_budget: Floats
    cp_mode: Codes
    offload_optimizer: Floats
    offload_params: Floats
    offload_activations: Floats
    precision: Codes
    reduce: Codes
    compile: NDArray[np.bool_]
    reshard: Codes
    tp_stride: Ints

    def __len__(self) -> int:
        return len(self.pp)

    def __getitem__(self, rows: NDArray[np.bool_] | Ints | slice) -> Columns:
        """The rows of a mask, of indices or of a slice."""
        return replace(self, **{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    @property
    def world_size(self) -> Ints:
        """Ranks of each plan."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> Ints:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def make(cls, num_rows: int, **values: object) -> Columns:
        """Columns with the given arrays or scalars; what is not named has the value of the default plan."""
        filled: dict[str, object] = {}
        for name, (default, dtype) in _DEFAULTS.items():
            array = np.asarray(values.pop(name, default), dtype=dtype)
            filled[name] = np.broadcast_to(array, (num_rows,)) if array.ndim == 0 else array
        if values:
            raise TypeError(f"no such columns: {', '.join(values)}")
        return cls(**filled)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, plans: Iterable[Plan], job: Job) -> Columns:
        """The columns of plans. A plan's microbatch is what the job's global batch leaves: at least one sequence."""
        rows = [_row(plan, job) for plan in plans]
        return cls.make(len(rows), **{name: [row[name] for row in rows] for name in _DEFAULTS} if rows else {})

    @classmethod
    def concatenate(cls, parts: Iterable[Columns]) -> Columns:
        """The rows of several columns, one after another."""
        tables = list(parts)
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in _DEFAULTS})

    def plan(self, row: int) -> Plan:
        """One row as a plan. Raises PlanError where the runtime has no word for it (fp8)."""
        piped = int(self.pp[row]) > 1
        passes = int(self.num_micro[row])
        return Plan(
            **{name: int(getattr(self, name)[row]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
            zero=int(self.zero[row]),
            reshard=RESHARDS[self.reshard[row]],
            sp=bool(self.sp[row]),
            schedule=SCHEDULES[self.schedule[row]],
            microbatches=passes if piped else 1,
            virtual_stages=int(self.virtual_stages[row]),
            accumulation=1 if piped else passes,
            precision=PRECISIONS[self.precision[row]],
            reduce=REDUCES[self.reduce[row]],
            recompute=_recompute_text(RECOMPUTES[self.recompute[row]], float(self.activation_budget[row])),
            offload=_offload_words(self, row),
            compile=bool(self.compile[row]),
        )


_DEFAULTS: dict[str, tuple[float, type]] = {
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), (1, np.int64)),
    "zero": (0, np.uint8),
    "sp": (0, np.bool_),
    "schedule": (SCHEDULES.index("1f1b"), np.uint8),
    **dict.fromkeys(("virtual_stages", "microbatch", "num_micro"), (1, np.int64)),
    "recompute": (RECOMPUTES.index("none"), np.uint8),
    "recompute_share": (1.0, np.float64),
    "activation_budget": (np.inf, np.float64),
    "cp_mode": (0, np.uint8),
    **dict.fromkeys(("offload_optimizer", "offload_params", "offload_activations"), (0.0, np.float64)),
    "precision": (PRECISIONS.index("bf16"), np.uint8),
    "reduce": (0, np.uint8),
    "compile": (0, np.bool_),
    "reshard": (0, np.uint8),
    "tp_stride": (1, np.int64),
}


def _row(plan: Plan, job: Job) -> dict[str, object]:
    passes = plan.microbatches_per_step
    recompute, budget = _recompute_parts(plan.recompute)
    return {
        **{name: getattr(plan, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sp")},
        "schedule": SCHEDULES.index(plan.schedule),
        "virtual_stages": plan.virtual_stages,
        "microbatch": max(1, job.global_batch // (plan.dp_size * passes)),
        "num_micro": passes,
        "recompute": RECOMPUTES.index(recompute),
        "recompute_share": 1.0,
        "activation_budget": budget,
        "cp_mode": 0,
        "offload_optimizer": plan.offload_share("optimizer"),
        "offload_params": plan.offload_share("params"),
        "offload_activations": plan.offload_share("activations"),
        "precision": PRECISIONS.index(plan.precision),
        "reduce": REDUCES.index(plan.reduce),
        "compile": plan.compile,
        "reshard": RESHARDS.index(plan.reshard),
        "tp_stride": 1,
    }


def _recompute_parts(text: str) -> tuple[str, float]:
    """Policy and budget of a plan's recompute: "50%" -> ("none", 0.5), "12GiB" -> ("none", bytes)."""
    if text in RECOMPUTES:
        return text, np.inf
    if text.endswith("%"):
        return "none", float(text[:-1]) / 100
    if text.startswith(("0.", ".")):
        return "none", float(text)
    return "none", float(units.parse_bytes(text))


def _recompute_text(policy: str, budget: float) -> str:
    if np.isinf(budget):
        return policy
    return f"{budget * 100:.0f}%" if budget < 1 else f"{budget / 2**30:.2f}GiB"


def _offload_words(columns: Columns, row: int) -> tuple[str, ...]:
    words = []
    for name in ("optimizer", "params", "activations"):
        share = float(getattr(columns, f"offload_{name}")[row])
        if share > 0:
            words.append(name if share >= 1 else f"{name}:{share:.2g}")
    return tuple(words)
