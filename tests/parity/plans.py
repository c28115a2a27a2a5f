"""Parity matrices: models and plans that are trained on a pool of ranks and compared with plain PyTorch.

Plans are enumerated from the rules. A cell is a plan and a subject. `full_matrix` is deep: few models under all
layouts, recompute and offload settings. `broad_matrix` is broad: many kinds of models under every layout. The gate runs
a choice of cells that covers all pairs. `pytest tests/parity --all-plans` runs every cell.
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
from weft.config.plan import Plan, plan_fields
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.memory import activation_offload as activations
from weft.memory import offload
from weft.memory.offload import HostPool
from weft.verify.matrix import covering, layout_of, legal, pairs, row_of
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case, train_plain
from weft.verify.rank_pool import RankPool

RTOL = 1e-10
#: Enough heads for four ranks of Ulysses.
WIDE_GPT2 = dataclasses.replace(GPT2, num_heads=4, num_kv_heads=4)
MULTI_QUERY = dataclasses.replace(LLAMA, num_kv_heads=1, tied=False)
#: Axes that a model without layers and heads does not support.
ONLY_DATA = frozenset({"pp", "cp", "tp", "ep"})


@dataclass(frozen=True)
class Subject:
    """A case with the shape that the rules read. without: axes that it does not support."""

    case: Case
    shape: DecoderSpec | None = None
    without: frozenset[str] = frozenset()

    def plans(self, num_ranks: int, **only: Sequence[object]) -> list[Plan]:
        """Return every legal plan for the subject."""
        size = (getattr(self.case, "global_batch", None), getattr(self.case, "seq_len", None))
        values = {name: tuple(given) for name, given in {**self.excluded_axes(), **only}.items()}
        return list(_legal(num_ranks, self.shape, size, tuple(sorted(values.items()))))

    def excluded_axes(self) -> dict[str, tuple[object, ...]]:
        """Return the only allowed value of each unsupported axis."""
        return {name: (False,) if name == "sp" else (1,) for name in self.without}


@functools.cache
def _legal(
    num_ranks: int,
    shape: DecoderSpec | None,
    size: tuple[int | None, int | None],
    only: tuple[tuple[str, tuple[object, ...]], ...],
) -> list[Plan]:
    """Return legal plans, cached because many models have the same shape."""
    return legal(num_ranks, model=shape, global_batch=size[0], seq_len=size[1], **dict(only))


class Cell(NamedTuple):
    """One training of the matrix: a subject under a plan."""

    subject: str
    plan: Plan


def subjects() -> dict[str, Subject]:
    """Return the four models of the full matrix."""
    chosen = cases()
    return {
        "decoder": Subject(chosen["decoder"], LLAMA),
        "hf-qwen2": Subject(chosen["hf-qwen2"], LLAMA),
        "hf-gpt2": Subject(chosen["hf-gpt2"], GPT2),
        "cnn": Subject(chosen["cnn"], without=ONLY_DATA),
    }


def families() -> dict[str, Subject]:
    """Return all Hugging Face families."""
    return {name: Subject(FamilyCase(name), shape_of(family), family.without) for name, family in FAMILIES.items()}


def packed() -> dict[str, Subject]:
    """Return subjects with packed documents (given by ids or positions), masked padding, or shared keys."""
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
    """Return models with experts: Weft's with every balancing and dropping method, and Hugging Face's."""
    foreign = dataclasses.replace(MOE, num_layers=2, num_shared_experts=0, first_moe_layer=0, tied=False)
    return {
        **{f"moe-{name}": Subject(case, case.spec) for name, case in moe_cases().items() if isinstance(case, MoECase)},
        **{
            f"hf-{name}": Subject(case, dataclasses.replace(foreign, num_experts=4 if name == "mixtral" else 8))
            for name, case in hugging_face_moe_cases().items()
        },
    }


def broad_subjects() -> dict[str, Subject]:
    """Return the models of the broad matrix."""
    return {**families(), **packed(), **experts()}


#: Covered in addition to all pairs of fields: triples of ZeRO stage and the settings of a rank.
THREES = tuple(("zero", *two) for two in itertools.combinations(("recompute", "offload", "accumulation"), 2))
GROUPS = (*pairs((*plan_fields(), "subject")), *THREES)
#: For many models: all pairs of axes and, on two ranks, each model with each axis.
LAYOUT_AXES = ("dp_replicate", "dp_shard", "zero", "reshard", "tp", "sp", "cp", "cp_mode", "ep", "pp", "schedule")
_RANK_SETTINGS = ("recompute", "offload", "accumulation", "subject")
_MESH = ("dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "cp_mode", "ep", "pp")
#: For few models on four ranks: pairs of axes and larger axes, which two ranks cannot have, each with the settings of a
#: rank.
ON_FOUR = (*pairs((*_MESH, "schedule")), *((axis, one) for axis in ("zero", "tp") for one in _RANK_SETTINGS))
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
#: The gate's choice: each model with and without tp, and all pairs of axes.
IN_GATE = (*pairs(LAYOUT_AXES), ("tp", "subject"), ("accumulation",))
#: On four ranks: pairs of axes and larger axes, which two ranks cannot have.
IN_GATE_ON_FOUR = (*pairs(_MESH), ("accumulation",))


def full_matrix(num_ranks: int) -> list[Cell]:
    """Return every legal layout and accumulation with each recompute policy, and optimizer or parameters offloaded."""
    only = {"recompute": ("none", "full", "selective"), "offload": ((), ("optimizer",), ("params",))}
    return [Cell(name, plan) for name, one in subjects().items() for plan in one.plans(num_ranks, **only)]


def broad_matrix(num_ranks: int, *, is_complete: bool) -> list[Cell]:
    """Return every legal layout of every kind of model or, without `is_complete`, a covering choice."""
    only = {"recompute": ("none",), "offload": ((),), "order": ((),)}
    # Two ranks suffice for the specifics of a family.
    subjects = broad_subjects() if is_complete or num_ranks == 2 else {**packed(), **experts()}
    cells = [Cell(name, plan) for name, one in subjects.items() for plan in one.plans(num_ranks, **only)]
    return cells if is_complete else chosen_cells(cells, groups=BROAD_GROUPS[num_ranks])


def chosen_cells(
    cells: Sequence[Cell], seed: int = 0, groups: Sequence[Sequence[str]] = GROUPS, covered: Sequence[Cell] = ()
) -> list[Cell]:
    """Return cells that cover `groups`. `covered` are cells that run in any case."""
    return [cells[index] for index in covering(_rows(cells), groups, seed, _rows(covered))]


def _rows(cells: Sequence[Cell]) -> list[dict[str, Hashable]]:
    return [row_of(cell.plan, subject=cell.subject) for cell in cells]


def by_layout(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group cells by layout. One test runs one group."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(layout_of(cell.plan), []).append(cell)
    return found


def train_quietly(plan: str, chosen: dict[str, Case]) -> dict[str, ParityResult]:
    """Train several cases under one plan on this rank. Host copies happen as late as their waits allow."""
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
    """Return the cells in which a rank differs from plain PyTorch, with the difference."""
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
    """Results of plain PyTorch by case, computed on demand."""

    def __missing__(self, case: Case) -> ParityResult:
        self[case] = train_plain(case)
        return self[case]
