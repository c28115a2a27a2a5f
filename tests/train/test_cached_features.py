"""`data.cache_features`: runs equal uncached runs, resume, and never read features of other inputs or weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.mixed_records import as_tar, mixed
from tests.train.test_mixed_tasks import BATCH, config
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.data.media.mixed_records import FeatureShards
from weft.errors import ConfigError, DataError
from weft.optim.build import build_optimizer, freeze
from weft.parallel.parallelize import parallelize
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import run_folder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.states.model_state import capture_model
from weft.train.step.evaluation import RankForwards, evaluate
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.verify.verifier import Float64Throughout

FROZEN = [{"match": "vision.*", "lr": 0.0}, {"match": "sound.*", "lr": 0.0}]


def cached(root: Path, name: str = "caption", *, keeps: bool = True, **options: Any) -> RunConfig:
    more: dict[str, Any] = {"data": str(root / "pairs" / "x.tar")} if name == "contrast" else {}
    made = config(root, name, **({"augment": False} | more | options)).model_dump(by_alias=True)
    made["optimizer"]["groups"] = FROZEN
    made["data"]["cache_features"] = keeps
    made["run"]["name"] = f"{name}-{keeps}"
    return RunConfig.model_validate(made)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cached")
    as_tar(found, mixed(30))
    (found / "pairs").mkdir()
    as_tar(found / "pairs", mixed(30, kinds=2))
    for keeps in (True, False):
        for name in ("caption", "contrast"):
            prepare_run(cached(found, name, keeps=keeps), world_size=1)
    return found


def trained(plan_text: str, root: Path, keeps: bool) -> dict[str, Any]:
    """Return by task: losses and norms of some steps, final weights, an evaluation, and the keys of a batch."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh, found = build_mesh(plan), {}
    with Float64Throughout():
        for name in ("caption", "contrast"):
            made = cached(root, name, keeps=keeps)
            task: Any = find_task(made)
            task.open(run_folder(made))
            share = Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size)
            batches, held = task.batches(share), task.eval_batches(share)
            model = task.initial_model(plan)
            freeze(model, made.optimizer)
            parallelize(model, mesh)
            optimizer = build_optimizer(model.named_parameters(), made.optimizer)
            step = TrainStep(model, optimizer, task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
            task.begin(RankForwards(model, mesh, task))
            own = [batches.batches(index) for index in range(3)]
            steps = [step(Microbatches(one)) for one in own]
            whole = {path: tensor.clone() for path, tensor in capture_model(model).items()}
            scores = evaluate(model, held, mesh, task)
            found[name] = ([(one.loss, one.grad_norm) for one in steps], whole, scores.metrics, sorted(own[0][0]))
    return found


def check(results: list[dict[str, Any]], root: Path) -> None:
    wanted = trained("dp_replicate=1", root, keeps=False)
    for found in results:
        for name, (numbers, weights, scores, names) in found.items():
            theirs, state, measured, _ = wanted[name]
            for one, other in zip(numbers, theirs, strict=True):
                assert one == pytest.approx(other, rel=1e-10), name
            for path, tensor in weights.items():
                torch.testing.assert_close(tensor, state[path], rtol=1e-10, atol=1e-10, msg=path)
            assert scores == pytest.approx(measured), name
            assert {"vision_states", "sound_states"} <= set(names)
            assert not {"pixels", "features"} & set(names)


def test_results_match_without_cache(root: Path, ranks2: Any) -> None:
    check(ranks2.run(trained, "dp_shard=2 zero=3 accumulation=2", root, True), root)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3 accumulation=4"])
def test_results_match_under_every_plan(plan: str, root: Path, ranks2: Any) -> None:
    check(ranks2.run(trained, plan, root, True), root)


def losses(made: RunConfig) -> list[float]:
    events = [json.loads(line) for line in run_folder(made).events.read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.full
def test_run_resumes_and_recomputes_changed_features(tmp_path: Path) -> None:
    as_tar(tmp_path, mixed(30))

    def at(steps: int, keeps: bool = True, **options: Any) -> RunConfig:
        made = cached(tmp_path, keeps=keeps, generate=0, **options).model_dump(by_alias=True)
        made["train"]["steps"] = steps
        made["schedule"] = {"kind": "constant", "warmup_steps": 0}
        return RunConfig.model_validate(made)

    folder = tmp_path / "cache" / "features"
    assert run_rank(prepare_run(at(4, keeps=False), 1)).reason == "finished"
    assert run_rank(prepare_run(at(2), 1)).reason == "finished"
    first = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run_rank(prepare_run(at(4), 1)).reason == "finished"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == first, "cached features were recomputed"
    assert losses(at(4)) == pytest.approx(losses(at(4, keeps=False)), rel=1e-5)

    # Other images in the same file, an hour newer: none of the old features are read.
    as_tar(tmp_path, mixed(60)[30:])
    os.utime(tmp_path / "x.tar", ns=(0, 3600 * 10**9))
    with pytest.raises(DataError, match="the records are not those that the run"):
        prepare_run(at(6), 1)
    made = at(2).model_dump(by_alias=True)
    made["run"]["name"] = "anew"
    assert run_rank(prepare_run(RunConfig.model_validate(made), 1)).reason == "finished"
    assert not {path.name for path in folder.iterdir()} <= {path.name for path in first}

    # Encoder weights other than those the run began with.
    weights = tmp_path / "runs" / "anew" / "encoders.json"
    weights.write_text(json.dumps({"vision": "0", "sound": "0"}))
    made["train"]["steps"] = 3
    with pytest.raises(DataError, match="the frozen encoders are not those"):
        run_rank(prepare_run(RunConfig.model_validate(made), 1))


def test_damaged_or_truncated_file_is_never_read(root: Path) -> None:
    made = cached(root)
    task: Any = find_task(made)
    task.open(run_folder(made))
    task.begin(RankForwards(torch.nn.Linear(1, 1), build_mesh(Plan()), task))
    shards: FeatureShards = task.processor.cache.shards["train"][0]
    path, again = shards.path(0), shards[shards.items[0]].copy()
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert not shards.has(0)
    path.write_bytes(data[:-8] + bytes(8))
    other = task.processor.cache.shards["train"][0]
    other._open.clear()
    with pytest.raises(DataError, match=r"gone or damaged\. Delete the file"):
        other[other.items[0]]
    path.unlink()
    task.begin(RankForwards(torch.nn.Linear(1, 1), build_mesh(Plan()), task))
    found = task.processor.cache.shards["train"][0]
    assert (found[found.items[0]] == again).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"groups": []}, r"no encoder is frozen, .*optimizer.groups = \[\{match = \"vision"),
        ({"groups": [{"match": "vision.blocks.*", "lr": 0.0}]}, "no encoder is frozen"),
        ({"augment": True}, r"task\.options\.augment=true changes the encoder's outputs .* Use augment=false"),
        ({"noise": 0.5}, r"task\.options\.noise=0\.5 changes"),
        ({"dropout": 0.1}, r"task\.options\.dropout=0\.1 changes"),
    ],
)
def test_uncacheable_settings_are_rejected(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    as_tar(tmp_path, mixed(10))
    groups = change.pop("groups", FROZEN)
    made = cached(tmp_path, **change).model_dump(by_alias=True)
    made["optimizer"]["groups"] = groups
    with pytest.raises(ConfigError, match=sentence):
        prepare_run(RunConfig.model_validate(made), 1)


def test_tasks_without_encoder_reject_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"data\.cache_features=true: the text decoder has no encoder"):
        find_task(RunConfig.model_validate({"data": {"cache_features": True}}))
