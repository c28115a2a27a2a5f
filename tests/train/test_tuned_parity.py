"""Tasks on Hugging Face folders: ranks match plain transformers in one process, in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.train.tuned_folders import CASES, save_model, settings, write_tables
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.flat_slices import read_full
from weft.parallel.zero.magnitudes import load_base
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.states.model_state import capture_model
from weft.train.step.evaluation import evaluate
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.verify.verifier import Float64Throughout

transformers = pytest.importorskip("transformers")

STEPS = 3
#: One case of each task, for the gate.
CHOSEN = ("tokens", "masked", "t5", "embed", "classify", "reward")


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Write folders of all families and the tables. Evaluation sets have eleven rows, which batches do not divide."""
    found = tmp_path_factory.mktemp("tuned")
    (found / "eval").mkdir()
    write_tables(found)
    write_tables(found / "eval", 11)
    return found


def opened(case: str, root: Path):
    """Open a case's task as ranks do."""
    family = CASES[case][1]
    if not (root / family).exists():
        save_model(root / family, family)
    folder = root / "runs" / case
    if not (folder / "rows.json").exists():
        prepare_run(load_config(None, settings(case, root)).config, world_size=1)
    task = find_task(RunFolder(folder).config())
    task.open(RunFolder(folder))
    return task


def trained(plan_text: str, root: Path, cases: tuple[str, ...]):
    """Return by case: losses and norms of some steps, final weights, and loss and scores of an evaluation."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    with Float64Throughout():  # float32 parts of the models would round differently by plan
        return _trained(plan, build_mesh(plan), root, cases)


def _trained(plan: Plan, mesh, root: Path, cases: tuple[str, ...]):
    found = {}
    for case in cases:
        task = opened(case, root)
        model = task.initial_model(plan)
        weights = task.initial_weights(model)
        parallelize(model, mesh, filled_later=True)
        load_base(model, weights)
        step = TrainStep(model, optimizer_of(model), task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
        share = Share(8, plan.microbatches_per_step, mesh.data.rank, mesh.data.size)
        batches = task.batches(share)
        steps = [step(Microbatches(batches.batches(index))) for index in range(STEPS)]
        numbers = [(one.loss, one.grad_norm) for one in steps]
        whole = {name: tensor.clone() for name, tensor in capture_model(model).items()}
        found[case] = (numbers, whole, evaluate(model, task.eval_batches(share), mesh, task))
    return found


def optimizer_of(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6, weight_decay=0.1)


def contrastive(model, batch, temperature: float, pooling: str):
    """Return InfoNCE over the batch, and the products of its vectors."""
    counted = batch["is_counted"].bool()
    inputs = {name: value for name, value in batch.items() if name != "is_counted"}
    states, mask = model(**inputs).last_hidden_state, batch["attention_mask"]
    rows = torch.arange(len(states))
    pooled = (
        states[rows, mask.sum(1) - 1] if pooling == "last" else (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    )
    query, *texts = F.normalize(pooled, dim=-1).unflatten(0, (len(counted), -1))[counted].unbind(1)
    logits = query @ torch.cat(texts).T / temperature
    return F.cross_entropy(logits, torch.arange(len(query))), query, texts[0]


def pair_losses(model, task, batch):
    """Return the Bradley-Terry losses of a batch, and chosen minus rejected rewards, of the counted pairs."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    chosen, rejected = model(**inputs).logits[:, 0].view(-1, 2)[batch["labels"].bool()].unbind(1)
    return torch.log1p(torch.exp(rejected - chosen)) + task.center * (chosen + rejected) ** 2, chosen - rejected


def train_reference(case: str, root: Path):
    """Compute the same with only transformers and PyTorch, on the task's batches."""
    task = opened(case, root)
    kind = {"": "AutoModel"}.get(task.head, f"AutoModelFor{task.head}")
    changes = dict(task.model_changes())
    if transformers.AutoConfig.from_pretrained(root / CASES[case][1]).pad_token_id is None:
        changes["pad_token_id"] = task.pad_id  # transformers rejects batches without a padding id
    model = getattr(transformers, kind).from_pretrained(root / CASES[case][1], dtype=torch.float64, **changes)
    model.double()  # includes the rotary frequencies, which from_pretrained leaves in float32
    source = task.initial_weights(task.shapes())
    state = model.state_dict()
    for name in source.new_names:  # the new head, which the folder does not have
        state[name].copy_(read_full(source, name))
    for name, param in model.named_parameters():
        param.requires_grad_("pooler." not in name or task.head != "")
    optimizer, numbers = optimizer_of(model), []

    def loss_of(batch):
        if task.head == "":
            return contrastive(model, batch, task.temperature, task.pooling)[0]
        if hasattr(task, "center"):
            return pair_losses(model, task, batch)[0].mean()
        labels = batch["labels"].double() if batch["labels"].is_floating_point() else batch["labels"]
        return model(**{**batch, "labels": labels}).loss

    model.train()
    batches = task.batches(Share(8))
    for index in range(STEPS):
        loss = loss_of(batches.batches(index)[0])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numbers.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return task, model.eval(), numbers


