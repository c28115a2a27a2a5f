"""Short trainings with and without CUDA graphs, which an operator recorder replaces on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.parity.dropout_cases import PlainModel
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.sections import ScheduleSection
from weft.optim.schedule import lr_factor
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep
from weft.verify.oracles import OpRecorder

STEPS, VOCAB, TOKENS = 7, 23, 8


@dataclass(slots=True)
class Trained:
    """Metrics of each step, final weights, states and gradients, and numbers of recordings and replays."""

    step_metrics: list[tuple[float, float, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    recordings: int = 0
    passes: int = 0
    replays: int = 0

    def same_as(self, other: Trained) -> bool:
        """Return whether metrics and tensors are bitwise equal."""
        if self.step_metrics != other.step_metrics:
            return False
        mine, theirs = ([*one.weights.items(), *one.gradients.items(), *one.states.items()] for one in (self, other))
        return len(mine) == len(theirs) and all(
            name == known and torch.equal(a, b) for (name, a), (known, b) in zip(mine, theirs, strict=True)
        )


def batch_of(step: int, rows: int, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (rows, tokens + 1), generator=draw)
    labels = ids[:, 1:].clone()
    labels[0, : step % 3] = -100  # a different number of trained tokens in each step
    return {"ids": ids[:, :-1].contiguous(), "labels": labels}


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["ids"])


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    exact = logits if logits.dtype == torch.float64 else logits.float()
    total = nn.functional.cross_entropy(
        exact.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100
    )
    return total * batch["factor"][0].to(total), (batch["labels"] != -100).sum()


def model_with_dropout() -> nn.Module:
    return PlainModel(VOCAB, 16, 2, 0.25)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only, as in Weft's optimizer."""
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for param in model.parameters():
        groups[0.1 if param.ndim > 1 else 0.0].append(param)
    listed = [{"params": params, "weight_decay": decay, "initial_lr": 0.01} for decay, params in groups.items()]
    return torch.optim.AdamW(listed, lr=0.01, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters()), "initial_lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, fused=True)


def train(
    plan: str, *, graphs: bool, steps: int = STEPS, optimizer: Callable[[nn.Module], Any] = adamw,
    loss: Callable[..., Any] = loss_of, tokens_at: Callable[[int], int] = lambda step: TOKENS,
    spoil: Callable[[int], float] = lambda step: 1.0, build: Callable[[], nn.Module] = model_with_dropout,
    watch: Callable[[TrainStep, int], None] = lambda step, index: None, device: torch.device | None = None,
) -> Trained:  # fmt: skip
    """Train for some steps with changing learning rate, batch, token count and dropout. A GPU records real graphs.

    spoil: factor of each step's loss, such as infinity. watch: called before each step.
    """
    parsed = Plan.parse(f"{plan} graphs=on" if graphs else plan)
    mesh, recorder = build_mesh(parsed, device or torch.device("cpu")), OpRecorder()
    torch.manual_seed(0)
    model = build().to(torch.float64 if parsed.precision == "fp64" else torch.float32)
    parallelize(model, mesh, seed=1)
    made = optimizer(model)
    step = TrainStep(
        model, made, loss, mesh, forward=forward, max_grad_norm=0.3, reads_late=True,
        recorder=recorder if graphs and mesh.device.type == "cpu" else None,
    )  # fmt: skip
    found, schedule = Trained(), ScheduleSection(warmup_steps=3, kind="cosine")
    rows = 2 * parsed.microbatches_per_step
    for index in range(steps):
        for group in made.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor(index, steps, schedule)
        watch(step, index)
        batch = batch_of(index * mesh.data.size + mesh.data.rank, rows, tokens_at(index))
        batch["factor"] = torch.tensor([spoil(index)] * rows, dtype=torch.float64)
        metrics = step(batch, dropout_key=1000 + index)
        found.step_metrics.append((metrics.loss, metrics.grad_norm, metrics.loss_scale or 1.0))
        found.step_metrics[-1] = tuple(
            0.5 if one != one else one for one in found.step_metrics[-1]
        )  # NaN does not compare equal
    step.finalize()
    engine = data_parallel(model)
    found.gradients = {f"gradient of {name}": one.clone() for name, one in engine.gradients()}
    found.weights = {name: one.clone() for name, one in engine.weights()}
    found.states = {one.name: one.flat.clone() for one in engine.state_slices(made)}
    found.recordings, found.replays = len(recorder.num_ops), recorder.num_replays
    found.passes = step.graphs.num_replays if step.graphs else 0
    return found


def pair(plan: str, **options: Any) -> tuple[bool, Trained]:
    """Return whether graphs change nothing, and the training with graphs."""
    with_graphs = train(plan, graphs=True, **options)
    return with_graphs.same_as(train(plan, graphs=False, **options)), with_graphs
