"""Models opened under a plan: logits as in plain PyTorch, and plans and folders that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.choice import gate_runs
from tests.inference.models import plain_model
from weft.comm.mesh import Mesh, build_mesh
from weft.config.plan import Plan
from weft.errors import CommError, ConfigError, PlanError
from weft.inference.open_model import open_model
from weft.inference.ranks import inference_plan, run_on_ranks
from weft.train.tasks.generation import open_text_model
from weft.verify.verifier import Float64Throughout

pytest.importorskip("transformers")

PLANS = ["tp=2", "dp_shard=2 zero=3", "dp_replicate=2", "dp_shard=2 ep=2"]


def some_ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(1))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), Float64Throughout():
        found = model(ids)
    return getattr(found, "logits", found)


def all_logits(plan: str, sources: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the logits of each source, or the text of the error of one that the plan does not support."""
    found, (settled, _) = {}, inference_plan(Plan.parse(plan), "fp64")
    mesh = build_mesh(settled)
    for name, source in sources.items():
        with Float64Throughout():
            opened = open_model(source, settled, mesh)
        assert not opened.model.training
        found[name] = logits_of(opened.model, some_ids())
    return found


@pytest.fixture(scope="module")
def plain(folders) -> dict[str, torch.Tensor]:
    return {family: logits_of(plain_model(Path(folder)), some_ids()) for family, folder in folders.items()}


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_one_rank_equals_transformers(folders, plain):
    for family, found in all_logits("", folders).items():
        near(found, plain[family])


@pytest.mark.parametrize("plan", gate_runs(PLANS, 0))
def test_ranks_equal_transformers(plan, folders, plain, ranks2):
    tried = {"mixtral": folders["mixtral"]} if "ep=" in plan else folders
    for found in ranks2.run(all_logits, plan, tried):
        for family in tried:
            near(found[family], plain[family])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["", *PLANS])
def test_runs_under_a_plan_equal_those_that_generate_opens(plan, runs, ranks2):
    tried = {"experts": runs["experts"]} if "ep=" in plan else runs
    known: dict[str, Any] = {name: open_text_model(folder).model for name, folder in tried.items()}
    wanted = {name: logits_of(one._model.double(), some_ids()) for name, one in known.items()}
    every = ranks2.run(all_logits, plan, tried) if plan else [all_logits("", tried)]
    for found in every:
        for name in tried:
            near(found[name], wanted[name])


def test_settings_of_training_are_left_out():
    plan, notes = inference_plan(Plan.parse("tp=2 dp_shard=2 zero=3 sp=on recompute=full reshard=after_step"), "bf16")
    assert str(plan) == "dp_shard=2 tp=2 zero=3 precision=bf16"
    assert notes == ["plan: recompute, reshard, sp left out, because they matter only in training"]
    assert inference_plan(Plan.parse("tp=2")) == (Plan(tp=2), [])


@pytest.mark.parametrize("text, field", [("cp=2", "cp=2"), ("ep=2", "ep=2")])
def test_plans_that_are_refused(text, field):
    with pytest.raises(PlanError, match=field):
        inference_plan(Plan.parse(text))


def sum_of_ranks(mesh: Mesh, number: int) -> list[int]:
    return [mesh.world_size, mesh.rank, number]


def dies(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os._exit(3)


def refuses(mesh: Mesh) -> None:
    raise ConfigError(f"rank {mesh.rank}: no. Use another.")


def test_function_runs_on_the_ranks_of_a_plan():
    assert run_on_ranks(sum_of_ranks, Plan(), 7) == [1, 0, 7]
    assert run_on_ranks(sum_of_ranks, Plan(tp=2), 7) == [2, 0, 7]
    with pytest.raises(ConfigError, match=r"^rank 0: no\. Use another\.$"):
        run_on_ranks(refuses, Plan(tp=2))
    with pytest.raises(CommError, match=r"^rank 1 of 2 failed: the process ended without an answer$"):
        run_on_ranks(dies, Plan(tp=2))
