"""Train the same small model on the same data under any plan, and return all numbers for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config import partitioning as shares
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.expert import ExpertBalance, balanced_routers
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.model import FlatModel
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import IGNORE, model_forward, token_cross_entropy

Batch = dict[str, torch.Tensor]
#: Callback (kind, name, full tensor), where kind is "gradient" or "weight".
See = Callable[[str, str, torch.Tensor], None]
#: Callback (model, this rank's microbatches of the first batch, the full batch as one microbatch) -> context manager.
Watch = Callable[[nn.Module, Microbatches, Microbatches], AbstractContextManager[None]]


class Case(Protocol):
    """A model, its data and its optimizer: all inputs of a training run except the plan."""

    @property
    def num_steps(self) -> int:
        """The number of training steps."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """The norm that gradients are clipped to; 0 disables clipping."""
        ...

    def model(self) -> nn.Module:
        """Return the model, with the same weights each time."""
        ...

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the model's parameters."""
        ...

    def batch(self, step: int) -> Any:
        """Return the global batch of one step: a pure function of the step.

        Each row is a sample, unless the case defines how a batch is divided, as `SampleCase` does.
        """
        ...

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output on a batch."""
        ...

    def loss(self, output: Any, batch: Any, /) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the sum of losses and the number of tokens or samples."""
        ...


class SampleCase:
    """A case whose batches do not have samples as rows. It defines the samples, and how to collate them."""

    def samples(self, step: int) -> list[Any]:
        """Return the samples of one step's global batch: a pure function of the step."""
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        raise NotImplementedError

    def batch(self, step: int) -> Any:
        return self.collate(self.samples(step))

    def microbatches(self, step: int, plan: Plan, dp_rank: int) -> Microbatches:
        """Return a rank's part of a step's global batch, divided by the plan."""
        samples = self.samples(step)
        own = shares.microbatch_samples(len(samples), plan.dp_size, plan.microbatches_per_step, dp_rank, plan.shares)
        return Microbatches.of_samples(samples.__getitem__, own, self.collate, len(samples))


