"""Plans as columns of numpy arrays, one row per plan, and the job that they are plans of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import units
from weft.planner.space.shape import Shape
from weft.planner.space.stack import Stack
from weft.spec.context import choose_cp_mode
from weft.spec.plan import AXES, RECOMPUTES, REDUCES, RESHARDS, SCHEDULES, Plan
from weft.spec.plan import PRECISIONS as PLAN_PRECISIONS
from weft.spec.shares import samples_per_microbatch

#: What a code in `Columns.precision` stands for; fp8 and fp4 (matmuls of layers alone) are no plans of the runtime yet.
PRECISIONS = (*PLAN_PRECISIONS, "fp8", "fp4")
#: What a code in `Columns.cp_mode` stands for: the ways of a plan's `cp_mode`, "auto" settled.
CP_MODES = ("ring", "gather", "ulysses")

#: What a code in `Columns.order` stands for: the axes from outermost to innermost, first the usual order.
ORDERS = tuple(itertools.permutations(AXES))

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
    recompute_blocks: so many of a rank's layers have the policy `recompute` (0: all). recompute_share: which part of
    the layers that is, 0 to 1. activation_budget: bytes that saved activations may take on one rank (inf: no budget;
    below 1: share of what recompute=none keeps).
    offload_*: share on the host, 0 to 1. order: of the axes, position in ORDERS.
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
    recompute_blocks: Ints
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
    order: Codes

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

    @property
    def reduces_once(self) -> NDArray[np.bool_]:
        """Rows that with zero=3 gather and reduce once in a step. Under a pipeline one pass is the step."""
        lets_go = self.reshard == RESHARDS.index("after_forward")
        return (self.reshard == RESHARDS.index("after_step")) | ((self.pp > 1) & ~lets_go)

    def stride(self, axis: str) -> Ints:
        """Ranks from one neighbour on an axis to the next: the product of the axes inside of it."""
        usual = self._inside(ORDERS[0], axis, slice(None))
        if not self.order.any():
            return usual
        found = usual.copy()
        for code in map(int, np.unique(self.order)):
            rows = self.order == code
            found[rows] = self._inside(ORDERS[code], axis, rows)
        return found

    @property
    def tp_stride(self) -> Ints:
        """Ranks from one tp neighbour to the next."""
        return self.stride("tp")

    def _inside(self, order: tuple[str, ...], axis: str, rows: Any) -> Ints:
        found: Ints = np.ones_like(np.asarray(self.tp[rows]))
        for name in order[order.index(axis) + 1 :]:
            found = found * getattr(self, name)[rows]
        return found

    @classmethod
    def make(cls, num_rows: int, **values: object) -> Columns:
        """Columns with the given arrays or scalars; what is not named has the value of the default plan."""
        filled: dict[str, object] = {}
        for name, (default, dtype) in _DEFAULTS.items():
            array: NDArray[Any] = np.asarray(values.pop(name, default), dtype=np.dtype(dtype))
            filled[name] = np.broadcast_to(array, (num_rows,)) if array.ndim == 0 else array
        if values:
            raise TypeError(f"no such columns: {', '.join(values)}")
        return cls(**filled)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, plans: Iterable[Plan], job: Job) -> Columns:
        """The columns of plans. A plan's microbatch is what the job's global batch leaves: at least one sequence."""
        rows = [_row(plan, job) for plan in plans]
        found = cls.make(len(rows), **{name: [row[name] for row in rows] for name in _DEFAULTS} if rows else {})
        return found.with_recompute_share(job.shape.layers)

    def with_recompute_share(self, num_layers: int) -> Columns:
        """The share of the layers that blocks by number are of the fullest rank's."""
        if not self.recompute_blocks.any():
            return self
        chunks = np.where(self.pp > 1, self.pp * self.virtual_stages, 1)
        fullest = self.virtual_stages * -(-num_layers // chunks)
        share = np.where(self.recompute_blocks > 0, self.recompute_blocks / np.maximum(1, fullest), 1.0)
        return replace(self, recompute_share=np.minimum(1.0, share))

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
            pp=int(self.pp[row]),
            dp_replicate=int(self.dp_replicate[row]),
            dp_shard=int(self.dp_shard[row]),
            cp=int(self.cp[row]),
            tp=int(self.tp[row]),
            ep=int(self.ep[row]),
            zero=int(self.zero[row]),
            reshard=RESHARDS[int(self.reshard[row])],
            sp=bool(self.sp[row]),
            order=_order_words(self, row),
            cp_mode=CP_MODES[int(self.cp_mode[row])] if self.cp[row] > 1 else Plan().cp_mode,
            schedule=SCHEDULES[int(self.schedule[row])],
            microbatches=passes if piped else 1,
            virtual_stages=int(self.virtual_stages[row]),
            accumulation=1 if piped else passes,
            precision=PRECISIONS[int(self.precision[row])],
            reduce=REDUCES[int(self.reduce[row])],
            recompute=_recompute_text(self, row),
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
    "recompute_blocks": (0, np.int64),
    "recompute_share": (1.0, np.float64),
    "activation_budget": (np.inf, np.float64),
    "cp_mode": (0, np.uint8),
    **dict.fromkeys(("offload_optimizer", "offload_params", "offload_activations"), (0.0, np.float64)),
    "precision": (PRECISIONS.index("bf16"), np.uint8),
    "reduce": (0, np.uint8),
    "compile": (0, np.bool_),
    "reshard": (0, np.uint8),
    "order": (0, np.uint8),
}


