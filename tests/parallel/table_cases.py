"""A recommender with tables of several styles, its batches, and its training in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.partitioning import microbatch_samples
from weft.config.plan import Plan
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tables.table import Table

ROWS = {"user": 23, "item": 11, "genre": 5, "seen": 17, "tags": 7}
WIDTH, SAMPLES, STEPS = 6, 12, 10


class Recommender(nn.Module):
    """Scores pairs of user and item. `seen` is a mean bag with padding, `tags` a weighted bag with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS["user"], WIDTH)
        self.item = nn.Embedding(ROWS["item"], WIDTH, padding_idx=0)
        self.genre = nn.Embedding(ROWS["genre"], WIDTH)
        self.seen = nn.EmbeddingBag(ROWS["seen"], WIDTH, mode="mean", padding_idx=3)
        self.tags = nn.EmbeddingBag(ROWS["tags"], WIDTH, mode="sum", include_last_offset=True)
        self.top = nn.Sequential(nn.Linear(5 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = [
            self.user(batch["user"]),
            self.item(batch["item"]).sum(1),
            self.genre(batch["genre"]),
            self.seen(batch["seen"]),
            self.tags(batch["tags"], batch["offsets"], batch["weights"]),
        ]
        return self.top(torch.cat(found, 1)).squeeze(1)


def model() -> Recommender:
    torch.manual_seed(0)
    return Recommender().double()


def samples(step: int) -> list[dict[str, Any]]:
    """Return the samples of a global batch. Bags of tags have 0 to 3 ids; ids repeat."""
    rng = torch.Generator().manual_seed(step)

    def ids(name: str, *shape: int) -> Tensor:
        return torch.randint(ROWS[name], shape, generator=rng).clamp_max(ROWS[name] * 2 // 3 + step % 3)

    found = []
    for _ in range(SAMPLES):
        number = int(torch.randint(4, (), generator=rng))
        found.append({
            "user": ids("user"), "item": ids("item", 2), "genre": ids("genre"), "seen": ids("seen", 3),
            "tags": ids("tags", number), "weights": torch.rand(number, generator=rng, dtype=torch.float64),
            "labels": torch.randn((), generator=rng, dtype=torch.float64),
        })  # fmt: skip
    return found


def collate(some: list[dict[str, Any]]) -> dict[str, Tensor]:
    stacked = {key: torch.stack([one[key] for one in some]) for key in ("user", "item", "genre", "seen", "labels")}
    counts = torch.tensor([0, *(len(one["tags"]) for one in some)])
    tags, weights = (torch.cat([one[key] for one in some]) for key in ("tags", "weights"))
    return {**stacked, "tags": tags, "weights": weights, "offsets": counts.cumsum(0)}


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["labels"], reduction="sum"), len(output)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch)


@dataclass(frozen=True)
class TableCase:
    """One training: styles of the tables, their optimizer and the clipping of gradients."""

    layout: str
    plan: str = ""
    optimizer: str = "lazy_adamw"
    clip: float = 0.5
    steps: int = STEPS

    @property
    def rule(self) -> weft.TableOptimizer:
        more = {"weight_decay": 0.1} if self.optimizer == "lazy_adamw" else {}
        return weft.TableOptimizer(self.optimizer, lr=0.05, **more)


@dataclass
class Script:
    """A parallelized recommender of a case, with its step. cache, folder: of style host. device: its device."""

    case: TableCase
    cache: float = 0.3
    folder: str = ""
    device: str = "cpu"
    prefetch: bool = False

    def __post_init__(self) -> None:
        plan = Plan.parse(f"{self.case.plan} precision=fp64")
        self.ledger = Ledger()
        self.run = weft.Run(plan, build_mesh(plan, self.device, self.ledger.record), self.ledger, seed=0)
        self.model = self.run.parallelize(
            model(),
            layout=self.case.layout,
            table_cache=self.cache,
            table_folder=self.folder,
            table_prefetch=self.prefetch,
        )
        self.step = self.run.train_step(
            self.model, torch.optim.AdamW, loss_fn, forward=forward, max_grad_norm=self.case.clip,
            tables=self.case.rule, lr=0.01, check_batch=False,
        )  # fmt: skip

    @property
    def tables(self) -> list[Table]:
        return data_parallel(self.model).tables

    def batch(self, index: int) -> weft.Microbatches:
        plan, every = self.run.plan, samples(index)
        own = microbatch_samples(SAMPLES, plan.dp_size, plan.microbatches_per_step, self.run.mesh.data.rank)
        return weft.Microbatches.of_samples(every.__getitem__, own, collate, SAMPLES)

    def train(self, first: int, last: int) -> list[tuple[float, float]]:
        found = [self.step(self.batch(index)) for index in range(first, last)]
        return [(one.loss, one.grad_norm) for one in found]

    def weights(self) -> dict[str, Tensor]:
        return self.run.full_state_dict(self.model, everywhere=True)


def train(case: TableCase) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    script = Script(case)
    return script.train(0, case.steps), script.weights()


# The same training in one process of plain torch.


def reference(case: TableCase) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Return losses with gradient norms, and the trained weights, of dense tables and plain loops."""
    plain = model()
    tables = {name: getattr(plain, name).weight for name in ROWS}
    dense = torch.optim.AdamW(plain.top.parameters(), lr=0.01)
    states: dict[str, dict[str, Tensor]] = {name: {} for name in ROWS}
    found = []
    for index in range(case.steps):
        batch = collate(samples(index))
        plain.zero_grad()
        loss = loss_fn(plain(batch), batch)[0] / SAMPLES
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip or float("inf"))
        dense.step()
        for name, weight in tables.items():
            read = torch.zeros(len(weight), dtype=torch.bool)
            read[batch[name].flatten()] = True
            if (padding := getattr(plain, name).padding_idx) is not None:
                read[padding] = False
            with torch.no_grad():
                _plain_update(case.rule, weight, weight.grad, states[name], read.nonzero().flatten(), index + 1)
        found.append((loss.item(), norm.item()))
    return found, {name: weight.detach().clone() for name, weight in plain.state_dict().items()}


def _plain_update(
    rule: weft.TableOptimizer, weight: Tensor, grad: Tensor, state: dict[str, Tensor], rows: Tensor, step: int
) -> None:
    """Update rows one after another, by the formulas of the papers."""
    first, second = rule.betas
    for row in rows.tolist():
        w, g = weight[row], grad[row]
        if rule.name == "sgd":
            w -= rule.lr * g
        elif rule.name in ("adagrad", "rowwise_adagrad"):
            one = state.setdefault("sum", torch.zeros_like(weight))[row]
            one += g**2 if rule.name == "adagrad" else (g**2).mean()
            w -= rule.lr * g / (one**0.5 + rule.eps)
        else:
            m = state.setdefault("m", torch.zeros_like(weight))[row]
            v = state.setdefault("v", torch.zeros_like(weight))[row]
            m.copy_(first * m + (1 - first) * g)
            v.copy_(second * v + (1 - second) * g**2)
            w *= 1 - rule.lr * rule.weight_decay
            w -= rule.lr * (m / (1 - first**step)) / ((v / (1 - second**step)) ** 0.5 + rule.eps)
