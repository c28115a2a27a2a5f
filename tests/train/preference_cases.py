"""Preference training of a small decoder: under any plan, and by a reference of ten lines per step."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import torch
from torch.nn import functional as F

from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.data.store.prepare import prepare_data
from weft.data.store.prepared import PreparedData
from weft.data.text.tokenizer import Tokenizer
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.step.evaluation import RankForwards
from weft.train.step.train_step import TrainStep
from weft.train.tasks.preference import PreferTask
from weft.train.weights.run_adapter import with_adapter

SPEC = DecoderSpec(family="llama", vocab_size=260, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=24,
                   max_seq_len=64)  # fmt: skip
STEPS, BATCH = 3, 4
OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo")
#: Options of the task and the adapter's rank, by case name.
CASES = {
    **{name: ({"objective": name}, 0) for name in OBJECTIVES},
    "dpo-smooth": ({"objective": "dpo", "smoothing": 0.2, "beta": 0.3}, 0),
    "dpo-copy": ({"objective": "dpo", "reference": "frozen_copy"}, 0),
    "dpo-off": ({"objective": "dpo"}, 2),
    "kto-off": ({"objective": "kto", "wanted": 1.3, "unwanted": 0.7}, 2),
    "kto-copy": ({"objective": "kto", "reference": "frozen_copy"}, 0),
}


def write_pairs(folder: Path, number: int = 13) -> Path:
    """Write pairs of answers of different lengths, some with a long prompt."""
    rng, path = random.Random(1), folder / "pairs.jsonl"

    def text(most: int) -> str:
        return "".join(rng.choices("abc de", k=rng.randint(2, most)))

    rows = [{"prompt": f"{text(20)}?", "chosen": f" {text(9)}.", "rejected": f" {text(14)}!"} for _ in range(number)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def words(path: Path, cache: Path, rank: int, *more: str) -> list[str]:
    return ["task=prefer", f"data.train={path}", f"data.cache_dir={cache}", "tokenizer.kind=bytes", "train.seq_len=40",
            f"train.global_batch={BATCH}", f"adapter.rank={rank}", "optimizer.lr=0.01", "data.holdout=0",
            *more]  # fmt: skip


def prepared(path: Path, cache: Path) -> PreparedData:
    return prepare_data(load_config(None, words(path, cache, 0)).config, preferences=True)


def _task(options: dict, rank: int, path: Path, cache: Path, data: PreparedData, folder: Path) -> PreferTask:
    task = PreferTask(**options)
    task.config = load_config(None, words(path, cache, rank)).config
    task.text.prepared, task.text.folder = data, RunFolder(folder)
    return task


def losses_under(plan_text: str, names: tuple[str, ...], path: Path, cache: Path, folder: Path) -> dict:
    """Return losses of some steps per case, the evaluation of the first batch, and gradient norms."""
    torch.set_num_threads(1)
    data, plan, found = prepared(path, cache), Plan.parse(f"{plan_text} precision=fp64"), {}
    mesh = build_mesh(plan)
    for name in names:
        options, rank = CASES[name]
        own = folder / f"{name}-{plan_text.replace(' ', '_')}"
        own.mkdir(parents=True, exist_ok=True)
        task = _task(options, rank, path, cache, data, own)
        batches = task.batches(Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size))
        model = with_adapter(_decoder(), task.config)
        parallelize(model, mesh, seed=0)
        second = None
        if task.reference == "frozen_copy":
            second = _decoder().requires_grad_(False)
            parallelize(second, mesh, seed=0)
        step = TrainStep(model, build_optimizer(model.named_parameters(), task.config.optimizer, 0), task.loss, mesh,
                         forward=task.forward, max_grad_norm=1.0)  # fmt: skip
        task.begin(RankForwards(model, mesh, task, second))
        done = [step(Microbatches(task.before_step(batches.batches(number)))) for number in range(STEPS)]
        found[name] = [(one.loss, one.grad_norm, one.num_tokens) for one in done]
    return found


def _decoder() -> torch.nn.Module:
    return build_decoder(SPEC, seed=0).double()


def log_prob(model, ids: list[int], answer: int) -> torch.Tensor:
    """Return log p of the last `answer` ids given the ids before them."""
    tensor = torch.tensor([ids])
    logits = model(tensor[:, :-1], torch.arange(len(ids) - 1)[None])
    return -F.cross_entropy(logits[0, -answer:], tensor[0, -answer:], reduction="sum")


def plain_losses(name: str, path: Path, cache: Path, folder: Path) -> list[tuple[float, float]]:
    """Compute the same with one model, one row at a time, by the papers' formulas."""
    options, rank = CASES[name]
    task = _task(options, rank, path, cache, prepared(path, cache), folder)
    model = with_adapter(_decoder(), task.config).double()
    old = copy.deepcopy(model)  # an adapter initialized to zero changes nothing
    optimizer = build_optimizer(model.named_parameters(), task.config.optimizer, 0)
    order = task.batches(Share(BATCH))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer: Tokenizer = task.data.tokenizer
    texts = [(row["prompt"], row[part]) for row in rows for part in ("chosen", "rejected")]
    found = []
    for number in range(STEPS):
        (batch,) = order.batches(number)
        loss = _plain_loss(model, old, batch, texts, tokenizer, options)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def _plain_loss(model, old, batch, texts, tokenizer, options) -> torch.Tensor:
    kind = options["objective"]
    known = [[*tokenizer.encode(prompt + said), tokenizer.end_id] for prompt, said in texts]
    places = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        last = max(place for place, label in enumerate(labels) if label != -100)
        places.append(known.index([*ids[: last + 1], labels[last]]))

    def both(place: int, prompt: str | None = None):
        asked = texts[place][0] if prompt is None else prompt
        ids = [*tokenizer.encode(asked + texts[place][1]), tokenizer.end_id]
        size = len(tokenizer.encode(texts[place][1])) + 1
        now = log_prob(model, ids, size)
        with torch.no_grad():
            return now, log_prob(old, ids, size), size

    beta = options.get("beta", 2.0 if kind == "simpo" else 0.1)
    total = torch.zeros((), dtype=torch.float64)
    if kind == "kto":
        mixed = []
        for place in places:  # the answer of the next pair after this prompt
            other = next((place + step) % len(texts) for step in (1, 2)
                         if texts[(place + step) % len(texts)][0] != texts[place][0])  # fmt: skip
            now, then, _ = both(other, texts[place][0])
            mixed.append((now - then).detach())
        z = torch.stack(mixed).mean().clamp(min=0)
        for place in places:
            now, then, _ = both(place)
            if place % 2 == 0:
                total = total + options.get("wanted", 1.0) * (1 - torch.sigmoid(beta * (now - then - z)))
            else:
                total = total + options.get("unwanted", 1.0) * (1 - torch.sigmoid(beta * (z - (now - then))))
        return total / len(places)
    for chosen, rejected in zip(places[::2], places[1::2], strict=True):
        (c, c0, nc), (r, r0, nr) = both(chosen), both(rejected)
        if kind == "dpo":
            h, e = beta * ((c - c0) - (r - r0)), options.get("smoothing", 0.0)
            total = total - (1 - e) * torch.log(torch.sigmoid(h)) - e * torch.log(torch.sigmoid(-h))
        elif kind == "ipo":
            total = total + ((c - c0) / nc - (r - r0) / nr - 1 / (2 * beta)) ** 2
        elif kind == "orpo":
            odds = [torch.log(torch.exp(x / n) / (1 - torch.exp(x / n))) for x, n in ((c, nc), (r, nr))]
            total = total - c / nc - beta * torch.log(torch.sigmoid(odds[0] - odds[1]))
        else:
            total = total - torch.log(torch.sigmoid(beta * (c / nc - r / nr) - options.get("margin", 1.0)))
    return total / (len(places) // 2)