def assert_equal(got, numbers, model) -> None:
    ours, weights, _ = got
    for one, other in zip(ours, numbers, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    theirs = model.state_dict()
    assert weights
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, theirs[name].to(tensor.dtype), rtol=1e-7, atol=1e-9, msg=name)


def measured(task, model) -> tuple[float, int, dict[str, float]]:
    """Return loss, count and scores of the evaluation set by direct formulas."""
    losses, outputs, rows = [], [], []
    with torch.no_grad():
        for batch in task.eval_batches(Share(8)):
            if task.head == "":
                loss, query, text = contrastive(model, batch, task.temperature, task.pooling)
                losses.append(loss * len(query))
                outputs.append((query, text))
                continue
            if hasattr(task, "center"):
                loss, margins = pair_losses(model, task, batch)
                losses.append(loss)
                outputs.append(margins)
                continue
            labels = batch["labels"]
            counted = labels.isfinite() if labels.is_floating_point() else labels != -100
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
            if labels.is_floating_point():
                losses.append((logits[:, 0] - labels)[counted].square().sum())
                outputs.append(logits[:, 0][counted])
            else:
                losses.append(F.cross_entropy(logits[counted], labels[counted], reduction="sum"))
                outputs.append(logits[counted].argmax(-1))
            rows.append(labels[counted])
    if task.head == "":
        queries, texts = (torch.cat(each) for each in zip(*outputs, strict=True))
        products = queries @ texts.T
        rank = (products > products.diagonal()[:, None]).sum(1)
        scores = {f"recall_at_{most}": (rank < most).double().mean().item() for most in (1, 10)}
        return sum(losses).item() / len(queries), len(queries), scores
    if hasattr(task, "center"):
        found, margins = torch.cat(losses), torch.cat(outputs)
        scores = {"reward_accuracy": (margins > 0).double().mean().item(), "reward_margin": margins.mean().item()}
        return found.mean().item(), len(found), scores
    message, true = torch.cat(outputs), torch.cat(rows)
    mean = sum(losses).item() / len(true)
    if true.is_floating_point():
        scores = {"pearson": torch.corrcoef(torch.stack([message, true.double()]))[0, 1].item()}
    elif "perplexity" in {metric.name for metric in task.metrics}:
        scores = {
            "perplexity": math.exp(mean),
            "token_accuracy": (message == true).double().mean().item(),
        }
    else:
        each = []
        for one in torch.cat([message, true]).unique():
            hit = ((message == one) & (true == one)).sum().item()
            each.append(2 * hit / ((message == one).sum().item() + (true == one).sum().item()))
        scores = {"accuracy": (message == true).double().mean().item(), "macro_f1": sum(each) / len(each)}
    return mean, len(true), scores


def check(plan: str, root: Path, cases: tuple[str, ...], ranks) -> None:
    for case in cases:  # before the ranks, which open prepared data
        opened(case, root)
    results = ranks.run(trained, plan, root, cases) if ranks else [trained(plan, root, cases)]
    for case in cases:
        with Float64Throughout():
            task, model, numbers = train_reference(case, root)
            mean, count, scores = measured(task, model)
        for result in results:
            assert_equal(result[case], numbers, model)
            evaluation = result[case][2]
            assert (evaluation.loss, evaluation.count) == (pytest.approx(mean, rel=1e-6), count), case
            for name, value in evaluation.metrics.items():
                assert value == pytest.approx(scores[name], rel=1e-6), (case, name)


def test_ranks_train_and_evaluate_like_transformers(root, ranks2):
    check("dp_shard=2 zero=3 accumulation=2", root, CHOSEN, ranks2)


def test_tensor_parallel_ranks_match_transformers(root, ranks2):
    check("tp=2", root, ("classify", "embed"), ranks2)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2",
        "dp_shard=2 zero=1",
        "dp_shard=2 zero=2 accumulation=4",
        "dp_shard=2 zero=3",
        "tp=2 accumulation=2",
    ],
)
def test_every_case_under_every_plan(plan, root, ranks2):
    check(plan, root, tuple(CASES), ranks2)


@pytest.mark.full
def test_one_process_with_accumulation(root):
    check("accumulation=4", root, tuple(CASES), None)


@pytest.mark.full
def test_dropout_does_not_depend_on_the_plan(tmp_path, ranks2):
    (tmp_path / "eval").mkdir()
    write_tables(tmp_path)
    write_tables(tmp_path / "eval", 11)
    cases = ("classify", "masked", "t5", "embed")
    for family in {CASES[case][1] for case in cases}:
        save_model(tmp_path / family, family, dropout=0.2)
    for case in cases:
        opened(case, tmp_path)
    wanted = trained("dp_replicate=1", tmp_path, cases)
    found = {"accumulation=4": [trained("accumulation=4", tmp_path, cases)]}
    for plan in ("dp_shard=2 zero=3 accumulation=2", "tp=2"):
        found[plan] = ranks2.run(trained, plan, tmp_path, cases)
    for plan, results in found.items():
        for result in results:
            for case in cases:
                for one, other in zip(result[case][0], wanted[case][0], strict=True):
                    assert one == pytest.approx(other, rel=1e-9), (plan, case)
