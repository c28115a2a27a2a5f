"""Steps of a trainer: the microbatches of all ranks, the share of each loss, and an optimizer that applies a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn import functional

from weft.comm.collectives import all_gather, all_reduce, broadcast, gather_json
from weft.comm.mesh import Mesh
from weft.data.batches import tensors_in
from weft.errors import DataError, ModelError
from weft.hf.loading import rows_in
from weft.parallel.pipeline.runtime import pipeline_of
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.train.step.update import StepMetrics

#: Entries of a microbatch: the factor of its loss, a 0-d tensor, and the number of items in its step, if they count.
_SHARE, _ITEMS = "weft_share", "weft_items"


class TrainerBatches:
    """The microbatches of a step on all data ranks."""

    def __init__(self) -> None:
        self._last: Any = None
        #: Number of this rank's microbatches in the step.
        self.count = 0
        #: For each microbatch: sample numbers in the step's global batch, and their part of all counted items.
        self.samples: list[range] = []
        self.parts: list[float] = []
        self.total = 0

    def begin(self, trainer: Any, batches: list[Any], own: Any, num_batches: int) -> tuple[list[Any], Any]:
        """Return this rank's microbatches, and the number of items of all ranks, or None if the trainer counts none.

        If this rank has fewer microbatches than others, an earlier one is repeated as a placeholder. All data ranks
        call it. Raises DataError if this rank has no sample in the first step.

        Args:
            batches: microbatches of this rank, up to `num_batches`.
            own: number of items in them, or None.
        """
        data, device = trainer.weft_run.mesh.data, trainer.weft_run.mesh.device
        table = torch.zeros(num_batches, 3, dtype=torch.float64)
        for index, batch in enumerate(batches):
            rows = rows_in(batch)
            table[index] = torch.tensor([rows, _counted(trainer, batch, rows), 1], dtype=torch.float64)
        every = all_gather(table.to(device), data).view(data.size, num_batches, 3).cpu()
        count = int(every[..., 2].sum(1).max())
        self._last = batches[0] if batches else self._last
        if len(batches) < count and self._last is None:
            raise DataError(
                f"train_dataset: data rank {data.rank} of {data.size} has no sample in the first step. Use more "
                "samples, a smaller per_device_train_batch_size, or fewer data ranks."
            )
        self.count, self.total = count, int(every[:, :count, 0].sum())
        self.samples, self.parts = [], []
        before = 0
        for index in range(count):
            rows = [int(one) for one in every[:, index, 0]]
            first, items = before + sum(rows[: data.rank]), every[:, index, 1]
            self.samples.append(range(first, first + rows[data.rank]))
            self.parts.append(float(items[data.rank] / items.sum().clamp(min=1.0)))
            before += sum(rows)
        batches = [*batches, *[self._last] * (count - len(batches))]
        if data.size == 1 or not batches:
            return batches, own
        counts_items = trainer._get_num_items_in_batch(batches[:1], torch.device("cpu")) is not None
        return batches, every[..., 1].sum().float().to(device) if counts_items else None


def _counted(trainer: Any, batch: Any, rows: int) -> float:
    """Count the items of a batch over which its loss is a mean: labels, or samples if it has no labels."""
    if (counted := trainer._get_num_items_in_batch([batch], torch.device("cpu"))) is not None:
        return float(counted)
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor):
        return rows
    return labels.numel() if labels.is_floating_point() else int(labels.ne(-100).sum())


class TrainerStep:
    """Optimizer steps of a trainer. Losses of microbatches and ranks add up to the loss of the step."""

    def __init__(self, trainer: Any, optimizer: torch.optim.Optimizer):
        self._trainer, self._mesh = trainer, trainer.weft_run.mesh
        self._inputs: list[Any] = []
        #: Microbatches of a step within which a stream ended, their sample numbers, and the number of samples.
        self._early: tuple[list[Any], list[range], int] = ([], [], 0)
        self._items: Any = None
        self._is_counted = False
        self._is_scaled: bool | None = None
        self.metrics = StepMetrics(0.0, 0.0, 0)
        self.step = TrainStep(
            trainer.model, optimizer, self._loss, self._mesh, forward=self._forward,
            max_grad_norm=trainer.args.max_grad_norm, nominal_tokens=1, reads_late=False,
        )  # fmt: skip

    def add(self, inputs: Any, num_items: Any) -> torch.Tensor:
        """Add a microbatch whose tensors are on the device, and return zero.

        At the last microbatch of the step, compute the gradients and return the loss of the step. If a stream without
        a length ends within a step, its microbatches count in the next step, as in transformers.

        Raises:
            DataError: if that happens under pp, whose steps have a fixed number of microbatches.
        """
        batches, device = self._trainer._weft_batches, self._mesh.device
        self._inputs.append(inputs)
        if len(self._inputs) < batches.count:
            return torch.zeros((), device=device)
        inputs, self._inputs, self._items, self._is_counted = self._inputs, [], num_items, False
        samples, parts = list(batches.samples), batches.parts
        shares, trainer = [1.0 if self._scales(inputs[0]) else part for part in parts], self._trainer
        covers_step = trainer.loss_is_scaled_for_ga  # as transformers decides it
        if covers_step is None:
            covers_step = trainer.compute_loss_func is not None
            covers_step |= trainer.model_accepts_loss_kwargs and num_items is not None
        if not covers_step:
            shares = [share / trainer.current_gradient_accumulation_steps for share in shares]
        is_early, plan = not trainer.accelerator.sync_gradients, self._mesh.plan
        if is_early and plan.pp > 1:
            raise DataError(
                f"train_dataset: the stream ends after {batches.count} of the {plan.microbatches_per_step} "
                f"microbatches of a step, and pp={plan.pp} runs full steps. Use a stream with a multiple of "
                f"{plan.microbatches_per_step} batches, or one without an end."
            )
        while plan.pp > 1 and len(inputs) < plan.microbatches_per_step:
            inputs, samples, shares = [*inputs, inputs[0]], [*samples, range(0)], [*shares, 0.0]
        counted = {} if num_items is None else {_ITEMS: torch.as_tensor(num_items, device=device)}
        marked = [
            {**self._unsharded(one), _SHARE: torch.tensor(share, dtype=torch.float64, device=device), **counted}
            for one, share in zip(inputs, shares, strict=True)
        ]
        early, numbers, first = self._early
        marked, total = [*early, *marked], first + batches.total
        samples = [*numbers, *(range(one.start + first, one.stop + first) for one in samples)]
        self._early = (marked, samples, total) if is_early else ([], [], 0)
        if is_early:
            return torch.zeros((), device=device)
        self.metrics = self.step.compute(Microbatches(marked, samples, total=total, any_number=True))
        return torch.tensor(self.metrics.loss, device=device)

    def apply(self) -> StepMetrics:
        """Update the weights, and return the step's metrics."""
        self.metrics = self.step.apply()
        return self.metrics

    def _unsharded(self, inputs: Any) -> dict[str, Any]:
        """Return inputs that cp can shard: with shifted labels, and padded on the right to a multiple of 2 * cp.

        The padding changes no other token of a causal language model. Without cp, return the inputs unchanged.
        """
        if self._mesh.plan.cp == 1:
            return dict(inputs)
        found, length = dict(inputs), inputs["input_ids"].shape[1]
        if "shift_labels" not in found:
            found["shift_labels"] = functional.pad(found["labels"], (0, 1), value=-100)[..., 1:].contiguous()
        found["labels"] = found["shift_labels"]
        missing = -length % (2 * self._mesh.plan.cp)
        for name, one in found.items():
            if isinstance(one, torch.Tensor) and one.ndim == 2 and one.shape[1] == length and missing:
                found[name] = functional.pad(one, (0, missing), value=-100 if name.endswith("labels") else 0)
        return found

    def _forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in batch.items() if name not in (_SHARE, _ITEMS)}
        with self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(model, inputs, num_items_in_batch=batch.get(_ITEMS))

    def _loss(self, output: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        loss = output.mean() * batch[_SHARE].to(output.dtype)
        # The losses are parts of the step's mean, so the number that Weft divides by is 1.
        counts = not self._is_counted and self._mesh.batch.rank == 0
        self._is_counted = True
        return loss, int(counts)

    def _scales(self, inputs: Any) -> bool:
        """Return True if the loss counts as a sum divided by the number of items, and False for a mean of its batch.

        On one data rank this is so if there is a number of items. For a custom compute_loss, all ranks find it in the
        first call by two forwards, which raises ModelError if the loss is neither.
        """
        trainer = self._trainer
        if self._items is None or self._mesh.data.size == 1:
            return self._items is not None
        is_known = type(trainer).compute_loss.__module__.partition(".")[0] in ("transformers", "trl")
        if is_known and trainer.compute_loss_func is None and trainer.shifts_labels:
            return True
        if self._is_scaled is None:
            self._is_scaled = self._find_scale(inputs)
        return self._is_scaled

    @torch.no_grad()
    def _find_scale(self, inputs: Any) -> bool:
        """Return True if twice as many items halve the loss, or False if they leave it unchanged. All ranks call it.

        Raises ModelError for any other change.
        """
        trainer, model, pipeline = self._trainer, self._trainer.model, pipeline_of(self._trainer.model)
        losses = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)

        def forward(model: nn.Module, batch: dict[str, Any], factor: int = 1) -> torch.Tensor:
            return trainer.compute_loss(model, dict(batch), num_items_in_batch=self._items * factor).mean()

        def add(output: torch.Tensor, batch: Any, index: int = 0) -> None:
            losses[index] += output

        model.eval()
        try:
            for index in range(2):
                call = functools.partial(forward, factor=index + 1)
                if pipeline is None:
                    add(call(model, inputs), inputs, index)
                else:
                    pipeline.evaluate([dict(inputs)], call, functools.partial(add, index=index))
        finally:
            model.train()
        sums = all_reduce(losses, self._mesh.world).tolist()
        for factor, is_scaled in ((1.0, False), (2.0, True)):
            if abs(sums[0] - factor * sums[1]) <= 1e-3 * abs(sums[0]):
                return is_scaled
        raise ModelError(
            f"{type(trainer).__name__}.compute_loss: with twice the num_items_in_batch its loss is "
            f"{sums[1] / sums[0]:.3g} times as large, so it is no mean of its batch, and no sum divided by "
            "num_items_in_batch. Use one of them."
        )