def _row(plan: Plan, job: Job) -> dict[str, object]:
    passes = plan.microbatches_per_step
    recompute, budget = _recompute_parts(plan.recompute)
    return {
        **{name: getattr(plan, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sp")},
        "schedule": SCHEDULES.index(plan.schedule),
        "virtual_stages": plan.virtual_stages,
        "microbatch": max(1, samples_per_microbatch(job.global_batch, plan.dp_size, passes)),
        "num_micro": passes,
        "recompute": RECOMPUTES.index(recompute),
        "recompute_blocks": plan.recompute_blocks,
        "recompute_share": 1.0,
        "activation_budget": budget,
        "cp_mode": CP_MODES.index(settled_cp_mode(plan, job)) if plan.cp > 1 else 0,
        "offload_optimizer": plan.offload_share("optimizer"),
        "offload_params": plan.offload_share("params"),
        "offload_activations": plan.offload_share("activations"),
        "precision": PRECISIONS.index(plan.precision),
        "reduce": REDUCES.index(plan.reduce),
        "compile": plan.compile,
        "reshard": RESHARDS.index(plan.reshard),
        "order": ORDERS.index(plan.axis_order),
    }


def settled_cp_mode(plan: Plan, job: Job) -> str:
    """The way of context parallelism that the runtime takes: "auto" settled by the job's shape."""
    shape = job.shape
    return choose_cp_mode(plan.cp_mode, plan.cp, shape.heads, shape.kv_heads, job.seq_len, plan.tp)


def settled(plan: Plan, job: Job) -> Plan:
    """The plan with its way of context parallelism said where it has any, and not said where it has none."""
    mode = settled_cp_mode(plan, job) if plan.cp > 1 else Plan().cp_mode
    return plan if plan.cp_mode == mode else plan.replace(cp_mode=mode)


def _recompute_parts(text: str) -> tuple[str, float]:
    """Policy and budget of a plan's recompute: "50%" -> ("none", 0.5), "12GiB" -> ("none", bytes)."""
    policy = text.partition(":")[0]
    if policy in RECOMPUTES:
        return policy, np.inf
    if text.endswith("%"):
        return "none", float(text[:-1]) / 100
    if text.startswith(("0.", ".")):
        return "none", float(text)
    return "none", float(units.parse_bytes(text))


def _recompute_text(columns: Columns, row: int) -> str:
    policy, budget = RECOMPUTES[int(columns.recompute[row])], float(columns.activation_budget[row])
    if np.isinf(budget):
        blocks = int(columns.recompute_blocks[row])
        return f"{policy}:{blocks}" if blocks else policy
    return f"{budget * 100:.0f}%" if budget < 1 else f"{budget / 2**30:.2f}GiB"


def _order_words(columns: Columns, row: int) -> tuple[str, ...]:
    """The axes in use where they stand in another order than the usual one."""
    orders = (tuple(AXES), ORDERS[int(columns.order[row])])
    usual, found = (tuple(axis for axis in order if getattr(columns, axis)[row] > 1) for order in orders)
    return () if found == usual else found


def _offload_words(columns: Columns, row: int) -> tuple[str, ...]:
    words: list[str] = []
    for name in ("optimizer", "params", "activations"):
        share = float(getattr(columns, f"offload_{name}")[row])
        if share > 0:
            words.append(name if share >= 1 else f"{name}:{share:.2g}")
    return tuple(words)
