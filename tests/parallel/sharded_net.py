"""A small network that is sharded by hand, with every kind of placement, and trainings of it under any plan.

B samples, D width, H heads' rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tests.full_state import capture, restore
from weft.comm.autograd import copy_to, gather_from, gather_slice, scatter_sum, slice_to, sum_over
from weft.comm.ledger import Ledger
from weft.comm.mesh import Axis, Mesh, build_mesh
from weft.config.plan import Plan
from weft.optim.muon import Muon
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.placement import Placement
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.verify.parity import ParityResult

VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, ROWS, EXPERTS = 7, 8, 12, 4, 2, 3, 4
ALONE = Axis("tp", 1, 0, (0,))
Batch = dict[str, torch.Tensor]


class Embedding(nn.Module):
    """Embedding with vocabulary rows sharded over tp, padded to equal shards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.tp = ALONE

    def forward(self, ids_B: torch.Tensor) -> torch.Tensor:
        local_B = ids_B - self.tp.rank * len(self.weight)
        is_here_B = (local_B >= 0) & (local_B < len(self.weight))
        x_BD = F.embedding(local_B.clamp(0, len(self.weight) - 1), self.weight) * is_here_B[:, None]
        return sum_over(x_BD, self.tp)


class Pair(nn.Module):
    """Fused gate and up, then down: column- and row-parallel, after a scale that each rank applies to its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.gate_up = nn.Parameter(torch.randn(2 * HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.tp = ALONE

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        y_BD = gather_from(slice_to(x_BD, self.tp, 0) * self.scale, self.tp, 0)
        gate, up = (y_BD @ self.gate_up.T).chunk(2, -1)
        return x_BD + sum_over((gate.tanh() * up) @ self.down.T, self.tp) + self.bias


class Heads(nn.Module):
    """Four heads that share two key-value heads. With four ranks, two ranks have the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(HEADS * ROWS, WIDTH) / 3)
        self.kv = nn.Parameter(torch.randn(KV_HEADS * ROWS, WIDTH) / 3)
        self.out = nn.Parameter(torch.randn(WIDTH, HEADS * ROWS) / 3)
        self.tp = ALONE

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        y_BD = copy_to(x_BD, self.tp)
        q = (y_BD @ self.q.T).unflatten(-1, (-1, ROWS))
        kv = (y_BD @ self.kv.T).unflatten(-1, (-1, ROWS))
        kv = kv.repeat_interleave(q.shape[1] // kv.shape[1], 1)
        return x_BD + sum_over((q * kv.tanh()).flatten(1) @ self.out.T, self.tp)


class Experts(nn.Module):
    """Experts stacked in two parameters. Every ep rank runs its experts on all samples of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 3)
        self.overflows = False

    def forward(self, x_BD: torch.Tensor, gates_BE: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bd,edh->beh", x_BD, self.up).tanh()
        down = self.down
        if self.overflows:
            down = down * 1.0
            down.register_hook(lambda grad: grad * torch.inf)
        return torch.einsum("beh,ehd,be->bd", hidden, down, gates_BE)


class Router(nn.Module):
    """Selects the two best of four experts per sample. tp ranks share the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.experts = Experts()
        self.tp = self.ep = ALONE

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        part_BD = slice_to(x_BD, self.tp, 0)
        logits_BE = part_BD @ self.weight.T
        chosen = torch.zeros_like(logits_BE).scatter_(1, logits_BE.topk(2, 1).indices, 1.0)
        gates_BE = logits_BE.softmax(1) * chosen
        here = len(self.experts.up)
        all_BE = gather_from(gates_BE, self.ep, 0)[:, self.ep.rank * here : (self.ep.rank + 1) * here]
        y_BD = scatter_sum(self.experts(gather_from(part_BD, self.ep, 0), all_BE), self.ep, 0)
        return x_BD + gather_slice(y_BD, self.tp, 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(nn.Sequential(Pair(), Heads(), Router()) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids_B: torch.Tensor) -> torch.Tensor:
        x_BD = self.embed(ids_B)
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(self.frozen(x_BD)) * self.temperature


def build(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def shard_by_hand(model: Net, mesh: Mesh) -> dict[str, Placement]:
    """Replace parameters by this rank's shards. Return the placements."""
    tp, ep = mesh["tp"], mesh["ep"]
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        kinds: dict[str, Placement] = {}
        if isinstance(module, (Embedding, Pair, Heads, Router)):
            module.tp = tp
        if isinstance(module, Embedding) and tp.size > 1:
            kinds = {"weight": Placement(cut=("tp",), pad=-VOCAB % tp.size)}
        if isinstance(module, Pair) and tp.size > 1:
            kinds = {
                "scale": Placement(partial=("tp",)),
                "gate_up": Placement(cut=("tp",), parts=(HIDDEN, HIDDEN)),
                "down": Placement(cut=("tp",), dim=1),
            }
        if isinstance(module, Heads) and tp.size > 1:
            kinds = {"q": Placement(cut=("tp",)), "out": Placement(cut=("tp",), dim=1), "kv": _key_values(tp)}
        if isinstance(module, Router):
            module.ep = ep
            kinds = {"weight": Placement(partial=("tp",))} if tp.size > 1 else {}
        if isinstance(module, Experts) and ep.size * tp.size > 1:
            kind = Placement(cut=("ep",)) if ep.size > 1 else Placement(partial=("tp",))
            kinds = {"up": kind, "down": kind}
        for key, placement in kinds.items():
            axis = mesh[placement.cut] if placement.cut else tp
            part = placement.local(getattr(module, key).detach(), axis.rank, axis.size)
            setattr(module, key, nn.Parameter(part.clone()))
            placements[f"{name}.{key}"] = placement
    return placements


def _key_values(tp: Axis) -> Placement:
    if tp.size <= KV_HEADS:
        return Placement(cut=("tp",))
    head = tp.rank * KV_HEADS // tp.size
    rows = tuple(range(head * ROWS, (head + 1) * ROWS))
    return Placement(cut=("tp",), index=rows, whole_shape=(KV_HEADS * ROWS, WIDTH), partial=("tp",))


@dataclass(frozen=True)
class Settings:
    """Settings of a training that are not in the plan."""

    num_steps: int = 3
    max_grad_norm: float = 0.5
    optimizer: str = "adamw"
    global_batch: int = 32


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
    if name == "muon":
        return Muon(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch_of(step: int, settings: Settings) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (settings.global_batch,), generator=generator)
    return {"ids": ids, "labels": torch.randint(5, (settings.global_batch,), generator=generator)}


def microbatches(batch: Batch, mesh: Mesh) -> Microbatches:
    """Return this rank's microbatches. cp ranks get other samples, whose gradients add up like parts of sequences."""
    count, axis = mesh.plan.microbatches_per_step, mesh.batch
    chunks = {key: tensor.chunk(count * axis.size) for key, tensor in batch.items()}
    return Microbatches(
        {key: parts[index * axis.size + axis.rank] for key, parts in chunks.items()} for index in range(count)
    )


def loss(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = output if output.dtype == torch.float64 else output.float()
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(output)


def start(plan: str, settings: Settings, ledger: Ledger | None = None) -> tuple[Net, torch.optim.Optimizer, TrainStep]:
    """Return a parallelized model, its optimizer and its step."""
    mesh = build_mesh(Plan.parse(plan), record=(ledger or Ledger()).record)
    model = build()
    parallelize(model, mesh, placements=shard_by_hand(model, mesh))
    optimizer = optimizer_of(model, settings.optimizer)
    step = TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        forward=lambda model, batch: model(batch["ids"]),
        max_grad_norm=settings.max_grad_norm,
        nominal_tokens=settings.global_batch,
    )
    return model, optimizer, step


def train(plan: str, settings: Settings) -> ParityResult:
    model, _, step = start(plan, settings)
    result = ParityResult()
    for index in range(settings.num_steps):
        metrics = step(microbatches(batch_of(index, settings), step.mesh))
        assert metrics.num_tokens == settings.global_batch
        result.losses.append(metrics.loss)
        result.grad_norms.append(metrics.grad_norm)
    engine = data_parallel(model)
    result.grads = {name: grad.clone() for name, grad in engine.gradients()}
    result.weights = {name: weight.detach().clone() for name, weight in engine.weights()}
    return result


def train_plans(plans: list[str], settings: Settings) -> dict[str, ParityResult]:
    """Train under many plans in one call of a pool of ranks."""
    return {plan: train(plan, settings) for plan in plans}


def train_and_capture(plan: str, settings: Settings, groups: object = None) -> dict[str, dict[str, torch.Tensor]]:
    """Restore `groups` if given, train, and capture the state."""
    model, optimizer, step = start(plan, settings)
    if groups is not None:
        restore(model, optimizer, groups)
    for index in range(settings.num_steps):
        step(microbatches(batch_of(index, settings), step.mesh))
    found = capture(model, optimizer)
    return {group: {name: tensor.clone() for name, tensor in tensors.items()} for group, tensors in found.items()}


def own_loop(plan: str, num_backwards: int, num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Train in a user's loop on mean losses: backward, step, zero_grad. Return the full weights."""
    mesh = build_mesh(Plan.parse(plan))
    model = build()
    parallelize(model, mesh, placements=shard_by_hand(model, mesh))
    optimizer = optimizer_of(model, "sgd")
    for step in range(num_steps):
        for index in range(num_backwards):
            batch = batch_of(num_backwards * step + index, Settings())
            part = {key: tensor.chunk(mesh.batch.size)[mesh.batch.rank] for key, tensor in batch.items()}
            loss_sum, number = loss(model(part["ids"]), part)
            (loss_sum / number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}


def own_loops(plans: list[str], num_backwards: int) -> dict[str, dict[str, torch.Tensor]]:
    return {plan: own_loop(plan, num_backwards) for plan in plans}


def two_kinds_of_experts(plan: str) -> None:
    """Build a module with experts and another parameter, which zero=3 cannot shard."""
    mesh = build_mesh(Plan.parse(plan))
    model = build()
    placements = shard_by_hand(model, mesh)
    model.blocks[0][2].experts.shared = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parallelize(model, mesh, placements=placements)


def disagree(plan: str) -> None:
    """Shard the same parameter differently on each rank."""
    mesh = build_mesh(Plan.parse(plan))
    model = build()
    placements = shard_by_hand(model, mesh)
    if mesh.rank == 1:
        placements["blocks.0.0.scale"] = Placement()
    parallelize(model, mesh, placements=placements)


def overflow(plan: str) -> tuple[str | None, str | None]:
    """Train two steps, the first with an infinite gradient on the last rank. Return why they were skipped."""
    settings = Settings()
    model, _, step = start(f"{plan} precision=fp16", settings)
    model.blocks[1][2].experts.overflows = step.mesh.rank == step.mesh.world_size - 1
    first = step(microbatches(batch_of(0, settings), step.mesh))
    model.blocks[1][2].experts.overflows = False
    before = {name: tensor.clone() for name, tensor in data_parallel(model).weights()}
    second = step(microbatches(batch_of(0, settings), step.mesh))
    assert second.skipped or any(not torch.equal(before[n], w) for n, w in data_parallel(model).weights())
    return first.skipped, second.skipped


def overflows(plans: list[str]) -> list[tuple[str | None, str | None]]:
    return [overflow(plan) for plan in plans]


def partial_calls(plan: str) -> dict[str, int]:
    """Return the number of all_reduce calls in one step by axis."""
    ledger = Ledger()
    model, _, step = start(plan, Settings(), ledger)
    before = _all_reduces(ledger)
    step(microbatches(batch_of(0, Settings()), step.mesh))
    del model
    return {axis: calls - before.get(axis, 0) for axis, calls in _all_reduces(ledger).items()}


def _all_reduces(ledger: Ledger) -> dict[str, int]:
    return {axis: entry.calls for axis, operation, entry in ledger.rows() if operation == "all_reduce"}
