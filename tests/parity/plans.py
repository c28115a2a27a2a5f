"""The matrices: which models are trained under which plans, on ranks that are there, against PyTorch alone.

Plans are listed from the rules. One cell is a plan and a subject. `full_matrix` is deep: few models under everything
that a rank may do with its part. `broad_matrix` is broad: many kinds of models under every layout. The gate runs a
choice of cells in which all pairs occur; `pytest tests/parity --all-plans` runs every one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.memory.links import LateLink
from tests.parity.cases import GPT2, LLAMA, PackedCase, cases
from tests.parity.families import FAMILIES, FamilyCase, shape_of
from tests.parity.moe_cases import MOE, MoECase, hugging_face_moe_cases, moe_cases
from weft.config.decoder_shape import DecoderSpec
from weft.config.plan import Plan, plan_fields
from weft.memory import activation_offload as activations
from weft.memory import offload
from weft.memory.offload import HostPool
from weft.verify.matrix import covering, layout_of, legal, pairs, row_of
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case, train_plain
from weft.verify.rank_pool import RankPool

RTOL = 1e-10
#: As many heads as four ranks of Ulysses need.
WIDE_GPT2 = dataclasses.replace(GPT2, num_heads=4, num_kv_heads=4)
MULTI_QUERY = dataclasses.replace(LLAMA, num_kv_heads=1, tied=False)
#: The axes that a model without layers and heads has no place for.
ONLY_DATA = frozenset({"pp", "cp", "tp", "ep"})


@dataclass(frozen=True)
class Subject:
    """A case, and what the rules may know of it. without: axes that it cannot be laid over."""

    case: Case
    shape: DecoderSpec | None = None
    without: frozenset[str] = frozenset()

    def plans(self, num_ranks: int, **only: Sequence[object]) -> list[Plan]:
        """Every legal plan for it."""
        size = (getattr(self.case, "global_batch", None), getattr(self.case, "seq_len", None))
        values = {name: tuple(given) for name, given in {**self.left_out(), **only}.items()}
        return list(_legal(num_ranks, self.shape, size, tuple(sorted(values.items()))))

    def left_out(self) -> dict[str, tuple[object, ...]]:
        """The one value of each axis that it cannot be laid over."""
        return {name: (False,) if name == "sp" else (1,) for name in self.without}


@functools.cache
def _legal(
    num_ranks: int,
    shape: DecoderSpec | None,
    size: tuple[int | None, int | None],
    only: tuple[tuple[str, tuple[object, ...]], ...],
) -> list[Plan]:
    """Many models have one shape, and the same plans."""
    return legal(num_ranks, model=shape, global_batch=size[0], seq_len=size[1], **dict(only))


class Cell(NamedTuple):
    """One training to compare."""

    subject: str
    plan: Plan


def subjects() -> dict[str, Subject]:
    """The four models of the full matrix."""
    chosen = cases()
    return {
        "decoder": Subject(chosen["decoder"], LLAMA),
        "hf-qwen2": Subject(chosen["hf-qwen2"], LLAMA),
        "hf-gpt2": Subject(chosen["hf-gpt2"], GPT2),
        "cnn": Subject(chosen["cnn"], without=ONLY_DATA),
    }


def families() -> dict[str, Subject]:
    """All Hugging Face families."""
    return {name: Subject(FamilyCase(name), shape_of(family), family.without) for name, family in FAMILIES.items()}


def packed() -> dict[str, Subject]:
    """Documents in one sequence, told by ids or by positions; padding that a mask shows; keys that heads share."""
    sizes = {"num_steps": 2, "global_batch": 8}
    return {
        "packed": Subject(DecoderCase(LLAMA, **sizes, documents=True), LLAMA),
        "gpt2-packed": Subject(DecoderCase(WIDE_GPT2, **sizes, documents=True, optimizer="sgd"), WIDE_GPT2),
        "multi-query": Subject(DecoderCase(MULTI_QUERY, **sizes, masked=0.0, max_grad_norm=0.0), MULTI_QUERY),
        "llama-packed": Subject(PackedCase(LLAMA, **sizes, kind="llama", documents=True), LLAMA),
        "qwen2-packed": Subject(PackedCase(LLAMA, **sizes, kind="qwen2", documents=True), LLAMA),
        "hf-gpt2-padded": Subject(PackedCase(WIDE_GPT2, **sizes, kind="gpt2", padded=True), WIDE_GPT2),
    }


def experts() -> dict[str, Subject]:
    """Models with experts: the project's with every way of balancing and dropping, and Hugging Face's."""
    foreign = dataclasses.replace(MOE, num_layers=2, num_shared_experts=0, first_moe_layer=0, tied=False)
    return {
        **{f"moe-{name}": Subject(case, case.spec) for name, case in moe_cases().items() if isinstance(case, MoECase)},
        **{
            f"hf-{name}": Subject(case, dataclasses.replace(foreign, num_experts=4 if name == "mixtral" else 8))
            for name, case in hugging_face_moe_cases().items()
        },
    }


def broad_subjects() -> dict[str, Subject]:
    """The models of the broad matrix."""
    return {**families(), **packed(), **experts()}


#: Covered besides all pairs of fields: what data parallelism does, in threes.
THREES = tuple(("zero", *two) for two in itertools.combinations(("recompute", "offload", "accumulation"), 2))
GROUPS = (*pairs((*plan_fields(), "subject")), *THREES)
#: Of many models: all pairs of axes; and, on two ranks, each model on each of them.
LAYOUT_AXES = ("dp_replicate", "dp_shard", "zero", "reshard", "tp", "sp", "cp", "cp_mode", "ep", "pp", "schedule")
_OF_A_RANK = ("recompute", "offload", "accumulation", "subject")
_MESH = ("dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "cp_mode", "ep", "pp")
#: Of few models on four ranks: what two ranks cannot have, which is two axes at once and longer ones, each beside what
#: a rank does with its part.
ON_FOUR = (*pairs((*_MESH, "schedule")), *((axis, one) for axis in ("zero", "tp") for one in _OF_A_RANK))
_PER_MODEL = tuple((*axes, "subject") for axes in (("zero",), ("tp", "sp"), ("cp",), ("ep",), ("pp",)))
_PASSES = tuple(("accumulation", axis) for axis in ("zero", "tp", "cp_mode", "ep"))
BROAD_GROUPS = {
    2: (*pairs(LAYOUT_AXES), *_PER_MODEL, *_PASSES),
    4: (
        *pairs(_MESH),
        *_PASSES,
        ("dp_replicate", "dp_shard", "ep", "zero"),
        ("dp_shard", "tp", "sp", "zero"),
        ("schedule",),
    ),
}
#: Of these the gate runs: each model with and without tp, and all pairs of axes.
IN_GATE = (*pairs(LAYOUT_AXES), ("tp", "subject"), ("accumulation",))


def full_matrix(num_ranks: int) -> list[Cell]:
    """Every legal layout and accumulation, with recompute and with optimizer and parameters on the host, or not."""
    only = {"recompute": ("none", "full", "selective"), "offload": ((), ("optimizer",), ("params",))}
    return [Cell(name, plan) for name, one in subjects().items() for plan in one.plans(num_ranks, **only)]


def broad_matrix(num_ranks: int, *, is_whole: bool) -> list[Cell]:
    """Every legal layout of every kind of model, or a choice of them: `IN_GATE` and what is marked `full`."""
    only = {"recompute": ("none",), "offload": ((),), "order": ((),)}
    # Families show on two ranks what they have of their own.
    subjects = broad_subjects() if is_whole or num_ranks == 2 else {**packed(), **experts()}
    cells = [Cell(name, plan) for name, one in subjects.items() for plan in one.plans(num_ranks, **only)]
    return cells if is_whole else chosen_cells(cells, groups=BROAD_GROUPS[num_ranks])


def chosen_cells(
    cells: Sequence[Cell], seed: int = 0, groups: Sequence[Sequence[str]] = GROUPS, besides: Sequence[Cell] = ()
) -> list[Cell]:
    """The gate's share. besides: what it has anyway."""
    return [cells[index] for index in covering(_rows(cells), groups, seed, _rows(besides))]


