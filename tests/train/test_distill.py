"""Distillation: the formula as a reference, equal losses under every plan, and rejected teachers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.train.preference_cases import SPEC
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.data.store.prepare import prepare_data
from weft.data.text.tokenizer import Tokenizer, save_bytes_tokenizer
from weft.errors import ConfigError
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.zero.magnitudes import load_base
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.step.evaluation import RankForwards
from weft.train.step.train_step import TrainStep
from weft.train.tasks.distill import DistillTask, distilled_losses
from weft.train.tasks.registry import find_task

transformers = pytest.importorskip("transformers")

CASES = {"half": {}, "soft": {"temperature": 2.0, "mix": 0.0}, "top": {"top_k": 5, "temperature": 1.5}}
STEPS, BATCH = 3, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with a teacher, whose vocabulary is padded, and chats."""
    folder = tmp_path_factory.mktemp("distill")
    torch.manual_seed(0)
    shape = {"vocab_size": 264, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder / "teacher")
    save_bytes_tokenizer(folder / "bytes")
    (folder / "teacher" / "tokenizer.json").write_text(Tokenizer.load(folder / "bytes").library_json())
    rows = [{"prompt": f"number {n}:", "completion": f" {n * n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def task_of(root: Path, **options) -> DistillTask:
    words = ["task=distill", f"task.options.teacher={root / 'teacher'}", f"data.train={root / 'rows.jsonl'}",
             f"data.cache_dir={root / 'cache'}", "tokenizer.kind=bytes", "train.seq_len=24", "data.holdout=0",
             f"train.global_batch={BATCH}", "optimizer.lr=0.01"]  # fmt: skip
    task = DistillTask(str(root / "teacher"), **options)
    task.config = load_config(None, words).config
    task.text.prepared = prepare_data(task.config)
    return task


def losses_under(plan_text: str, root: Path) -> dict:
    torch.set_num_threads(1)
    plan, found = Plan.parse(f"{plan_text} precision=fp64"), {}
    mesh = build_mesh(plan)
    for name, options in CASES.items():
        task = task_of(root, **options)
        batches = task.batches(Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size))
        model = build_decoder(SPEC, seed=0).double()
        parallelize(model, mesh, seed=0)
        teacher = task.second_model(plan).requires_grad_(False)
        source = task.second_weights(teacher)
        parallelize(teacher, mesh, seed=0, filled_later=True)
        load_base(teacher, source)
        step = TrainStep(model, build_optimizer(model.named_parameters(), task.config.optimizer, 0), task.loss, mesh,
                         forward=task.forward, max_grad_norm=1.0)  # fmt: skip
        task.begin(RankForwards(model, mesh, task, teacher))
        found[name] = [step(Microbatches(batches.batches(number))).loss for number in range(STEPS)]
    return found


def plain_losses(root: Path, temperature=1.0, mix=0.5, top_k=0) -> list[float]:
    task, found = task_of(root), []
    teacher = transformers.AutoModelForCausalLM.from_pretrained(root / "teacher", dtype=torch.float64)
    model = build_decoder(SPEC, seed=0).double()
    optimizer = build_optimizer(model.named_parameters(), task.config.optimizer, 0)
    batches = task.batches(Share(BATCH))
    for number in range(STEPS):
        (batch,) = batches.batches(number)
        kept = batch["labels"] != -100
        labels = batch["labels"][kept]
        with torch.no_grad():
            given = teacher(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=False).logits
            p = (given[kept][:, :260] / temperature).softmax(-1)
        logits = model(batch["input_ids"], batch["positions"], batch.get("document_ids"))[kept]
        q = (logits / temperature).softmax(-1)
        if top_k:
            places = p.argsort(descending=True)[:, :top_k]
            p, q = (torch.cat([x.gather(1, places), 1 - x.gather(1, places).sum(1, True)], 1) for x in (p, q))
        loss = (1 - mix) * temperature**2 * (p * (p / q).log()).sum(1).mean() + mix * F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def one_process(root):
    return losses_under("dp_replicate=1", root)


@pytest.mark.parametrize("name", CASES)
def test_losses_match_the_formula(name, root, one_process):
    assert one_process[name] == pytest.approx(plain_losses(root, **CASES[name]), rel=1e-9)


def test_zero3_with_accumulation_matches_one_process(root, one_process, ranks2):
    for result in ranks2.run(losses_under, "dp_shard=2 zero=3 accumulation=2", root):
        for name, losses in one_process.items():
            assert result[name] == pytest.approx(losses, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "tp=2", "tp=2 sp=on",
                                  "cp=2"])  # fmt: skip
def test_every_two_rank_plan_matches_one_process(plan, root, one_process, ranks2):
    for result in ranks2.run(losses_under, plan, root):
        for name, losses in one_process.items():
            assert result[name] == pytest.approx(losses, rel=1e-9)


def test_top_k_bounds_the_divergence():
    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(7, 30, generator=rng, dtype=torch.float64) for _ in range(2))
    labels, settings = torch.zeros(7, dtype=torch.int64), {"temperature": 1.3, "mix": 0.0}
    whole = distilled_losses(student, teacher, labels, **settings)
    parts = [distilled_losses(student, teacher, labels, top_k=k, **settings) for k in (1, 5, 29)]
    assert all((one <= two + 1e-12).all() for one, two in zip(parts, [*parts[1:], whole], strict=True))
    assert torch.allclose(parts[-1], whole)
    assert torch.allclose(distilled_losses(student, student, labels, **settings), torch.zeros(7, dtype=torch.float64))


def test_invalid_teachers_and_options_are_rejected(root, tmp_path):
    for options, message in (
        ({"temperature": 0.0}, "task.options.temperature=0.0: it must be above 0. Use 1, or 2 for softer targets."),
        ({"mix": 1.5}, "task.options.mix=1.5: it is a share from 0 to 1. Use 0.5."),
        ({"top_k": -1}, "task.options.top_k=-1: it is a number of entries, or 0 for all. Use 0."),
    ):
        with pytest.raises(ConfigError) as caught:
            DistillTask("t", **options)
        assert [problem.message for problem in caught.value.problems] == [message]
    with pytest.raises(ConfigError, match=r"task\.options\.teacher: distill needs this option"):
        find_task(load_config(None, ["task=distill"]).config)
    task = task_of(root)
    (problem,) = check(Plan.parse("pp=2 microbatches=2"), task.facts(2))
    assert problem.message == (
        "pp=2: a teacher's logits are compared with the student's, and a pipeline has them on its last stage alone. "
        "Use pp=1."
    )
    nowhere = DistillTask("nowhere")
    nowhere.config = task.config
    with pytest.raises(ConfigError, match=r"task\.options\.teacher=nowhere: it has no config\.json\. Use the folder"):
        nowhere.prepare(RunFolder(tmp_path), None)
    other = json.loads((root / "teacher" / "tokenizer.json").read_text())
    other["added_tokens"][0]["content"] = "<other>"
    original = (root / "teacher" / "tokenizer.json").read_text()
    (root / "teacher" / "tokenizer.json").write_text(json.dumps(other))
    try:
        with pytest.raises(ConfigError, match=r"its tokenizer has '<other>' at 256 where the student's has another"):
            task.prepare(RunFolder(tmp_path), None)
    finally:
        (root / "teacher" / "tokenizer.json").write_text(original)
