"""Models that eight ranks can divide on every axis, plans for each set of axes, and random plans.

A random plan is sampled field by field and then repaired with the rules' fixes. So plans need not be enumerated, and
every field varies, uneven splits and activation budgets included.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from hypothesis import strategies as st

from tests.parity.moe_cases import MoECase
from tests.parity.pipeline_cases import TIED, FamilyCase
from tests.parity.plans import Cell, Subject
from weft.config.partitioning import CP_MODES
from weft.config.plan import AXES, PLAN_FIELDS, RECOMPUTES, RESHARDS, SCHEDULES, Plan
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.matrix import covering, row_of
from weft.verify.parity import DecoderCase

#: Eight of everything that an axis divides, except key-value heads, which ranks then share.
DENSE = DecoderSpec(
    vocab_size=61, dim=16, num_layers=8, num_heads=8, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
)
MOE = dataclasses.replace(
    DENSE, num_kv_heads=4, tied=False, num_experts=8, top_k=2, expert_ffn_dim=16, num_shared_experts=1,
    first_moe_layer=1, moe_every=3, balance_rate=0.05,
)  # fmt: skip
BIASED = dataclasses.replace(MOE, tied=True, balance="bias", router="sigmoid", balance_rate=0.02)

#: Fields that are covered in addition to the set of axes.
COVERED_FIELDS = ("zero", "sp", "cp_mode", "schedule", "reshard")
OFFLOADS = ((), ("optimizer",), ("params",), ("activations",), ("optimizer:0.5", "activations"), ("params:0.4",))


def deep_subjects() -> dict[str, Subject]:
    """Return subjects large enough for every axis of 8 ranks: documents, padding, experts, one of Hugging Face."""
    sizes = {"num_steps": 2, "global_batch": 16, "seq_len": 16}
    return {
        "dense": Subject(DecoderCase(DENSE, **sizes, documents=True), DENSE),
        "moe": Subject(MoECase(MOE, **sizes), MOE),
        "biased": Subject(MoECase(BIASED, **sizes, documents=True, optimizer="sgd"), BIASED),
        "hf-llama": Subject(FamilyCase(TIED, **sizes, kind="llama"), TIED),
    }


def axes_used(plan: Plan) -> str:
    """Return the mesh axes on which the plan has more than one rank."""
    return " ".join(name for name in AXES if getattr(plan, name) > 1)


def cells_of_axis_sets(num_ranks: int) -> list[Cell]:
    """Return cells that cover every set of axes, every size of ep with zero, and every value of `COVERED_FIELDS`."""
    usual = {"recompute": ("none",), "offload": ((),), "accumulation": (1,)}
    only = {  # for each subject, settings that the other does not cover
        "dense": {"microbatches": (1, 16), "reshard": ("after_forward", "after_step")},
        "moe": {"microbatches": (1, 4), "reshard": ("after_forward",), "cp_mode": ("auto",), "ep": (2, 8)},
    }
    cells = [
        Cell(name, plan)
        for name, chosen in only.items()
        for plan in deep_subjects()[name].plans(num_ranks, **usual, **chosen)
    ]
    rows = [row_of(cell.plan, subject=cell.subject, axes=axes_used(cell.plan)) for cell in cells]
    return [
        cells[index] for index in covering(rows, [("axes",), ("ep", "zero"), *((name,) for name in COVERED_FIELDS)])
    ]


def random_cells(num_ranks: int) -> st.SearchStrategy[Cell]:
    """Return a strategy of legal plans for the subjects, sampled from all fields of a plan."""
    return st.integers(0, 2**48).map(lambda seed: _random_cell(num_ranks, random.Random(seed)))


def _random_cell(num_ranks: int, draw: random.Random) -> Cell:
    plan = None
    while plan is None:
        name = draw.choice(sorted(deep_subjects()))
        subject = deep_subjects()[name]
        assert subject.shape is not None
        plan = _repaired(_random_plan(num_ranks, subject.shape, draw), _facts(subject, num_ranks))
    return Cell(name, _unevenly_split(plan, subject.shape.num_layers, draw) if draw.random() < 0.3 else plan)


def _random_plan(num_ranks: int, shape: DecoderSpec, draw: random.Random) -> Plan:
    """Return a random plan for `num_ranks` ranks, which may break rules."""
    sizes = dict.fromkeys(AXES, 1)
    for _ in range(num_ranks.bit_length() - 1):
        sizes[draw.choice(AXES)] *= 2
    fields = {
        **sizes,
        "ep": draw.choice((1, 2, 4, 8)) if shape.num_experts else 1,
        "zero": draw.randint(0, 3),
        "reshard": draw.choice(RESHARDS),
        "sp": draw.random() < 0.5,
        "cp_mode": draw.choice(CP_MODES),
        "schedule": draw.choice(SCHEDULES),
        "microbatches": draw.choice((1, 2, 4, 8, 16)),
        "virtual_stages": draw.randint(1, 3),
        "split": (),
        "accumulation": draw.choice((1, 2, 4)),
        "precision": "fp64",
        "reduce": "fp32",  # other formats round
        "recompute": draw.choice((*RECOMPUTES, "50%", "full:1")),
        "offload": draw.choice(OFFLOADS),
        "compile": False,
        "order": (),
    }
    used = [name for name in AXES if sizes[name] > 1]
    if len(used) > 1 and draw.random() < 0.3:
        fields["order"] = tuple(draw.sample(used, len(used)))
    for name, field in PLAN_FIELDS.items():
        if name not in fields:
            fields[name] = draw.choice(list(field.tried(num_ranks, (1, 2, 4))))
    return Plan(**fields)


def _facts(subject: Subject, num_ranks: int) -> Facts:
    case = subject.case
    assert isinstance(case, DecoderCase)
    return Facts(model=subject.shape, world_size=num_ranks, global_batch=case.global_batch, seq_len=case.seq_len)


def _repaired(plan: Plan, facts: Facts) -> Plan | None:
    """Apply the rules' fixes one by one. Return None if no legal plan is reached."""
    for _ in range(20):
        broken = check(plan, facts)
        if not broken:
            return plan
        fix = next((one.fix for one in broken if one.fix is not None), None)
        if fix is None:
            return None
        plan = fix
    return None


def _unevenly_split(plan: Plan, num_layers: int, draw: random.Random) -> Plan:
    """Return the plan with stages of random sizes."""
    if plan.pp == 1:
        return plan
    ends = [0, *sorted(draw.sample(range(1, num_layers), plan.pp * plan.virtual_stages - 1)), num_layers]
    return plan.replace(split=tuple(stop - start for start, stop in itertools.pairwise(ends)))
