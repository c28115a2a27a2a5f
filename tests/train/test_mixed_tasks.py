"""`caption`, `contrast`, `classify`: runs learn, are equal under every plan, and reject invalid options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.data.mixed_records import as_tar, mixed
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, DataError, ModelError
from weft.models.multimodal import ModelInputs, build_media_decoder
from weft.parallel.parallelize import parallelize
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.states.model_state import capture_model
from weft.train.step.evaluation import evaluate
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.verify.rank_pool import RankError
from weft.verify.verifier import Float64Throughout

STEPS, BATCH = 2, 7


def config(root: Path, name: str = "caption", steps: int = 2, batch: int = BATCH, **options: Any) -> RunConfig:
    usual = {"data": str(root / "x.tar"), "model": "omni-tiny", "side": 16, "grid": 4, "mels": 16, "holdout": 0.4}
    usual |= {"rate": 8000} | ({"generate": 4} if name == "caption" else {})
    return RunConfig.model_validate(
        {
            "plan": "dp_replicate=1",
            "task": {"name": name, "options": {**usual, **options}},
            "run": {"name": name, "dir": str(root / "runs")},
            "train": {"steps": steps, "global_batch": batch},
            "optimizer": {"lr": 2e-3},
            "data": {"cache_dir": str(root / "cache"), "workers": 0},
            "eval": {"every": 0, "batches": 1},
            "checkpoint": {"every": 0},
            "launch": {"device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples: two of three have no image; those of contrast have one image or audio clip each."""
    found = tmp_path_factory.mktemp("mixed")
    as_tar(found, mixed(30))
    (found / "pairs").mkdir()
    as_tar(found / "pairs", mixed(30, kinds=2))
    for made in (config(found), pairs(found)):
        prepare_run(made, world_size=1)
    return found


def pairs(root: Path) -> RunConfig:
    return config(root, "contrast", data=str(root / "pairs" / "x.tar"))


