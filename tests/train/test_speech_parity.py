"""Tasks on audio: ranks with clips of different lengths match one process, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.data.audio_clips import as_tar, sound_folder, spoken
from tests.train.speech_folders import save_whisper
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.parallel.parallelize import parallelize
from weft.parallel.zero.magnitudes import load_base
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.preparation import prepare_run
from weft.train.states.model_state import capture_model
from weft.train.step.evaluation import evaluate
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.verify.verifier import Float64Throughout

transformers = pytest.importorskip("transformers")

STEPS = 3
#: Samples of a step: not a multiple of the ranks.
BATCH = 7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("speech")
    sound_folder(found / "folder")
    (found / "said").mkdir()
    as_tar(found / "said", spoken(24), "text")
    save_whisper(found / "whisper")
    for case in ("speech-tiny", "whisper"):
        task = find_task(config(case, found))
        prepare_run(task.config, world_size=1)
    return found


def config(case: str, root: Path, **options: Any) -> RunConfig:
    name, own, model = {
        "speech-tiny": (
            "classify_audio",
            {"data": str(root / "folder"), "mels": 20, "dropout": 0.0, "noise": 0.2, "masks": 1, "holdout": 0.4},
            {},
        ),
        "whisper": (
            "transcribe",
            {"data": str(root / "said" / "x.tar"), "target_len": 16, "generate": 5, "holdout": 0.3},
            {"path": str(root / "whisper")},
        ),
    }[case]
    return RunConfig.model_validate(
        {
            "plan": "dp_replicate=1",
            "task": {"name": name, "options": {**own, **options}},
            "model": model,
            "run": {"name": case, "dir": str(root / "runs")},
            "train": {"steps": 3, "global_batch": BATCH},
            "data": {"cache_dir": str(root / "cache"), "workers": 0},
            "launch": {"device": "cpu"},
        }
    )


def trained(plan_text: str, root: Path, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return by case: losses and norms of some steps, final weights, and an evaluation."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh, found = build_mesh(plan), {}
    with Float64Throughout():
        for case, more in options.items():
            task = find_task(config(case, root, **more))
            model = task.initial_model(plan)
            weights = task.initial_weights(model)
            parallelize(model, mesh, filled_later=weights is not None)
            if weights is not None:
                load_base(model, weights)
            step = TrainStep(model, optimizer_of(model), task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
            share = Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size)
            batches = task.batches(share)
            steps = [step(Microbatches(batches.batches(index))) for index in range(STEPS)]
            whole = {name: tensor.clone() for name, tensor in capture_model(model).items()}
            scores = evaluate(model, task.eval_batches(share), mesh, task)
            found[case] = ([(one.loss, one.grad_norm) for one in steps], whole, scores)
    return found


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6, weight_decay=0.1)


def train_reference(case: str, root: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """Compute the same with only PyTorch and transformers, one unpadded clip at a time."""
    task = find_task(config(case, root))
    if case == "whisper":
        kind = transformers.WhisperForConditionalGeneration
        model = kind.from_pretrained(root / "whisper", dtype=torch.float64, attn_implementation="eager")
        model.model.encoder.embed_positions.requires_grad_(False)  # from_pretrained does not apply this
    else:
        model = task.initial_model(Plan()).double()
    optimizer, numbers, samples = optimizer_of(model), [], task.samples("train")
    model.train()
    for step in range(STEPS):
        losses, count = [], 0
        for place in range(step * BATCH, (step + 1) * BATCH):
            made, learnt = samples.in_epoch(*task.shown(place))
            inputs = torch.from_numpy(made).double()[None]
            if case == "whisper":
                read = torch.tensor([[2, *learnt[:-1].tolist()]])
                logits, labels = model(inputs, decoder_input_ids=read).logits[0], torch.tensor(learnt.tolist())
            else:
                logits, labels = model(inputs, torch.tensor([made.shape[1]])), torch.tensor([learnt])
            losses.append(F.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
        loss = torch.stack(losses).sum() / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numbers.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, model.state_dict(), error_rate(task, model) if case == "whisper" else accuracy(task, model)


@torch.no_grad()
def accuracy(task: Any, model: torch.nn.Module) -> float:
    model.eval()
    held = task.samples("eval")
    right = [
        int(model(torch.from_numpy(made).double()[None], torch.tensor([made.shape[1]])).argmax() == label)
        for made, label in (held[index] for index in range(BATCH))
    ]
    return sum(right) / len(right)


@torch.no_grad()
def error_rate(task: Any, model: Any) -> float:
    """Return the letter error rate of greedy decoding without a cache, by the textbook's recursion."""
    model.eval()
    tokenizer, held = task.network.tokenizer(), task.samples("eval")
    edits = letters = 0
    for index in range(BATCH):
        made, learnt = held[index]
        ids = [2]
        while len(ids) < 6 and ids[-1] != 3:
            logits = model(torch.from_numpy(made).double()[None], decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        written, true = (tokenizer.decode(each, skip_special_tokens=True).strip() for each in (ids, learnt.tolist()))
        edits, letters = edits + distance(written, true), letters + len(true)
    return edits / letters


def distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    same = distance(one[1:], other[1:]) + (one[0] != other[0])
    return min(same, 1 + distance(one[1:], other), 1 + distance(one, other[1:]))


def assert_equal(got: Any, wanted: Any, case: str) -> None:
    (numbers, weights, scores), (theirs, state, score) = got, wanted
    for one, other in zip(numbers, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-10), case
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, state[name].to(tensor.dtype), rtol=1e-8, atol=1e-10, msg=name)
    name = "character_error_rate" if case == "whisper" else "accuracy"
    assert scores.metrics[name] == pytest.approx(score), case


def check(plan: str, root: Path, ranks: Any) -> None:
    both: dict[str, dict[str, Any]] = {"speech-tiny": {}, "whisper": {}}
    with Float64Throughout():
        wanted = {case: train_reference(case, root) for case in both}
    for found in ranks.run(trained, plan, root, both):
        for case in both:
            assert_equal(found[case], wanted[case], case)


def test_ranks_train_and_evaluate_like_one_process(root: Path, ranks2: Any) -> None:
    check("dp_shard=2 zero=3", root, ranks2)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3 accumulation=3"])
def test_results_match_under_every_plan(plan: str, root: Path, ranks2: Any) -> None:
    check(plan, root, ranks2)


@pytest.mark.full
def test_dropout_does_not_depend_on_the_plan(root: Path, ranks2: Any) -> None:
    more = {"speech-tiny": {"dropout": 0.2}}
    wanted = trained("dp_replicate=1", root, more)["speech-tiny"][0]
    for plan in ("dp_replicate=2", "dp_shard=2 zero=3 accumulation=2"):
        for found in ranks2.run(trained, plan, root, more):
            for one, other in zip(found["speech-tiny"][0], wanted, strict=True):
                assert one == pytest.approx(other, rel=1e-10), plan
