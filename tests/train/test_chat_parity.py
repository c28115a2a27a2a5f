"""`task=chat`: ranks with different numbers of images and audio clips match one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.choice import gate_runs, todays
from tests.train.chat_folders import SINGLE, data_of, save_folder, use_without_videos, write_all
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
from weft.train.tasks.chat import PACKED
from weft.train.tasks.registry import find_task
from weft.train.weights.run_adapter import with_adapter
from weft.verify.verifier import Float64Throughout

transformers = pytest.importorskip("transformers")

STEPS, BATCH = 3, 5
#: Families, with the rank of their adapter. Every fourth conversation has only text.
CASES = {"qwen3_vl": 2, "llava": 0, "qwen2_audio": 0}
MORE = ["qwen2_vl", "qwen2_5_vl", "internvl", "gemma3", "idefics3", "smolvlm", "qwen3_vl", "qwen3_vl_moe",
        "llava_next", "llava_onevision", "mistral3", "paligemma", "gemma4", "glm4v", "aya_vision",
        "qwen2_5_omni_thinker", "qwen3_5", "glm46v"]  # fmt: skip
PLANS = ["dp_shard=2 zero=3", "tp=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "dp_replicate=2",
         "dp_shard=2 zero=3 accumulation=3 recompute=full"]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("chat_parity")
    write_all(found, count=24)
    return found


class Float64Inputs(Float64Throughout):
    """Float64Throughout, which converts the other argument of functions that refuse two dtypes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (F.grid_sample, torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul)
            and args[0].dtype != args[1].dtype
        ):
            args = (args[0].double(), args[1].double(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


def config(root: Path, family: str, rank: int, packing: str | None = None) -> RunConfig:
    data = root / data_of(family)
    return RunConfig.model_validate({
        "plan": "dp_replicate=1", "task": {"name": "chat", "options": {"data": str(data), "holdout": 0.3}},
        "model": {"path": str(root / family)}, "run": {"name": f"{family}-{rank}", "dir": str(root / "runs")},
        "train": {"steps": STEPS, "global_batch": BATCH, "seq_len": 256}, "adapter": {"rank": rank} if rank else {},
        "data": {"cache_dir": str(root / "cache"), "workers": 0, "packing": packing,
                 "max_bad_fraction": 0.6 if family in SINGLE else 0.01},
        "launch": {"device": "cpu"},
    })  # fmt: skip


def prepared(root: Path, cases: dict[str, int]) -> None:
    use_without_videos()
    for family, rank in cases.items():
        if not (root / family / "model.safetensors").exists():
            save_folder(root, family)
        if not (root / "runs" / f"{family}-{rank}").exists():
            prepare_run(config(root, family, rank), 1)


def opened(root: Path, family: str, rank: int, packing: str | None = None) -> Any:
    """Return a task whose samples are read already: feature extractors compute in float32, by torch."""
    use_without_videos()
    task = find_task(config(root, family, rank, packing))
    every = {split: task.samples(split) for split in ("train", "eval")}
    known = {split: [samples[index] for index in range(len(samples))] for split, samples in every.items()}
    _ = task.processor._blanks
    task.samples = known.__getitem__
    return task


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6, weight_decay=0.0)


def trained(plan_text: str, root: Path, cases: dict[str, int], packing: str | None = None) -> dict[str, Any]:
    """Return by family: losses and norms of some steps, the trained weights, and an evaluation."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh, found = build_mesh(plan), {}
    tasks = {family: opened(root, family, rank, packing) for family, rank in cases.items()}
    with Float64Inputs():
        for family, task in tasks.items():
            model = task.initial_model(plan)
            model.set_experts_implementation("eager")  # grouped products do not support float64
            weights = task.initial_weights(model)
            with_adapter(model, task.config)
            parallelize(model, mesh, seed=1, filled_later=True)
            load_base(model, weights)
            step = TrainStep(model, optimizer_of(model), task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
            share = Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size)
            batches = task.batches(share)
            steps = [step(Microbatches(batches.batches(index))) for index in range(STEPS)]
            whole = {name: tensor.clone() for name, tensor in capture_model(model).items()}
            scores = evaluate(model, task.eval_batches(share), mesh, task)
            found[family] = ([(one.loss, one.grad_norm) for one in steps], whole, scores.loss)
    return found


def reference(task: Any) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """Compute the same with only PyTorch and transformers, one unpadded conversation at a time."""
    task.pad_multiple = 1
    model: Any = transformers.AutoModelForMultimodalLM.from_pretrained(
        task.config.model.path, dtype=torch.float64, experts_implementation="eager"
    )
    shapes = task.shapes()  # from_pretrained rounds buffers to float32, and lets constant tables train
    for name, buffer in shapes.named_buffers():
        if not buffer.is_meta:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, buffer.double() if buffer.is_floating_point() else buffer)
    for name, param in shapes.named_parameters():
        model.get_parameter(name).requires_grad_(param.requires_grad)
    optimizer, numbers, samples = optimizer_of(model), [], task.samples("train")

    def losses(chosen: list[Any]) -> torch.Tensor:
        found, count = [], 0
        for sample in chosen:
            batch = task.collate([sample])
            processor = task.processor.survey.processor
            if not any(name in sample for kind in processor.kinds.values() for name in kind.inputs):
                names = {"input_ids", "attention_mask", "labels", *processor.types}
                length = len(sample["input_ids"])  # without the blank image
                batch = {name: value[:, :length] for name, value in batch.items() if name in names}
            labels = batch.pop("labels")
            inputs = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
            logits = model(**inputs, use_cache=False).logits
            found.append(F.cross_entropy(logits[0], labels[0], reduction="sum"))
            count += int((labels >= 0).sum())
        return torch.stack(found).sum() / count

    model.train()
    for step in range(STEPS):
        loss = losses([samples[task.shown(place)[1]] for place in range(step * BATCH, (step + 1) * BATCH)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numbers.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    held = task.samples("eval")
    with torch.no_grad():
        return numbers, model.state_dict(), float(losses(held[: len(task.media("eval"))]))


def assert_equal(got: Any, wanted: Any, family: str) -> None:
    for one, other in zip(got[0], wanted[0], strict=True):
        assert one == pytest.approx(other, rel=1e-9), family
    for name, tensor in got[1].items():
        torch.testing.assert_close(
            tensor, wanted[1][name].to(tensor.dtype), rtol=1e-7, atol=1e-9, msg=f"{family} {name}"
        )
    assert got[2] == pytest.approx(wanted[2], rel=1e-9), family


def check(plan: str, root: Path, ranks: Any, cases: dict[str, int], packing: str | None = None) -> None:
    prepared(root, cases)
    tasks = {family: opened(root, family, 0) for family, rank in cases.items() if not rank}
    with Float64Inputs():
        wanted = {family: reference(task) for family, task in tasks.items()}
    if adapted := {family: rank for family, rank in cases.items() if rank}:
        wanted |= trained("dp_replicate=1", root, adapted)
    for family, rank in cases.items():
        for found in ranks.run(trained, plan, root, {family: rank}, packing):
            assert_equal(found[family], wanted[family], family)


@pytest.mark.parametrize("plan", todays(gate_runs(PLANS, 0, 1), parts=2))
def test_ranks_train_and_evaluate_like_one_process(plan: str, root: Path, ranks2: Any) -> None:
    check(plan, root, ranks2, CASES)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS[:2])
@pytest.mark.parametrize("family", MORE)
def test_other_families_train_like_one_process(family: str, plan: str, root: Path, ranks2: Any) -> None:
    if family == "mistral3":
        pytest.importorskip("torchvision")
    # Under zero=3, the boundaries of audio clips in Qwen2.5-Omni's encoder are unknown, which is an error.
    check(plan.replace("3", "2") if "omni" in family else plan, root, ranks2, {family: 0})


@pytest.mark.parametrize("plan", gate_runs(PLANS[:2], 0))
@pytest.mark.parametrize("family", gate_runs(PACKED, 6))
def test_packed_conversations_train_like_one_by_one(family: str, plan: str, root: Path, ranks2: Any) -> None:
    prepared(root, {family: 0})
    task = opened(root, family, 0, "fit")
    task.network.check_inputs(task.processor.survey.processor)
    rows = task.collate(task.samples("train")[:6])
    assert len(rows["input_ids"]) < 4
    assert rows["attention_mask"].dtype == torch.int64
    check(plan, root, ranks2, {family: 0}, "fit")