def _rows(cells: Sequence[Cell]) -> list[dict[str, Hashable]]:
    return [row_of(cell.plan, subject=cell.subject) for cell in cells]


def by_layout(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells that one test runs: those of one layout."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(layout_of(cell.plan), []).append(cell)
    return found


def train_quietly(plan: str, chosen: dict[str, Case]) -> dict[str, ParityResult]:
    """On each rank: several cases under one plan. Copies to the host happen as late as their waits allow."""
    module = importlib.import_module("weft.parallel.parallelize")
    before = module.open_host, activations.LEAST_BYTES
    module.open_host = lambda plan, device, limit: offload.Host(LateLink(), HostPool(1 << 30)) if plan.offload else None
    activations.LEAST_BYTES = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {name: train_case(plan, case) for name, case in chosen.items()}
    finally:
        module.open_host, activations.LEAST_BYTES = before


def differing(cells: Sequence[Cell], known: dict[str, Subject], references: References, pool: RankPool) -> list[str]:
    """Those cells in which some rank differs from PyTorch alone, with the difference."""
    names: dict[str, list[str]] = {}
    for cell in cells:
        names.setdefault(cell.plan.format(), []).append(cell.subject)
    found = []
    for plan, chosen in names.items():
        for rank, results in enumerate(pool.run(train_quietly, plan, {name: known[name].case for name in chosen})):
            for name, result in results.items():
                difference = result.largest_difference(references[known[name].case])
                if not difference < RTOL:
                    found.append(f"{name} under {plan} on rank {rank}: {difference:.1e}")
    return found


class References(dict[Case, ParityResult]):
    """What PyTorch alone computes, made when it is asked for."""

    def __missing__(self, case: Case) -> ParityResult:
        self[case] = train_plain(case)
        return self[case]
