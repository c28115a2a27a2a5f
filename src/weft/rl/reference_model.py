"""The frozen weights that `task.name = "grpo"` compares tokens with: a teacher, or the initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from weft.config.run_config import RunConfig
from weft.config.shapes.traced_model import Limit
from weft.hub import local_folder
from weft.models.inspect import hugging_face
from weft.parallel.layers.documents import call_in_documents
from weft.planner.space.trained_part import FrozenWork
from weft.train.tasks.description import Which, describe_folder
from weft.train.tasks.distill import Teacher

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel


class ReferenceModel:
    """The reference of a config, and the second model that it needs.

    Attributes:
        which: "base" for the weights without the adapter, "second" for the second model, or None without a reference.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        grpo, adapter = config.grpo, config.adapter
        self.which: Which | None = None
        if grpo.method == "distill":
            self.which = "second"
        elif grpo.beta:
            self.which = "base" if adapter.rank and not adapter.modules_to_save else "second"

    @cached_property
    def teacher(self) -> Teacher | None:
        """The teacher of grpo.teacher, or None."""
        folder = self._config.grpo.teacher
        return Teacher(local_folder(folder, "grpo.teacher")) if folder else None

    @property
    def is_initial(self) -> bool:
        """True if the second model has the run's initial weights."""
        return self.which == "second" and self.teacher is None

    @property
    def plan_limits(self) -> Mapping[str, Limit]:
        """Plan fields that the second model limits."""
        why = "a teacher of another shape would need a pipeline of its own"
        return {} if self.teacher is None else {"pp": Limit((1,), why)}

    def is_teacher(self, model: nn.Module) -> bool:
        """Return True for a teacher from a Hugging Face folder next to one of Weft's decoders."""
        return self.teacher is not None and not self._config.model.path and hugging_face.is_hugging_face(model)

    def teacher_logits(self, model: nn.Module, batch: Any) -> Any:
        """Return the logits of the teacher for a batch."""
        return call_in_documents(model, batch).logits

    def frozen_work(self, trained: PlannedModel) -> FrozenWork | None:
        """Return the forwards without gradients that a step adds, for the planner.

        trained: description of the trained model.
        """
        own = (1 if self.which == "base" else 0) + (1 if self._config.grpo.updates_per_rollout > 1 else 0)
        if self.which != "second":
            return FrozenWork(own=own) if own else None
        shape = trained.shape
        if (teacher := self.teacher) is not None:
            shape = describe_folder(teacher.folder, lambda _: teacher.shapes()).shape
        return FrozenWork(own=own, shape=shape, other=1)
