"""Preference training: the papers' formulas as a reference, and equal losses under every plan."""

from __future__ import annotations

import json

import pytest
import torch

from tests.train.preference_cases import CASES, OBJECTIVES, SPEC, losses_under, plain_losses, words, write_pairs
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.errors import ConfigError, DataError
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.batches.data_share import Share
from weft.train.folder import RunFolder
from weft.train.step.evaluation import RankForwards, evaluate
from weft.train.tasks.registry import find_task

#: Plans of two ranks that the gate runs, with their cases.
GATE = {
    "dp_shard=2 zero=3 accumulation=2": ("dpo", "kto", "simpo"),
    "tp=2": ("dpo", "kto-off", "orpo"),
}
PLANS = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "dp_shard=2 zero=3", "tp=2 sp=on",
         "cp=2", "pp=2 microbatches=2"]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    return write_pairs(folder), folder / "cache", folder / "runs"


@pytest.fixture(scope="module")
def one_process(pairs):
    return losses_under("dp_replicate=1", tuple(CASES), *pairs)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_the_formula(name, pairs, one_process):
    wanted = plain_losses(name, *pairs)
    for (loss, norm, count), (plain, plain_norm) in zip(one_process[name], wanted, strict=True):
        assert loss == pytest.approx(plain, rel=1e-9)
        assert norm == pytest.approx(plain_norm, rel=1e-7)
        assert count == 4


def compared(ranks, plan, names, pairs, one_process):
    for result in ranks.run(losses_under, plan, names, *pairs):
        for name in names:
            for (loss, norm, count), (wanted, wanted_norm, wanted_count) in zip(
                result[name], one_process[name], strict=True
            ):
                assert loss == pytest.approx(wanted, rel=1e-9), name
                assert norm == pytest.approx(wanted_norm, rel=1e-6), name
                assert count == wanted_count


@pytest.mark.parametrize("plan", GATE)
def test_two_ranks_match_one_process(plan, pairs, one_process, ranks2):
    compared(ranks2, plan, GATE[plan], pairs, one_process)


@pytest.mark.full
@pytest.mark.parametrize("plan", [*PLANS, *GATE])
def test_two_ranks_match_one_process_under_every_plan(plan, pairs, one_process, ranks2):
    compared(ranks2, plan, tuple(CASES), pairs, one_process)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3 tp=2", "tp=2 pp=2 microbatches=2", "dp_shard=2 zero=2 cp=2"])
def test_four_ranks_match_one_process(plan, pairs, one_process, ranks4):
    compared(ranks4, plan, OBJECTIVES, pairs, one_process)


def begun(pairs, folder, *more, forget: bool = False):
    """Return a task whose reference is computed, with its model."""
    path, cache, _ = pairs
    task = find_task(load_config(None, words(path, cache, 0, *more)).config)
    task.prepare(RunFolder(folder), None)
    task.text.folder = RunFolder(folder)
    mesh = build_mesh(Plan())
    model = build_decoder(SPEC, seed=0)
    if forget:
        with torch.no_grad():
            model.get_parameter("head.weight" if not SPEC.tied else "embed.weight").zero_()
    parallelize(model, mesh, seed=0)
    share = Share(4)
    batches = task.batches(share)
    task.begin(RankForwards(model, mesh, task))
    return task, model, mesh, batches, task.eval_batches(share)


def test_cached_reference_uses_the_initial_weights_and_is_required_later(pairs, tmp_path):
    *_, batches, _ = begun(pairs, tmp_path)
    first = batches.batches(0)[0]["reference"]
    *_, batches, _ = begun(pairs, tmp_path, forget=True)  # a resumed run, with other weights
    assert torch.equal(batches.batches(0)[0]["reference"], first)
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000002" / "COMMIT").write_text("{}")
    (tmp_path / "reference.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        DataError, match=r"reference\.safetensors: the reference's log-probabilities of this run are not"
    ):
        begun(pairs, tmp_path)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_untrained_model_has_no_margin(pairs, tmp_path, objective):
    task, model, mesh, _, batches = begun(
        pairs,
        tmp_path,
        f"task.options.objective={objective}",
        f"data.eval={pairs[0]}",
        "eval.batches=2",
    )
    found = evaluate(model, task.before_step(list(batches)[:1]), mesh, task)
    assert found.loss == pytest.approx(0.6931472 if objective == "dpo" else 0.5, rel=1e-6)
    assert found.metrics["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert found.count == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.options.objective=dpp"], "task.options.objective=dpp: it is one of dpo, ipo, kto, orpo, simpo. Did you "
         "mean 'dpo'? Use objective=dpo."),
        (["task.options.reference=adapter_off"], "task.options.reference=adapter_off: the run trains no adapter that "
         "could be off. Set adapter.rank, or use cached or frozen_copy."),
        (["task.options.objective=orpo", "task.options.reference=cached"], "task.options.reference=cached: "
         "objective=orpo compares with no reference. Leave it out."),
        (["task.options.beta=-1.0"], "task.options.beta=-1.0: it must be above 0. Use 0.1, or leave it out."),
        (["task.options.smoothing=0.5"], "task.options.smoothing=0.5: it is a share of at least 0 and below 0.5. "
         "Use 0.1."),
        (["task.options.objective=ipo", "task.options.smoothing=0.1"], "task.options.smoothing=0.1: only dpo has it, "
         "and the objective is ipo. Leave it out."),
        (["task.options.objective=kto", "task.options.wanted=-2.0"], "task.options.wanted=-2.0: a weight is at least "
         "0. Use 1."),
        (["data.packing=fit"], "data.packing=fit: preferences are not packed: a row has one answer. Leave it out."),
        (["data.train.0.weight=2.0"], "data.train.0.weight=2.0: preferences of several sources are one set, in which "
         "each counts once. Leave it out."),
    ],
)  # fmt: skip
def test_settings_without_effect_are_rejected(pairs, tmp_path, more, message):
    def prepare():
        find_task(load_config(None, words(pairs[0], pairs[1], 0, *more)).config).prepare(RunFolder(tmp_path), None)

    with pytest.raises(ConfigError) as caught:
        prepare()
    assert [problem.message for problem in caught.value.problems] == [message]


def test_labels_without_pairs_require_kto(pairs, tmp_path):
    path = tmp_path / "kto.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": " a", "label": True}))
    task = find_task(load_config(None, words(path, pairs[1], 0)).config)
    with pytest.raises(DataError) as caught:
        task.prepare(RunFolder(tmp_path), None)
    assert str(caught.value) == (
        f"data.train.0.path={path}: it has labeled answers, and task.options.objective=dpo needs pairs. Use "
        "objective=kto."
    )
