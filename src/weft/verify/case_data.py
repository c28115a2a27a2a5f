"""The batches that `weft verify` trains on: a task's, the user's, or random ones that fit the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.config import partitioning as shares
from weft.config.plan import Plan
from weft.data.batches import map_tensors
from weft.errors import ModelError
from weft.models.inspect import dry_run, hugging_face
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.tasks.base import Task
from weft.verify.foreign_config import choose_inputs, has_inputs, inputs_of, runs, samples_with_images, token_labels
from weft.verify.parity import SampleCase, local_microbatches

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32, "float16": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Size and dtype of the model, and amount of training.

    Attributes:
        dtype: "float64", "float32", "bfloat16" or "float16".
        num_layers, dim, vocab_size: None uses the model's values.
    """

    num_steps: int = 3
    dtype: str = "float64"
    seq_len: int = 32
    global_batch: int = 8
    seed: int = 0
    num_layers: int | None = None
    dim: int | None = None
    vocab_size: int | None = None


class CaseData(SampleCase):
    """The batches of a case, from a task, the user's loader or function, or random numbers.

    Args:
        settings: sizes, dtype and seed.
        kind: kind of the subject.
        model: the model, whose forward determines random batches.
        data: samples of a loader, or batch_fn(step, size).
        task: the task that provides each rank's batches, as in a run.
        vocab_size: random batches have token ids below it; None if the model has other inputs.
    """

    def __init__(
        self, settings: Settings, kind: str, model: nn.Module, data: Callable[[int, int], Any] | None,
        task: Task | None, vocab_size: int | None,
    ):  # fmt: skip
        self.settings, self.kind = settings, kind
        self._model, self._data, self._task, self._vocab_size = model, data, task, vocab_size
        #: Reason why the model trains on text alone although it reads images, or "".
        self.text_alone = ""
        self._shapes: dict[str, tuple[int, ...]] = {}
        if data is None and vocab_size is None and has_inputs(model):
            self._data = self._with_images()
            self._shapes = choose_inputs(model, settings.seq_len, text_alone=bool(self.text_alone))

    def batch(self, step: int) -> Any:
        """Return a batch of the subject's data, or of random tokens or images.

        The last random sample has no trained token, so that ranks count different numbers of tokens.
        """
        size, dtype = self.settings.global_batch, DTYPES[self.settings.dtype]
        if self._task is not None:
            return self.microbatches(step, Plan(), 0)[0]
        if self._data is not None:
            return floats(self._data(step, size), dtype)
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + step)
        if self._vocab_size is None:
            return inputs_of(self._model, self._shapes, size, self.settings.seq_len, dtype, generator)
        shape = (size, self.settings.seq_len)
        ids = torch.randint(self._vocab_size, shape, generator=generator)
        labels = token_labels(self._vocab_size, shape, generator)
        batch = {"input_ids": ids, "labels": labels}
        if self.kind == "decoder":
            batch["positions"] = torch.arange(shape[1]).repeat(size, 1)
        return batch

    def samples(self, step: int) -> list[Any]:
        assert isinstance(self._data, dry_run.LoadedSamples)
        return self._data.samples(step, self.settings.global_batch)

    def collate(self, samples: list[Any]) -> Any:
        assert isinstance(self._data, dry_run.LoadedSamples)
        return floats(self._data.collate(samples), DTYPES[self.settings.dtype])

    def microbatches(self, step: int, plan: Plan, dp_rank: int) -> Microbatches:
        if isinstance(self._data, dry_run.LoadedSamples):
            return super().microbatches(step, plan, dp_rank)
        if self._task is not None:
            timeline = shares.ShareTimeline(plan.shares)
            share = Share(
                self.settings.global_batch, plan.microbatches_per_step, dp_rank, plan.dp_size, timeline=timeline
            )
            batches = self._task.batches(share).batches(step)
            cut = Microbatches(batches)
            if cut.samples is None:
                cut = Microbatches(batches, share.own(step), total=share.global_batch)
            return cut.map(lambda batch: floats(batch, DTYPES[self.settings.dtype]))
        return local_microbatches(self.batch(step), plan, dp_rank)

    def _with_images(self) -> Any:
        """Return samples with images for a model that replaces tokens by them, or None if it trains on text alone."""
        given = self.settings
        if not hugging_face.reads_images_as_tokens(self._model):
            return None
        count, why = given.num_steps * given.global_batch, "its forward fails on the images that Weft makes"
        try:
            data = samples_with_images(self._model, count, given.global_batch, given.seq_len, given.seed)
            if runs(self._model, floats(data(0, given.global_batch), DTYPES[given.dtype])):
                return data
        except ModelError as error:
            why = str(error).partition(": ")[2].partition(". Return")[0]
        self.text_alone = why
        return None


def floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with floating tensors in a dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
