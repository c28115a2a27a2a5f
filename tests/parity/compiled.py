"""Deep models under plans with compile=on: the trained cases, and the graphs that torch.compile made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from tests.lean import compiled_by
from tests.parity.cases import LLAMA
from tests.parity.dropout_cases import Block, PlainCase
from tests.parity.moe_cases import MOE, MoECase
from tests.parity.plans import Cell, Subject
from weft.config.plan import Plan, plan_fields
from weft.verify.matrix import covering, row_of
from weft.verify.oracles import counted_graphs
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case

#: More blocks than torch.compile's recompilation limit.
DEPTH = 12
_DEEP = dataclasses.replace(LLAMA, num_layers=DEPTH)


@dataclasses.dataclass(frozen=True)
class DroppingCase(PlainCase):
    """Plain blocks with nn.Dropout, and with dropout inside attention if `attention` is not 0."""

    depth: int = DEPTH
    attention: float = 0.0

    def model(self) -> nn.Module:
        model = super().model()
        model.blocks = nn.ModuleList(Block(16, 4, 0.25) for _ in range(self.depth)).double()
        for block in model.blocks:
            block.attn.dropout = self.attention
        return model


def deep_subjects() -> dict[str, Subject]:
    """Return models of twelve blocks: Weft's decoder, one with experts, plain PyTorch with dropout."""
    experts = dataclasses.replace(MOE, num_layers=DEPTH, first_moe_layer=2)
    return {
        "decoder": Subject(DecoderCase(_DEEP, num_steps=2), _DEEP),
        "experts": Subject(MoECase(experts, global_batch=8, num_steps=2), experts),
        "dropout": Subject(DroppingCase("plain", num_steps=2), _DEEP, without=frozenset({"cp", "ep"})),
    }


def compiled_cells(num_ranks: int) -> list[Cell]:
    """Return a few legal plans with compile=on that cover each axis, recompute policy and zero=3 for each model.

    Plans that differ only outside blocks (data parallelism, accumulation, schedule) are tested without compiling.
    """
    only = {
        "compile": (True,), "order": ((),), "offload": ((),), "zero": (0, 3), "accumulation": (1,),
        "reshard": ("after_forward",), "microbatches": (1, 2), "schedule": ("gpipe", "1f1b"),
        "recompute": ("none", "full", "selective"), "cp_mode": ("auto", "gather"),
    }  # fmt: skip
    cells = [Cell(name, plan) for name, one in deep_subjects().items() for plan in one.plans(num_ranks, **only)]
    rows = [row_of(cell.plan, subject=cell.subject) for cell in cells]
    axes = [name for name in plan_fields() if name in ("tp", "sp", "cp", "ep", "pp", "zero", "recompute")]
    groups = [(axis, "subject") for axis in axes] + [("tp", "sp", "recompute")]
    return [cells[index] for index in covering(rows, groups)]


def compiled_in_gate(cells: list[Cell]) -> list[int]:
    """Return the indices of cells that cover each axis, recompute policy and model once.

    Experts on one rank and over ep, which take long here, are in test_compile.py and test_compile_sharded.py.
    """
    groups = [(name,) for name in ("tp", "sp", "cp", "pp", "zero", "subject", "recompute")]
    places = [place for place, cell in enumerate(cells) if cell.subject != "experts"]
    rows = [row_of(cells[place].plan, subject=cells[place].subject) for place in places]
    return [places[index] for index in covering(rows, groups)]


@dataclass(frozen=True)
class Compiled:
    """The result of a training, its number of graphs, and the reasons of graph breaks."""

    result: ParityResult
    graphs: int
    breaks: list[str]


def train_compiled(plan: str, case: Case, backend: str = "eager") -> Compiled:
    """Train on this rank without code generation. Fails if torch.compile gives up on a block."""
    with compiled_by(backend), counted_graphs() as found:
        result = train_case(plan, case)
    return Compiled(result, found.graphs, list(found.breaks))


def compiled_plan(text: str) -> str:
    return Plan.parse(f"{text} compile=on precision=fp64").format()
