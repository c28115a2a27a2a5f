"""The Plan: how one model is distributed over the ranks. An immutable dataclass without torch.

Text form: the fields that differ from their defaults, in field order, such as "dp_shard=4 tp=2 zero=3".
`Plan.parse(plan.format()) == plan` for every plan. `plan_rules.py` has the rules for combinations.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from weft.config.fields import plan_values as kinds
from weft.config.fields.memory_values import NamedShares, PolicyOrBudget, share_of, share_on
from weft.config.fields.plan_text import (
    FINE_SHARES,
    MEASURED_SHARES,
    SHARES,
    Counts,
    ShareList,
    orders_near,
    read_values,
    recomputes,
    recomputes_near,
    schedules,
    sizes_tried,
    split_plan,
    unknown_fields,
)  # fmt: skip
from weft.config.fields.plan_values import described, descriptions
from weft.config.fields.wire_formats import COMPRESSES, GATHERS, WIRES, sync_of
from weft.config.partitioning import CP_MODES, CP_WAYS
from weft.errors import PlanError, Problem

#: Mesh axes, outermost first by default. `ep` is not a separate axis: it reuses the ranks of dp_shard x cp x tp.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Precisions that the planner can estimate. Codes are indices, so append new ones. The runtime has no fp4.
PLANNED_PRECISIONS = ("fp32", "bf16", "fp16", "fp64", "fp8", "fp4", "tf32")
PRECISIONS = tuple(name for name in PLANNED_PRECISIONS if name != "fp4")
#: Wire formats of gradients, including those registered later; "fp32" is the format of the master weights.
REDUCES = WIRES
RECOMPUTES = ("none", "full", "attention", "selective")
OFFLOADS = ("optimizer", "params", "activations")
#: When zero=3 frees gathered parameters: from the least memory to the least communication.
RESHARDS = ("after_forward", "after_backward", "after_step")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_interleaved", "zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is distributed, with one field per choice.

    `PLAN_FIELDS` has the descriptions of the fields by name. docs/reference/settings.md is generated from them.

    Raises:
        PlanError: at construction; the message names every invalid field.
    """

    # The fields in the order in which they are printed.
    # fmt: off
    pp: int = described(
        kinds.Integer(star=True), 1, "Pipeline parallel: ranks that share the model's blocks; a mesh axis.",
        tried=sizes_tried, asks="use", probed=True,
    )
    dp_replicate: int = described(kinds.Integer(star=True), 1,
        "Data parallel: replicas that hold the same states and read different samples; a mesh axis.",
        tried=sizes_tried,
    )
    dp_shard: int = described(kinds.Integer(star=True), 1,
        "Data parallel: ranks that shard states by `zero` and read different samples; a mesh axis.",
        tried=sizes_tried,
    )
    cp: int = described(
        kinds.Integer(star=True), 1, "Context parallel: ranks that share each sequence; a mesh axis.",
        tried=sizes_tried, asks="use", probed=True,
    )
    tp: int = described(
        kinds.Integer(star=True), 1, "Tensor parallel: ranks that share each layer; a mesh axis.", tried=sizes_tried,
        asks="use", probed=True,
    )
    ep: int = described(kinds.Integer(), 1,
        "Expert parallel: ranks that share the experts of a layer; a second view over dp_shard x cp x tp.",
        tried=sizes_tried, asks="use", probed=True,
    )
    order: tuple[str, ...] = described(
        kinds.AxisOrder(AXES), (),
        "Mesh axes in use, outermost first; by default in the order of this table. Neighbors on the innermost axis "
        "are neighbors on the machine.", nearby=orders_near, divides_work=False,
        tried=((), ("tp", "dp_shard"), ("tp", "pp"), ("cp", "dp_replicate"), ("dp_shard", "dp_replicate")),
    )
    shares: tuple[int, ...] = described(ShareList(), (),
        "Share of each data-parallel rank in the samples of a step, for devices of different speeds (`3+3+1+1`); by "
        "default equal parts. Samples are divided by largest remainder. auto: measured before the first step. It "
        "does not change results.", needs=("dp_replicate", "dp_shard"), tried=((),),
        # Shares depend on the batch and the ranks: tests/parity/test_shares.py
    )
    zero: int = described(
        kinds.Integer(0, 3, rule="ZeRO has stages 0 to 3. Use zero=0, 1, 2 or 3.", dtype="uint8"), 0,
        "ZeRO stage: what is sharded over dp_shard and cp. 0: nothing; 1: optimizer states; 2: also gradients; 3: "
        "also parameters.", needs=("dp_shard", "cp"), tried=(0, 1, 2, 3), asks="value", probed=True,
        searched=((1, RESHARDS[0]), (2, RESHARDS[0]), *((3, name) for name in RESHARDS)),
    )
    shard_shares: tuple[int, ...] = described(ShareList(measured=False), (),
        "Share of each rank of dp_shard in the optimizer states of zero=1 and 2, and in the gradients of zero=2, for "
        "devices with different memory (`3+1`); by default equal parts. Collectives pad parts to the largest one. It "
        "does not change results.", needs=("dp_shard",), tried=((),),
        # Shares depend on the ranks: tests/parity/test_shares.py
    )
    reshard: str = described(
        kinds.ReshardPolicy(RESHARDS), RESHARDS[0],
        "When zero=3 frees gathered parameters: after_forward (least memory), after_backward (one gather per pass), "
        "after_step (one gather and one gradient reduction per step). Under a pipeline the last two are the same. "
        "after_forward:8 keeps an eighth of them on each of 8 neighboring ranks of dp_shard for backward's gathers, "
        "which then stay on one host.",
        needs=("dp_shard", "cp"), searched_with="zero", tried=RESHARDS, asks="value",
    )
    sp: bool = described(
        kinds.Switch(), False, "Sequence parallelism between tensor-parallel regions.", needs=("tp",),
        searched=(False, True), tried=(False, True), asks="use", probed=True,
    )
    tp_chunks: int = described(
        kinds.Integer(dtype="int32"), 1,
        "Chunks of each rank's tokens under `sp=on`: sharded layers multiply one chunk while another is communicated "
        "over tp. `auto` never chooses more than 1.", needs=("tp",), tried=(1, 3), divides_work=False,
    )
    cp_mode: str = described(
        kinds.OneOf(CP_MODES, open="auto", codes=CP_WAYS), "auto",
        "Attention over a sequence that cp shards: gather (all-gathers keys and values), ring (passes them "
        "around, overlapped with compute), ulysses (exchanges tokens for heads by all_to_all), auto (chosen by "
        "heads, sequence length and memory).", needs=("cp",), searched=CP_WAYS, tried=CP_MODES, asks="value",
        probed=True,
    )
    schedule: str = described(
        kinds.OneOf(SCHEDULES), "1f1b", "Order of the pipeline's forward and backward passes.", needs=("pp",),
        searched=schedules, tried=SCHEDULES, asks="value",
    )
    microbatches: int = described(
        kinds.PassCount(), 1, "Microbatches of an optimizer step under a pipeline.", needs=("pp",), divides_work=False,
        tried=lambda ranks, passes: sorted({*passes, ranks, 2 * ranks}),  # some schedules need two for each stage
    )
    virtual_stages: int = described(
        kinds.Integer(), 1, "Stages on each rank of the pipeline.", needs=("pp",), searched_with="schedule",
        tried=(1, 2), asks="value",
    )
    split: tuple[int, ...] = described(Counts(), (),
        "Number of the model's blocks in each stage, in order (`3+4+4+3`); by default stages of equal work.",
        needs=("pp",), tried=((),), asks="value",  # uneven splits depend on the model: tests/parity/test_pipeline.py
    )
    accumulation: int = described(
        kinds.PassCount(), 1, "Gradient accumulation: microbatches of an optimizer step without a pipeline.",
        tried=lambda ranks, passes: passes, divides_work=False, asks="value", probed=True,
    )
    precision: str = described(
        kinds.OneOf(PRECISIONS, codes=PLANNED_PRECISIONS, instead="bf16"), "fp32",
        "Format of forward and backward; master weights and optimizer states stay fp32 (fp64 under fp64). fp8 is bf16 "
        "with float8 products of the linear layers in blocks; tf32 is fp32 with the inputs of products and "
        "convolutions rounded to 10 bits of mantissa, on GPUs that support it.",
        searched=lambda facts: (*facts.half_formats[:1], "fp32"), tried=("fp64",), divides_work=False,
    )
    reduce: str = described(
        kinds.OneOf(REDUCES), "fp32",
        "Format of gradients in collectives: fp32 (fp64 under fp64) or bf16, which halves the bytes. Gradients are "
        "rounded only for the collective; Weft accumulates and applies them in fp32.", tried=("fp32",),
        divides_work=False,  # bf16 rounds: tests/parity/test_reduce.py
    )
    compress: str = described(
        kinds.Compression(COMPRESSES), "none",
        "For slow links: format of gradients over the outermost data axis only (dp_replicate, or dp_shard if "
        "dp_replicate is 1). int8: one byte per value, rounded stochastically, one scale per 256. int4: half a byte, "
        "one scale per 64. powersgd:4: each matrix as two factors of rank 4, after the first steps "
        "(`train.compress_after`). The last two add their error to the next step. top:0.02, under sync=average or "
        "diloco: the largest 2 % of each 4096 values; the others are added at the next synchronization. It changes "
        "results; `auto` never chooses it.", tried=("none",),
        divides_work=False,  # it rounds: tests/parity/test_compress.py
    )
    gather: str = described(
        kinds.OneOf(GATHERS), "none",
        "For slow links: format of gathered weights. int8, for zero=3: one byte per value, rounded to nearest, one "
        "scale per 256 of a row; vectors are sent exactly. diff4, for zero=1 and 2: differences to the weights that "
        "all ranks have, half a byte each, one scale per 64; the rounding error is added to the next difference. fp8, "
        "for zero=3 and precision=fp8: weights as these products round them, one byte per value, one scale per row; "
        "others are sent exactly. Masters are never rounded. It changes results; `auto` never chooses it.",
        needs=("dp_shard", "cp"), tried=("none",),
        divides_work=False,  # it rounds: tests/parity/test_gather.py
    )
    sync: str = described(
        kinds.SyncEvery(), "step",
        "For slow links: synchronization of the replicas of dp_replicate. step: gradients are reduced in every step. "
        "average:H: replicas train separately, and every H steps weights are averaged. diloco:H: their mean change "
        "is the gradient of an outer step with momentum (`train.outer_lr`, `train.outer_momentum`); compress=int8 "
        "sends it in bytes. diloco:50/4: in four fragments, each sent while the next step computes. It is another "
        "algorithm; `auto` never chooses it.",
        needs=("dp_replicate",), tried=("step",),
        divides_work=False,  # it changes training: tests/parity/test_sync.py
    )
    recompute: str = described(
        PolicyOrBudget(RECOMPUTES), "none",
        "Activations that backward recomputes: a policy, a policy for the first blocks of each rank only, a policy for "
        "each rank of a pipeline (`full+none`), or a memory budget for the kept activations.",
        searched=recomputes, nearby=recomputes_near, divides_work=False, asks="value", probed=True,
        tried=("none", "full", "selective", "attention", "full:1"),
    )
    mlp_tiles: int = described(
        kinds.Integer(dtype="int32"), 1,
        "Tiles of each rank's tokens in which the MLPs of the blocks are computed. Backward computes a tile again, so "
        "that intermediate activations exist for one tile at a time. `auto` never chooses more than 1.", tried=(1,),
        divides_work=False,  # not every model has MLPs that are known: tests/parity/test_mlp_tiles.py
    )
    offload: tuple[str, ...] = described(
        NamedShares(OFFLOADS), (), "Tensors to keep in host memory. In a pipeline, optimizer may have a share for each "
        "rank of pp (`optimizer:1/0`).",
        searched=((), ("optimizer",), ("params",), ("activations",), ("optimizer", "activations"),
                  ("params", "activations")),
        tried=((), ("optimizer",), ("params",), ("activations",), ("optimizer:0.5", "activations")),
        nearby=lambda plan, facts, fine: ((share,) for share in (FINE_SHARES if fine else SHARES)),
        divides_work=False, asks="value",
    )
    compile: bool = described(
        kinds.Switch(), False, "Compile blocks with torch.compile.", searched=(False, True), divides_work=False,
        tried=(False,),  # compiling deep models is slow, so few plans do: tests/parity/test_compile.py
    )
    graphs: bool = described(
        kinds.Switch(), False, "Record forward with backward, and the optimizer's step, as CUDA graphs: for models so "
        "small that the host takes longer to launch kernels than the GPU to run them.", divides_work=False,
        tried=(False,),  # needs a GPU, or a recorder: tests/parity/test_graphs.py
    )
    # fmt: on

    def __post_init__(self) -> None:
        _fill(self, dict(zip(PLAN_FIELDS, _all_values(self), strict=True)))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the mesh axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def measures_shares(self) -> bool:
        """True if the shares of the data-parallel ranks are measured before the first step."""
        return self.shares == MEASURED_SHARES

    @property
    def microbatches_per_step(self) -> int:
        """Number of microbatches per optimizer step on one data-parallel rank."""
        return self.microbatches if self.pp > 1 else self.accumulation

    @property
    def second_shards(self) -> int:
        """Number of adjacent ranks of dp_shard that share secondary shards for backward (zero=3); 0: none."""
        return int(self.reshard.partition(":")[2] or 0)

    @property
    def sync_method(self) -> str:
        """When replicas synchronize: "step" (gradients in every step), "average" or "diloco"."""
        return sync_of(self.sync)[0]

    @property
    def sync_every(self) -> int:
        """Number of steps between synchronizations of replicas."""
        return sync_of(self.sync)[1]

    @property
    def sync_fragments(self) -> int:
        """Number of fragments of the parameters that are synchronized one after another during steps.

        0: all parameters are synchronized together, while no rank computes.
        """
        return sync_of(self.sync)[2]

    @property
    def recompute_policy(self) -> str:
        """The recompute policy, one of RECOMPUTES, "budget", or "by_rank" if the ranks of a pipeline have their own."""
        if "+" in self.recompute:
            return "by_rank"
        name = self.recompute.partition(":")[0]
        return name if name in RECOMPUTES else "budget"

    @property
    def recompute_blocks(self) -> int:
        """Number of each rank's first blocks that use the policy; 0: all blocks, or a policy for each rank."""
        return 0 if "+" in self.recompute else int(self.recompute.partition(":")[2] or 0)

    def offload_share(self, name: str) -> float:
        """Return the share of "optimizer", "params" or "activations" in host memory, 0.0 to 1.0.

        If the ranks of a pipeline have their own shares, it is the largest.
        """
        return share_of(self.offload, name)

    @property
    def differs_by_stage(self) -> bool:
        """True if the ranks of the pipeline have their own recompute policies or offloaded shares."""
        return "+" in self.recompute or any("/" in part for part in self.offload)

    def on_stage(self, rank: int) -> Plan:
        """Return the plan with the recompute policy and the offloaded shares of one rank of the pipeline."""
        if not self.differs_by_stage:
            return self
        policies = self.recompute.split("+")
        return self.replace(recompute=policies[min(rank, len(policies) - 1)], offload=share_on(self.offload, rank))

    @property
    def axis_order(self) -> tuple[str, ...]:
        """All mesh axes, outermost first. Axes that are missing in `order` have one rank and precede the others."""
        return (*(axis for axis in AXES if axis not in self.order), *self.order)

    def axis_sizes(self) -> dict[str, int]:
        """Return the size of each mesh axis, outermost first."""
        return {axis: getattr(self, axis) for axis in self.axis_order}

    def replace(self, **changes: object) -> Plan:
        """Return a new plan with some fields changed.

        Raises:
            PlanError: for an unknown field, or a value that its field does not accept.
        """
        problems = unknown_fields(changes, PLAN_FIELDS)
        if problems:
            raise PlanError(problems)
        found = Plan.of_normal(_all_values(self))  # the other values were checked before
        _fill(found, changes)
        return found

    @classmethod
    def of_normal(cls, values: Iterable[object]) -> Plan:
        """Return the plan with the given values, one per field in order, which are already in normal form."""
        found = object.__new__(cls)
        for name, value in zip(PLAN_FIELDS, values, strict=True):
            object.__setattr__(found, name, value)
        return found

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> Plan:
        """Read the text form. One mesh axis may be `*`: it gets the ranks that the other axes leave.

        If that is one rank for `dp_shard=*`, zero becomes 0, so "dp_shard=* zero=3" works for any number of ranks.
        zero=3 with offload=params is kept, since it loads parameters block by block on one rank too.

        world_size: number of ranks; required if the text has a `*`.

        Raises:
            PlanError: for an unknown field, a bad value, a repeated field, or a `*` that does not divide evenly.
        """
        return cls._close(text, world_size)

    @classmethod
    def from_mapping(cls, table: Mapping[str, object], world_size: int | None = None) -> Plan:
        """Read a table such as `[plan]` in TOML: {"dp_shard": 4, "tp": 2}. Values may be text.

        Raises:
            PlanError: as in `parse`.
        """
        return cls._close(table, world_size)

    @classmethod
    def _close(cls, source: str | Mapping[str, object], world_size: int | None) -> Plan:
        plan, open_axis = cls.read_open(source)
        if open_axis is None:
            return plan
        if world_size is None:
            rule = "the number of ranks is not known here. Write the number."
            raise PlanError([Problem.of(open_axis, "*", rule)])
        rest = plan.world_size  # the open axis has size 1 in the plan
        if world_size < 1 or world_size % rest:
            rule = f"the other axes need {rest} ranks, and {world_size} is not a multiple of {rest}. Change them, or "
            raise PlanError([Problem.of(open_axis, "*", f"{rule}start a multiple of {rest} ranks.")])
        found: dict[str, object] = {open_axis: world_size // rest}
        streams = plan.zero == 3 and plan.offload_share("params") > 0
        if open_axis == "dp_shard" and world_size == rest and plan.cp == 1 and plan.zero and not streams:
            found |= {"zero": 0, "reshard": PLAN_FIELDS["reshard"].default}
        return plan.replace(**found)

    @classmethod
    def read_open(cls, source: str | Mapping[str, object]) -> tuple[Plan, str | None]:
        """Read text or a table with an unknown number of ranks.

        Return the plan with 1 for `*`, and the name of that axis.

        Raises:
            PlanError: with every mistake found.
        """
        values, open_axis = read_values(source, PLAN_FIELDS)
        return cls(**values), open_axis

    def format(self, open_axis: str | None = None) -> str:
        """Return the one-line text form; the empty string is the default plan (one rank, fp32).

        open_axis: a mesh axis to be written as `*`, so that `format(*read_open(text))` keeps the meaning.
        """
        words: list[str] = []
        for name, field in PLAN_FIELDS.items():
            value = getattr(self, name)
            if name == open_axis:
                words.append(f"{name}=*")
            elif value != field.default:
                words.append(f"{name}={field.kind.write(value)}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.format() or "dp_replicate=1"


#: Description of each field of the plan by name, in printing order.
PLAN_FIELDS = descriptions(Plan)
_all_values = operator.attrgetter(*PLAN_FIELDS)


def plan_fields() -> tuple[str, ...]:
    """Return the names of the plan's fields, in the order in which they are printed."""
    return tuple(PLAN_FIELDS)


def _fill(plan: Plan, values: Mapping[str, object]) -> None:
    """Set fields of a plan to values in their normal form. Raise PlanError with every invalid value."""
    problems: list[Problem] = []
    for name, value in values.items():
        try:
            # Tuples are checked without the cache, because (1, 2) == (True, 2).
            check = _checked_once if isinstance(value, (str, int)) else _checked
            object.__setattr__(plan, name, check(name, value))
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)


def _checked(name: str, value: object) -> Any:
    return PLAN_FIELDS[name].kind.check(name, value)


_checked_once = functools.lru_cache(maxsize=4096, typed=True)(_checked)  # a search checks thousands of values


# Plans with unassigned fields, for rules.

#: Result of `OpenPlan.decided` for a field that is not assigned yet.
MISSING = object()


class Undecided(Exception):
    """Raised when a rule reads a field that is not assigned yet."""


class OpenPlan:
    """A plan that looks up its fields on access, with the properties and methods of Plan.

    reads: the assigned fields that were read. Reading an unassigned field raises Undecided.
    """

    __slots__ = ("reads",)

    def __init__(self) -> None:
        self.reads = set[str]()

    def decided(self, name: str) -> Any:
        """Return the value of a field, or MISSING."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = self.decided(name)
        if value is not MISSING:
            self.reads.add(name)
            return value
        known = vars(Plan).get(name)
        if isinstance(known, property) and known.fget is not None:
            return known.fget(self)
        if isinstance(known, FunctionType):
            return functools.partial(known, self)
        raise Undecided(name)


def auto_fields(text: str) -> dict[str, object]:
    """Return the fields that the user fixed in an auto plan ("auto zero=3"), with their values.

    Raises:
        PlanError: if they cannot be read.
    """
    words, problems = split_plan(text.partition("auto")[2])
    if problems:
        raise PlanError(problems)
    plan = Plan.from_mapping(words)
    return {name: getattr(plan, name) for name in words}
