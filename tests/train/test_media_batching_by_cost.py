"""Batching by cost for images and audio: sample costs, and equality with fixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data import audio_clips
from tests.data.mixed_records import as_tar, mixed
from tests.train import test_mixed_tasks, test_speech_parity
from tests.train.speech_folders import save_whisper
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError
from weft.parallel.parallelize import parallelize
from weft.parallel.zero.magnitudes import load_base
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import run_folder
from weft.train.preparation import prepare_run
from weft.train.states.model_state import capture_model
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.verify.verifier import Float64Throughout

STEPS, BATCH = 2, 7
FROZEN = [{"match": "vision.*", "lr": 0.0}]


def by_cost(made: RunConfig, **train: Any) -> RunConfig:
    """Return the config with batching by cost, with a low bound so that steps have several microbatches."""
    values = made.model_dump(by_alias=True)
    values["data"] |= {"batching": "cost", "microbatch_cost": train.pop("microbatch_cost", "auto")}
    values["train"] |= train
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("media_by_cost")
    as_tar(found, mixed(40))
    audio_clips.sound_folder(found / "folder")
    (found / "said").mkdir()
    audio_clips.as_tar(found / "said", audio_clips.spoken(24), "text")
    save_whisper(found / "whisper")
    speech = (test_speech_parity.config(case, found) for case in ("speech-tiny", "whisper"))
    for made in (test_mixed_tasks.config(found), *speech):
        prepare_run(made, world_size=1)
    return found


def opened(made: RunConfig) -> Any:
    task: Any = find_task(made)
    task.open(run_folder(made))
    return task


def trained(plan_text: str, made: RunConfig) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[int]]:
    """Return losses and norms of some steps, final weights, and the number of microbatches per step."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh = build_mesh(plan)
    with Float64Throughout():
        task = opened(made)
        model = task.initial_model(plan)
        weights = task.initial_weights(model)
        parallelize(model, mesh, filled_later=weights is not None)
        if weights is not None:
            load_base(model, weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
        step = TrainStep(model, optimizer, task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
        batches = task.batches(Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size))
        cut = [batches.batches(index) for index in range(STEPS)]
        done = [step(Microbatches(own, any_number=True)) for own in cut]
        whole = {name: tensor.clone() for name, tensor in capture_model(model).items()}
    return [(one.loss, one.grad_norm) for one in done], whole, [len(own) for own in cut]


def assert_equal(got: Any, wanted: Any) -> None:
    for one, other in zip(got[0], wanted[0], strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    for name, tensor in got[1].items():
        torch.testing.assert_close(tensor, wanted[1][name], rtol=1e-8, atol=1e-10, msg=name)


def bound_of(task: Any, samples: float) -> float:
    """Return the cost of that many of the most expensive samples."""
    lengths = np.asarray(task.lengths())
    beside = task.extra_costs()
    return float((task.length_costs(lengths) + (0.0 if beside is None else beside)).max()) * samples


@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", pytest.param("dp_replicate=2", marks=pytest.mark.full)])
def test_images_and_audio_by_cost_match_fixed_batches(plan: str, root: Path, ranks2: Any) -> None:
    made = test_mixed_tasks.config(root)
    wanted = trained("dp_replicate=1", made)
    cut = by_cost(made, microbatch_cost=bound_of(opened(made), 2.5))
    for found in ranks2.run(trained, plan, cut):
        assert_equal(found, wanted)
        assert max(found[2]) > 1


@pytest.mark.full  # the gate runs it for texts: tests/train/test_batching_by_cost.py
def test_image_steps_by_cost_are_equal_under_every_plan(root: Path, ranks2: Any) -> None:
    most = bound_of(opened(test_mixed_tasks.config(root)), 3)
    made = by_cost(test_mixed_tasks.config(root), global_cost=most)
    wanted = trained("dp_replicate=1", made)
    for found in ranks2.run(trained, "dp_shard=2 zero=3", by_cost(made, microbatch_cost=most / 2)):
        assert_equal(found, wanted)
    places = opened(made).step_borders()
    assert len({places.first(step + 1) - places.first(step) for step in range(6)}) > 1


@pytest.mark.full
@pytest.mark.parametrize("case", ["speech-tiny", "whisper"])
def test_audio_clips_by_cost_match_fixed_batches(case: str, root: Path, ranks2: Any) -> None:
    made = test_speech_parity.config(case, root)
    wanted = trained("dp_replicate=1", made)
    cut = by_cost(made, microbatch_cost=bound_of(opened(made), 2.5))
    for found in ranks2.run(trained, "dp_shard=2 zero=3", cut):
        assert_equal(found, wanted)


def test_lengths_match_padded_sample_lengths(root: Path) -> None:
    task = opened(test_mixed_tasks.config(root))
    samples = task.samples("train")
    own = [task.collate([samples[index]])["input_ids"].shape[1] for index in range(len(samples))]
    # An audio clip may differ from its header by one frame, that is one token, rounded to eight.
    assert np.abs(np.asarray(own) - task.lengths()).max() <= 8
    assert np.mean(np.asarray(own) == task.lengths()) > 0.8


def test_frozen_costs_a_third_and_cached_costs_nothing(root: Path) -> None:
    made = test_mixed_tasks.config(root, augment=False)
    values = made.model_dump(by_alias=True)
    values["optimizer"]["groups"] = FROZEN
    frozen = RunConfig.model_validate(values)
    values["data"]["cache_features"] = True
    kept = RunConfig.model_validate(values)
    owners, sizes = opened(made).media("train").media_sizes()
    costs = [opened(one).extra_costs() for one in (made, frozen, kept)]
    pictures = np.bincount(owners[sizes[:, 0] == 0], minlength=len(costs[0]))
    alone = (pictures > 0) & (np.bincount(owners[sizes[:, 0] > 0], minlength=len(pictures)) == 0)
    assert alone.any()
    np.testing.assert_allclose(costs[1][alone], costs[0][alone] / 3)
    assert not costs[2][alone].any()
    each = costs[0][alone] / pictures[alone]
    np.testing.assert_allclose(each, each[0])
    # 16 patches of a tower as wide as the text, and about as deep.
    assert 8 < each[0] < 32


def test_task_that_compares_samples_rejects_batching_by_cost(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.name=contrast does not report the length"):
        find_task(by_cost(test_mixed_tasks.config(root, "contrast")))