class StepOptimizer(AcceleratedOptimizer):
    """The trainer's optimizer. Its step applies the gradients that `TrainerStep` computed."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: TrainerStep):
        super().__init__(optimizer, device_placement=False)
        self._step = step

    def step(self, closure: Any = None) -> None:
        """Update the weights, or skip the step if loss or gradients are not finite."""
        del closure
        self._is_overflow = self._step.apply().skipped is not None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: a step begins with zero gradients."""


@torch.no_grad()
def predict_in_pipeline(
    model: nn.Module, inputs: Any, labels: Any, mesh: Mesh, predict: Callable[[nn.Module, Any], tuple[Any, Any, Any]]
) -> tuple[Any, Any, Any]:
    """Return loss, logits and labels of a batch on all stages. All ranks of pp call it with the same batch.

    Args:
        labels: labels of the batch, which are returned.
        predict: returns loss, logits and labels of a batch, from the model and the batch. Called on the last stage.
    """
    pipeline, found = pipeline_of(model), list[Any]()
    assert pipeline is not None
    pipeline.evaluate([inputs], predict, lambda output, batch: found.append(output))
    owner, axis = pipeline.schedule.owner(len(pipeline.counts) - 1), mesh["pp"]
    loss, logits, _ = found[0] if axis.rank == owner else (None, None, None)
    own = list(tensors_in([loss, logits]))
    form = [loss is not None, [[list(one.shape), str(one.dtype).removeprefix("torch.")] for one in own]]
    has_loss, shapes = gather_json(form, axis, mesh.device)[owner]
    if axis.rank != owner:
        own = [torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device) for shape, dtype in shapes]
    own = [broadcast(one.contiguous(), axis, owner) for one in own]
    rest = own[has_loss:]
    return own[0] if has_loss else None, rest[0] if len(rest) == 1 else tuple(rest) or None, labels