@dataclass(frozen=True, slots=True)
class DecoderCase:
    """A decoder, its data and its optimizer.

    Attributes:
        masked: if not 0, the share of positions with a label decreases from sample to sample, to 0.
        documents: pack two documents into each sample.
        optimizer: "adamw" or "sgd".
    """

    spec: DecoderSpec
    num_steps: int = 3
    global_batch: int = 8
    seq_len: int = 16
    masked: float = 0.3
    documents: bool = False
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0

    def batch(self, step: int) -> Batch:
        """Return the global batch of one step: a pure function of (seed, step)."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        shape = (self.global_batch, self.seq_len)
        ids = torch.randint(self.spec.vocab_size, shape, generator=generator)
        labels = torch.randint(self.spec.vocab_size, shape, generator=generator)
        # Sample k keeps a share of its labels that decreases with k. The last sample has no labels.
        keep = torch.linspace(1.0, 0.0, self.global_batch)[:, None] if self.masked else torch.ones(self.global_batch, 1)
        labels[torch.rand(shape, generator=generator) > keep.clamp(max=1.0)] = IGNORE
        if self.masked:
            labels[-1] = IGNORE
        positions = torch.arange(self.seq_len).repeat(self.global_batch, 1)
        batch = {"input_ids": ids, "labels": labels, "positions": positions}
        if self.documents:
            border = self.seq_len // 3
            batch["document_ids"] = (positions >= border).long()
            batch["positions"] = torch.where(positions >= border, positions - border, positions)
        return batch

    def model(self) -> nn.Module:
        """Return the decoder in float64, with the same weights each time."""
        return build_decoder(self.spec, dtype=torch.float64, seed=self.seed)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer named by `optimizer` for the model's parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the logits of a batch."""
        return model_forward(model, batch)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of losses and the number of trained tokens."""
        return token_cross_entropy(output, batch)

    #: With a sharded vocabulary the head returns the loss, as in a run.
    loss.takes_head_loss = True  # pyright: ignore[reportFunctionMemberAccess] - a mark


#: A float64 gradient that is smaller than this, relative to its summed terms, is pure rounding (4096 ulp).
ROUNDING = 2.0**-40


@dataclass(slots=True)
class ParityResult:
    """Results of one training: losses and gradient norms by step, and final gradients and weights by name."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    reduced_bytes: int = 0

    def largest_difference(self, other: ParityResult) -> float:
        """Return the largest difference of any number, divided by the maximum of its tensor or list.

        The divisors are at least `least_scales`.
        """
        lists = [(self.losses, other.losses), (self.grad_norms, other.grad_norms)]
        exact = torch.float64
        found = [
            _difference(torch.tensor(ours, dtype=exact), torch.tensor(theirs, dtype=exact), 0.0)
            for ours, theirs in lists
        ]
        for ours, theirs, least in zip(
            (self.grads, self.weights), (other.grads, other.weights), other.least_scales(), strict=True
        ):
            assert ours.keys() == theirs.keys()
            found += [_difference(ours[name], theirs[name], least[name]) for name in theirs]
        return float(torch.tensor(found, dtype=exact).max())  # NaN if any is NaN; Python's max may skip it

    def least_scales(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the minimum divisors of gradients and of weights for relative differences, by name.

        Some gradients are pure rounding, such as the gradient of a key bias, on which softmax does not depend. They
        have no meaningful scale. Neither have weights that started at zero and only received such gradients, which Adam
        normalizes. The minimum scale is therefore a millionth of the largest gradient, and a thousandth of the largest
        weight: less than one update of the optimizer. A millionth is too small for float64, whose rounding is 2e-16 of
        the terms that cancel: for a bias whose gradient is pure rounding, these terms are as large as the gradient of
        its layer's weight. In float32, rounding and a small gradient cannot be distinguished, so the scale is not
        changed.
        """
        grads = {name: _largest(grad) for name, grad in self.grads.items()}
        floor = 1e-6 * max(grads.values(), default=0.0)
        least = dict.fromkeys(grads, floor)
        for name, size in grads.items():
            layer = grads.get(name.removesuffix("bias") + "weight", 0.0) if name.endswith(".bias") else 0.0
            if self.grads[name].dtype == torch.float64 and size < ROUNDING * layer:
                least[name] = max(floor, layer)
        largest = max(map(_largest, self.weights.values()), default=0.0)
        return least, dict.fromkeys(self.weights, 1e-3 * largest)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _difference(ours: torch.Tensor, theirs: torch.Tensor, least: float) -> float:
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), least, 1e-300)


def train_cases(plan_text: str, cases: Mapping[str, Case]) -> dict[str, ParityResult]:
    """Train each case with `train_case`, so that one call to the ranks trains many cases. Return results by name."""
    return {name: train_case(plan_text, case) for name, case in cases.items()}


def train_decoder(plan_text: str, case: DecoderCase) -> ParityResult:
    """Train a decoder with `train_case`."""
    return train_case(plan_text, case)


def train_case(
    plan_text: str, case: Case, see: See | None = None, watch: Watch | None = None, device: str = "cpu"
) -> ParityResult:
    """Train `case` under a plan on the connected ranks (or on one process) and return this rank's results.

    Args:
        plan_text: one line, without `*`.
        case: model, data and optimizer.
        see: called with each full gradient and weight at the end; they are then not in the result.
        watch: returns a context manager that is active in the first step.
        device: where this rank trains.
    """
    plan = Plan.parse(plan_text)
    ledger = Ledger()
    mesh = build_mesh(plan, device, ledger.record)
    model = case.model().to(mesh.device)
    with several_buckets(model):
        names = ("layout", "norm_group", "bf16_layers", "fp8_recipe")
        asked = {name: getattr(case, name) for name in names if hasattr(case, name)}
        if (plan.tp > 1 or plan.cp > 1) and (example := getattr(case, "example", None)) is not None:
            asked["example"] = example(model)
        parallelize(model, mesh, **asked)
    step = TrainStep(
        model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=case.max_grad_norm
    )
    result = ParityResult()
    for index in range(case.num_steps):
        batches = microbatches_of_case(case, index, plan, mesh.data.rank)
        watching = watch(model, batches, microbatches_of_case(case, 0, Plan(), 0)) if watch and not index else None
        with watching or nullcontext():
            metrics = step(batches)
        result.losses.append(metrics.loss)
        result.grad_norms.append(metrics.grad_norm)
    result.reduced_bytes = sum(
        entry.num_bytes for _, operation, entry in ledger.rows() if operation in ("all_reduce", "reduce_scatter")
    )
    engine = data_parallel(model)
    for name, grad in engine.gradients():
        see("gradient", name, grad) if see else result.grads.update({name: grad.clone()})
    visible = dict(model.named_parameters())
    for name, weight in engine.weights():
        see("weight", name, weight) if see else result.weights.update({name: weight.detach().clone()})
        # Forward must use the trained weights, rounded to the plan's dtype.
        param = visible.get(name)
        if type(param) is nn.Parameter and param.shape == weight.shape:
            is_seen = plan.gather == "diff4" or torch.equal(param.detach(), weight.detach().to(param.dtype))
            assert is_seen, f"{name}: forward uses other weights"
    return result


@contextmanager
def several_buckets(model: nn.Module) -> Iterator[None]:
    """Make buckets so small that a small model has several, as large models do: one bucket hides many errors."""
    known = FlatModel.usual_bucket_bytes
    most = max(256, sum(param.nbytes for param in model.parameters()) // 8)
    patched: Any = FlatModel
    patched.usual_bucket_bytes = staticmethod(lambda device: min(known(device), most))
    try:
        yield
    finally:
        patched.usual_bucket_bytes = staticmethod(known)


def train_plain(case: Case) -> ParityResult:
    """Train `case` on this process without Weft: the result of plain PyTorch on the full batch.

    A parameter that the loss does not reach has a zero gradient, as under every plan. Router biases that balance
    experts are updated as under a plan, because this is part of the model's step.
    """
    model = case.model()
    balance = ExpertBalance(model, build_mesh(Plan())) if any(balanced_routers(model)) else None
    optimizer = case.optimizer_of(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    result = ParityResult()
    model.train()
    for index in range(case.num_steps):
        batch = case.batch(index)
        if balance is not None:
            balance.begin(1.0)
        loss_sum, num_tokens = case.loss(case.forward(model, batch), batch)
        # Divide after backward, like Weft: some float64 models contain float32 parts, whose rounding depends on the
        # scale.
        loss_sum.backward()
        if balance is not None:
            balance.start()
        for param in params.values():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad / num_tokens
        limit = case.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(params.values(), limit)
        result.losses.append((loss_sum / num_tokens).item())
        result.grad_norms.append(norm.item())
        result.grads = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if balance is not None:
            balance.finish(moved=True)
    result.weights = {name: param.detach().clone() for name, param in params.items()}
    return result


def microbatches_of_case(case: Case, step: int, plan: Plan, dp_rank: int) -> Microbatches:
    """Return this rank's part of a step's global batch: from the case's `microbatches`, or else split by rows."""
    cut = getattr(case, "microbatches", None)
    return local_microbatches(case.batch(step), plan, dp_rank) if cut is None else cut(step, plan, dp_rank)


def local_microbatches(batch: Any, plan: Plan, dp_rank: int) -> Microbatches:
    """Return this rank's microbatches of a global batch whose rows are samples.

    Raises ModelError if rows are not samples.
    """
    return Microbatches.of_rows(batch, plan, dp_rank)