def trained(plan_text: str, root: Path) -> dict[str, Any]:
    """Return by task: losses and norms of some steps, final weights, and an evaluation."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh, found = build_mesh(plan), {}
    with Float64Throughout():
        for made in (config(root), pairs(root)):
            task: Any = find_task(made)
            model = task.initial_model(plan)
            parallelize(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
            step = TrainStep(model, optimizer, task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
            share = Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size)
            batches = task.batches(share)
            steps = [step(Microbatches(batches.batches(index))) for index in range(STEPS)]
            whole = {name: tensor.clone() for name, tensor in capture_model(model).items()}
            scores = evaluate(model, task.eval_batches(share), mesh, task)
            found[made.task.name] = ([(one.loss, one.grad_norm) for one in steps], whole, scores.metrics)
    return found


def check(plan: str, root: Path, ranks: Any) -> None:
    wanted = trained("dp_replicate=1", root)
    for found in ranks.run(trained, plan, root):
        for name, (numbers, weights, scores) in found.items():
            theirs, state, measured = wanted[name]
            for one, other in zip(numbers, theirs, strict=True):
                assert one == pytest.approx(other, rel=1e-10), name
            for path, tensor in weights.items():
                torch.testing.assert_close(tensor, state[path], rtol=1e-8, atol=1e-10, msg=path)
            assert scores == pytest.approx(measured), name


def test_ranks_without_media_match_one_process(root: Path, ranks2: Any) -> None:
    check("dp_shard=2 zero=3", root, ranks2)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3 accumulation=4"])
def test_results_match_under_every_plan(plan: str, root: Path, ranks2: Any) -> None:
    check(plan, root, ranks2)


@pytest.mark.full
def test_tensor_parallel_is_rejected_with_one_message(root: Path, ranks2: Any) -> None:
    """The model takes image positions, which tracing cannot generate, so no layout is found."""
    with pytest.raises(RankError, match="LayoutError: layout: MediaDecoder cannot be traced"):
        ranks2.run(trained, "tp=2", root)


def test_sample_loss_does_not_depend_on_its_batch(root: Path) -> None:
    """Padding, blank media and the position of media rows change nothing; the reference runs one forward per sample."""
    task: Any = find_task(config(root))
    samples = [task.samples("train")[index] for index in range(6)]
    torch.manual_seed(0)
    model = task.build().double().train()

    def loss(some: list[Any]) -> float:
        batch = {
            name: value.double() if value.is_floating_point() else value for name, value in task.collate(some).items()
        }
        logits = model(**{name: value for name, value in batch.items() if name != "labels"})
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()

    assert len({len(sample.media) for sample in samples}) > 1
    assert loss(samples) == pytest.approx(sum(loss([sample]) for sample in samples), rel=1e-12)


@pytest.mark.full
def test_run_learns_colors_and_words(tmp_path: Path) -> None:
    as_tar(tmp_path, mixed(100))
    made = config(tmp_path, steps=150, batch=16, generate=12)
    folder = prepare_run(made, 1)
    assert run_rank(folder).reason == "finished"
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    last = [event for event in events if event["event"] == "eval"][-1]
    assert last["character_error_rate"] < 0.1
    assert last["accuracy"] > 0.8


def test_invalid_options_are_rejected(root: Path, tmp_path: Path) -> None:
    for options, error, said in (
        ({"side": 30}, DataError, r"^side=30: grid=4 patches to a side must divide it\. Use 32 and 8\.$"),
        ({"model": "omni-tony"}, ModelError, r"^model=omni-tony: .* Did you mean 'omni-tiny'\?$"),
        ({"generate": -1}, DataError, r"^generate=-1: it is a number of tokens\. Use 0 to 65536\.$"),
        ({"mels": 4}, DataError, r"^mels=4: it is 8 to 128\. Use a number between\.$"),
    ):
        with pytest.raises(error, match=said):
            find_task(config(root, **options))
    task = find_task(config(root, model="vlm-tiny"))
    with pytest.raises(DataError, match=r"it has an audio clip, and vlm-tiny has no audio input; model=omni-tiny has"):
        task.samples("train")
    task = find_task(config(root, "contrast"))
    with pytest.raises(DataError, match=r"it has 2 images and audio clips, and contrast compares one with a text"):
        task.samples("train")
    task = find_task(config(root, data=str(tmp_path)))
    with pytest.raises(DataError, match=r"there is no \.tar, \.jsonl or \.parquet file\. Give files of records"):
        task.samples("train")
    with pytest.raises(ModelError, match=r"^side=30: 8 patches to a side must divide it"):
        build_media_decoder("vlm-tiny", ModelInputs(260, 64, side=30))


def test_classify_task_is_selected_by_its_model(tmp_path: Path) -> None:
    def named(**more: Any) -> str:
        values = {"task": {"name": "classify", "options": {"data": "x", **more.pop("options", {})}}, **more}
        return type(find_task(RunConfig.model_validate(values))).__name__

    assert named() == "ImageClassTask"
    assert named(options={"model": "speech-tiny"}) == "AudioClassTask"
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ConfigError, match=r"a 'llava' does not classify texts, .*\. Leave model\.path out, or"):
        named(model={"path": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    texts = RunConfig.model_validate({"task": {"name": "classify"}, "model": {"path": str(tmp_path)}})
    assert type(find_task(texts)).__name__ == "TextClassTask"
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        named(model={"path": str(tmp_path / "nowhere")})


def test_planner_counts_the_encoders(root: Path) -> None:
    task: Any = find_task(config(root))
    traced = task.describe().traced
    pictures = task.build().vision
    # Two matrix products of 2 FLOPs per weight and patch, and twice as many in backward: images alone take more.
    blocks = sum(param.numel() for param in pictures.blocks.parameters() if param.ndim > 1)
    assert traced.flops(1.0, 1.0) >= 6 * blocks * 16
    assert traced.num_params == sum(param.numel() for param in task.build().parameters())
