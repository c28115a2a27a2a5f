"""Evaluation: the loss over a fixed set of sequences, the same number under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from weft.comm import all_reduce
from weft.mesh import Axis, Mesh
from weft.parallel.context import cut_sequence, sequence_in_use
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.tensor.head import expect_labels
from weft.train.loss import IGNORE, model_forward, token_cross_entropy
from weft.train.loss_check import LossFn
from weft.train.microbatches import Microbatches
from weft.train.step import ForwardFn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: nats per trained token. bits_per_byte: of the text those tokens stand for; None without a tokenizer."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], mesh: Mesh, token_bytes: torch.Tensor | None) -> Evaluation:
    """Loss of this rank's batches, added over the data-parallel ranks.

    token_bytes: number of bytes of text behind each token id (vocabulary,), on the mesh's device.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=mesh.device)

    def add(output: Any, local: Batch) -> None:
        loss_sum, num_tokens = token_cross_entropy(output, local)
        totals[0] += loss_sum
        totals[1] += num_tokens
        if token_bytes is not None:
            labels = local["labels"]
            totals[2] += token_bytes[labels[labels != IGNORE]].sum()

    _each_output(model, batches, mesh, token_cross_entropy, model_forward, add)
    loss_sum, num_tokens, num_bytes = all_reduce(totals, _counted(mesh)).tolist()
    return Evaluation(
        loss=loss_sum / max(num_tokens, 1.0),
        bits_per_byte=loss_sum / (math.log(2) * num_bytes) if num_bytes else None,
        num_tokens=round(num_tokens),
    )


def mean_loss(
    model: nn.Module, batches: Iterable[Any], mesh: Mesh, loss_fn: LossFn, forward: ForwardFn
) -> tuple[float, int]:
    """The mean loss of this rank's batches and those of the other data-parallel ranks, and the number in it.

    batches: plain ones or `Microbatches`, as many on each rank. loss_fn, forward: as `TrainStep` takes them. Equal on
    all ranks; a collective.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    counts = True  # of the batch that is under way

    def one_by_one() -> Iterator[Any]:
        nonlocal counts
        for batch in batches:
            for one, is_counted in batch.counted() if isinstance(batch, Microbatches) else [(batch, True)]:
                counts = is_counted
                yield one

    def add(output: Any, local: Any) -> None:
        loss_sum, number = loss_fn(output, local)
        if counts:
            totals[0] += loss_sum
            totals[1] += number

    _each_output(model, one_by_one(), mesh, loss_fn, forward, add)
    loss_sum, number = all_reduce(totals, _counted(mesh)).tolist()
    return loss_sum / max(number, 1.0), round(number)


@torch.no_grad()
def _each_output(
    model: nn.Module,
    batches: Iterable[Any],
    mesh: Mesh,
    loss_fn: LossFn,
    forward: ForwardFn,
    add: Callable[[Any, Any], None],
) -> None:
    """Forward each batch in evaluation mode; `add` gets output and batch, on the last stage alone under a pipeline."""

    def forward_to_loss(model: nn.Module, local: Any) -> Any:
        with expect_labels(model, loss_fn, local):
            return forward(model, local)

    def here(batch: Any) -> Any:
        moved = tree_map(lambda one: one.to(mesh.device) if isinstance(one, torch.Tensor) else one, batch)
        return cut_sequence(model, moved)

    was_training = model.training
    model.eval()
    pipeline = pipeline_of(model)
    try:
        with sequence_in_use(model):
            if pipeline is not None:
                pipeline.evaluate(map(here, batches), forward_to_loss, add)
            else:
                for local in map(here, batches):
                    add(forward_to_loss(model, local), local)
    finally:
        model.train(was_training)


def _counted(mesh: Mesh) -> Axis:
    """The ranks whose sums add up; of a pipeline, only the last stage has any, and all want to know."""
    return mesh.batch if mesh.plan.pp == 1 else mesh["pp", "dp_replicate", "dp_shard", "cp"]
