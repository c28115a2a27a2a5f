"""Pipelines report results that depend on the microbatches; other results equal one process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.train.batch_kinds import MOVES, NOISE, D, Fixed, squares
from tests.train.stage_kinds import ATTRIBUTES, INTERACTING, LEGAL, STATE, WEIGHTS, Chain
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.train.script.script_run import Run

SAMPLES = 8


@dataclass
class Trained:
    """The warning or error of a rank, its losses, and its weights by name."""

    said: list[str] = field(default_factory=list)
    losses: list[float] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_all(plan: str, names: list[str], steps: int = 2) -> dict[str, Trained]:
    parsed = Plan.parse(f"{plan} precision=fp64")
    run = Run(parsed, build_mesh(parsed), Ledger(), 0)
    return {name: train(run, name, steps) for name in names}


def train(run: Run, name: str, steps: int, **options: Any) -> Trained:
    build, loss = LEGAL[name] if name in LEGAL else (INTERACTING[name].build, INTERACTING[name].loss)
    trained, size, rank = Trained(), SAMPLES // run.mesh.data.size, run.mesh.data.rank
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = run.parallelize(build().double())
            step = run.train_step(model, torch.optim.SGD, loss, lr=0.01, **options)
            losses = []
            for number in range(steps):
                generator = torch.Generator().manual_seed(number)
                batch = [torch.randn(SAMPLES, D, generator=generator).double() for _ in range(2)]
                losses.append(step(tuple(one[rank * size : (rank + 1) * size] for one in batch)).loss)
        except ModelError as error:
            trained.said = [str(error)]
            return trained
    trained.said = [str(one.message) for one in caught if one.category is WeftWarning]
    trained.losses = losses
    # A rank may have a shared weight only under its second name.
    weights = model.named_parameters(remove_duplicate=False)
    kept = ((path, one.full_tensor() if isinstance(one, DTensor) else one) for path, one in weights if not one.is_meta)
    trained.weights = {path: one.detach().clone() for path, one in kept}
    return trained


def check(found: list[dict[str, Trained]], plain: dict[str, Trained]) -> None:
    """Check the results of all ranks of a pipeline."""
    for name, expected in plain.items():
        answers = [one[name] for one in found]
        said = [text for one in answers for text in one.said]
        if name in INTERACTING:
            kind = INTERACTING[name]
            assert any(kind.said in one and kind.where in one for one in said), (name, said)
            # All ranks refuse; one rank warns.
            assert len(set(said)) == len(said) or all(one.losses is None for one in answers), (name, said)
            continue
        assert not said, (name, said)
        for one in answers:
            assert one.losses == pytest.approx(expected.losses, rel=1e-10), name
            assert one.weights.keys() <= expected.weights.keys(), name
            for path, value in one.weights.items():
                torch.testing.assert_close(value, expected.weights[path], rtol=1e-9, atol=1e-11, msg=f"{name} {path}")


#: Cases of every test; `full` runs the others.
SOME = [
    *("gelu", "dropout", "remembering", "weft noise", "tied attention", "inner gradient as it trains", "force"),
    *("gated by a gradient", "gradient by an own copy", "gradient of the input alone", "gradient by the input"),
    *("gradient by an unused input", "input that begins to need a gradient", "gradient by a scale between blocks"),
    *("gradient by a tied weight", "gradient beside a tied weight", "gradient by an edge"),
    *("centred at the end", "inner gradient of all samples", "its buffer", "counter in an attribute", "teacher"),
    *("replaced running norm", "random mask at the end", "contrastive", "frequencies of a function"),
]
SCHEDULES = [
    "pp=2 microbatches=4 schedule=gpipe",
    "pp=2 microbatches=2 schedule=interleaved virtual_stages=2",
    "pp=2 microbatches=4 schedule=zb_h1 zero=2 recompute=full",
    "pp=2 microbatches=2 schedule=zb_interleaved virtual_stages=2",
    "pp=2 microbatches=2 schedule=zb_v virtual_stages=2",
    "pp=2 microbatches=4 schedule=dualpipe_v virtual_stages=2",
]


def test_two_stages_match_or_report(ranks2):
    check(ranks2.run(train_all, "pp=2 microbatches=2", SOME), train_all("", SOME))


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 microbatches=4"])
def test_every_kind_under_every_plan(plan, ranks2):
    names = [*LEGAL, *INTERACTING]
    for start in range(0, len(names), 15):
        some = names[start : start + 15]
        check(ranks2.run(train_all, plan, some), train_all("", some))


@pytest.mark.full
@pytest.mark.parametrize("plan", SCHEDULES)
def test_every_schedule(plan, ranks2):
    check(ranks2.run(train_all, plan, SOME), train_all("", SOME))


@pytest.mark.full
def test_four_stages_and_two_replicas(ranks4):
    names = ["gelu", "one block many times", "centred", "its buffer", "random mask at the end"]
    for plan in ("pp=4 microbatches=2", "pp=2 dp_shard=2 zero=3 reshard=after_step microbatches=2"):
        check(ranks4.run(train_all, plan, names), train_all("", names))


def test_stage_with_fixed_batch_size_blocks_no_rank(ranks2):
    for answer in ranks2.run(train_fixed, "pp=2 microbatches=2"):
        assert answer == []


def train_fixed(plan: str) -> list[str]:
    parsed = Plan.parse(f"{plan} precision=fp64")
    run = Run(parsed, build_mesh(parsed), Ledger(), 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for last in (False, True):
            model = run.parallelize(Chain(Fixed(SAMPLES // 2), last=last).double())
            step = run.train_step(model, torch.optim.SGD, squares, lr=0.01)
            for _ in range(2):
                step((torch.ones(SAMPLES, D).double(), torch.ones(SAMPLES, D).double()))
    return [str(one.message) for one in caught if one.category is WeftWarning]


def test_state_is_named_as_the_cause_under_accumulation():
    kinds = [name for name, kind in INTERACTING.items() if kind.said in (MOVES, STATE, ATTRIBUTES, WEIGHTS)]
    for name, trained in train_all("accumulation=2", kinds).items():
        kind = INTERACTING[name]
        assert any(kind.said in one and kind.where in one for one in trained.said), (name, trained.said)
        assert not any(NOISE in one for one in trained.said), (name, trained.said)


def test_check_restores_all_state():
    for name in ("teacher", "swapped teacher", "running norm in an attribute", "own generator", "remembering"):
        plan = Plan.parse("accumulation=2 precision=fp64")
        run = Run(plan, build_mesh(plan), Ledger(), 0)
        checked, plain = (train(run, name, 2, check_batch=how) for how in (True, False))
        assert checked.losses == plain.losses, name
        for path, value in plain.weights.items():
            assert torch.equal(checked.weights[path], value), (name, path)
