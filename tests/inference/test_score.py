"""Scores under plans equal plain PyTorch, one text at a time; windows, batches and models that are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.choice import gate_runs
from tests.inference.models import plain_model, write_folder
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.inference.open_model import open_model
from weft.inference.ranks import inference_plan
from weft.inference.score import ScoredSpan, Scorer, windows_of
from weft.train.tasks.generation import open_text_model
from weft.verify.verifier import Float64Throughout

pytest.importorskip("transformers")

PLANS = ["tp=2", "dp_shard=2 zero=3", "dp_replicate=2", "dp_shard=2 ep=2", "pp=2"]


def some_spans() -> list[ScoredSpan]:
    """Return spans of many lengths: some begin others, some are equal, some differ in the last token alone."""
    draw = random.Random(5)
    ids = [tuple(draw.randrange(1, 250) for _ in range(draw.randrange(2, 30))) for _ in range(9)]
    found = [ScoredSpan(one, draw.randrange(1, len(one))) for one in ids]
    long = max(ids, key=len)
    found += [
        ScoredSpan(long[:9], 3),
        ScoredSpan(long[:8], 7),
        ScoredSpan(long, 1),
        ScoredSpan((*long[:-1], 7), 1),
        ScoredSpan((*long[:-1], 8), 4),
        ScoredSpan((*long[:-2], 3, 4), 2),
    ]
    return [*found, found[0]]


def plain_scores(model: Any, spans: list[ScoredSpan]) -> torch.Tensor:
    found = []
    for span in spans:
        ids = torch.tensor([span.ids])
        with torch.no_grad(), Float64Throughout():
            output = model(ids[:, :-1])
        log_probs = getattr(output, "logits", output)[0].log_softmax(-1)
        of_labels = log_probs.gather(1, ids[0, 1:, None])[-span.num_scored :]
        is_top = (log_probs.argmax(-1) == ids[0, 1:])[-span.num_scored :]
        found.append((float(of_labels.sum()), float(is_top.all())))
    return torch.tensor(found, dtype=torch.float64)


def scores(plan: str, sources: dict[str, str], batch_tokens: int = 60) -> dict[str, torch.Tensor]:
    found, (settled, _) = {}, inference_plan(Plan.parse(plan), "fp64")
    mesh = build_mesh(settled)
    for name, source in sources.items():
        with Float64Throughout():
            found[name] = Scorer(open_model(source, settled, mesh), batch_tokens).score(some_spans())
    return found


@pytest.fixture(scope="module")
def plain(folders) -> dict[str, torch.Tensor]:
    return {family: plain_scores(plain_model(Path(folder)), some_spans()) for family, folder in folders.items()}


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_one_rank_equals_plain_pytorch(folders, plain):
    for family, found in scores("", folders).items():
        near(found, plain[family])


@pytest.mark.parametrize("plan", gate_runs(PLANS, 1))
def test_ranks_equal_plain_pytorch(plan, folders, plain, ranks2):
    tried = {"mixtral": folders["mixtral"]} if "ep=" in plan else folders
    for found in ranks2.run(scores, plan, tried):
        for family in tried:
            near(found[family], plain[family])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["", *PLANS])
def test_runs_equal_plain_pytorch(plan, runs, ranks2):
    tried = {name: runs[name] for name in (("experts",) if "ep=" in plan else ("decoder", "experts", "folder_lora"))}
    known: dict[str, Any] = {name: open_text_model(folder).model for name, folder in tried.items()}
    for found in ranks2.run(scores, plan, tried) if plan else [scores("", tried)]:
        for name, model in known.items():
            near(found[name], plain_scores(model._model.double(), some_spans()))


def test_likeliest_tokens_are_found(folders):
    model, ids = plain_model(Path(folders["llama"])).float(), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    greedy = tuple(ids[0].tolist())
    spans = [
        ScoredSpan(greedy, 4),
        ScoredSpan((*greedy[:-1], (greedy[-1] + 1) % 257), 4),
        ScoredSpan(greedy[:5], 2),
        ScoredSpan(greedy, 5),
    ]
    plan = Plan()
    found = Scorer(open_model(folders["llama"], plan, build_mesh(plan))).score(spans)
    assert found[:3, 1].tolist() == [1.0, 0.0, 1.0]


def test_windows_score_each_token_once_with_the_most_context():
    ids = tuple(range(20))
    assert windows_of(ScoredSpan(ids, 19), 19, 5) == [ScoredSpan(ids, 19)]
    found = windows_of(ScoredSpan(ids, 19), 8, 4)
    assert found == [
        ScoredSpan(ids[:9], 8),
        ScoredSpan(ids[4:13], 4),
        ScoredSpan(ids[8:17], 4),
        ScoredSpan(ids[11:20], 3),
    ]
    assert windows_of(ScoredSpan(ids, 3), 8, 4) == [ScoredSpan(ids[11:], 3)]  # the start of the context is dropped
    assert sum(one.num_scored for one in windows_of(ScoredSpan(ids, 12), 8, 8)) == 12
    assert all(len(one.ids) <= 9 for stride in (1, 3, 8) for one in windows_of(ScoredSpan(ids, 12), 8, stride))


def test_model_that_reads_later_tokens_is_refused(tmp_path):
    folder = write_folder(tmp_path / "bert", "bert")
    plan, _ = inference_plan(Plan())
    with pytest.raises(ModelError, match="its logits depend on later tokens"):
        Scorer(open_model(folder, plan, build_mesh(plan)))
