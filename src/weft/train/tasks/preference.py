"""Preference training: `task.name = "prefer"`. A sample is a pair of answers, or for kto a labeled answer.

Values without a gradient are computed before a step, for all its microbatches: the log-probabilities of the reference
model, and kto's mean over the global batch. So losses are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.errors import DataError, did_you_mean
from weft.planner.space.trained_part import FrozenWork
from weft.train.batches.data_share import Batches, Share
from weft.train.batches.microbatches import Microbatches
from weft.train.tasks.base import Metric, Report, Task, setting_error
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.description import Forwards, Which
from weft.train.tasks.preference_data import Objective, Preferences, ready_reference, row_log_probs
from weft.units import format_count

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder

_OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo")
_REFERENCES = ("auto", "adapter_off", "cached", "frozen_copy")


class PreferTask(DecoderTask):
    """Preference training of a decoder.

    Args:
        objective: dpo, ipo, kto, orpo or simpo; see tasks/preference_data.py for the formulas.
        beta: beta of the objective; 0 for its paper's value.
        reference: the reference model of dpo, ipo and kto. adapter_off: the model without its adapter. cached:
            log-probabilities that are computed once before the first step and stored in the run folder. frozen_copy: a
            second model under the same plan. auto: adapter_off with an adapter, else cached.
        smoothing: for dpo: the share of pairs whose labels are assumed to be swapped.
        margin: for simpo: the target margin of the chosen answer.
        wanted: for kto: weight of wanted answers.
        unwanted: for kto: weight of unwanted answers.

    Raises:
        ConfigError: for values out of range.
    """

    unit = sample_unit = "preferences"
    metrics = (
        Metric("reward_accuracy", "", "share of pairs whose chosen answer has the higher reward; for kto, of "
                                      "answers that the reward classifies correctly"),
        Metric("reward_margin", "", "mean reward of chosen minus rejected answers"),
    )  # fmt: skip
    sum_names = ("right", "better", "worse", "num_better", "num_worse")
    learns_preferences = True
    identity = (*DecoderTask.identity, "task.options")

    def __init__(
        self,
        objective: str = "dpo",
        beta: float = 0.0,
        reference: str = "auto",
        smoothing: float = 0.0,
        margin: float = 1.0,
        wanted: float = 1.0,
        unwanted: float = 1.0,
    ):
        _check_options(objective, beta, reference, smoothing, wanted, unwanted)
        self._objective = Objective.of(objective, beta, smoothing, margin, wanted, unwanted)
        self._requested = reference
        self._values: StepValues | None = None
        self._rows_at_once = 1

    @property
    def reference(self) -> str:
        """The reference model: adapter_off, cached or frozen_copy, or "" if the objective has no reference.

        Raises:
            ConfigError: if the option `reference` is set for an objective without one, or is adapter_off without an
                adapter or with adapter.modules_to_save.
        """
        asked, adapter = self._requested, self.config.adapter
        has_adapter = bool(adapter.rank) and not adapter.modules_to_save  # saved modules have no weights to go back to
        if not self._objective.compares:
            if asked != "auto":
                rule = f"objective={self._objective.name} compares with no reference. Leave it out."
                raise setting_error("task.options.reference", asked, rule)
            return ""
        if asked == "auto":
            return "adapter_off" if has_adapter else "cached"
        if asked == "adapter_off" and not has_adapter:
            rule = "the run trains no adapter that could be off. Set adapter.rank, or use cached or frozen_copy."
            if adapter.rank:
                rule = "adapter.modules_to_save replaces weights of the base. Use cached or frozen_copy."
            raise setting_error("task.options.reference", asked, rule)
        return asked

    @property
    def rereads_weights(self) -> bool:
        return self.reference == "frozen_copy"

    def second_model(self, plan: Plan) -> nn.Module | None:
        return self.initial_model(plan) if self.reference == "frozen_copy" else None

    def second_weights(self, model: nn.Module) -> StateSource | None:
        return self.initial_weights(model)

    # --- data ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the settings, and prepare the run as `DecoderTask.prepare` does.

        Raises:
            ConfigError: also for settings that do not apply to preferences, such as data.packing.
            DataError: also if the data has labeled answers, and the objective is not kto.
        """
        _ = self.reference
        data = self.config.data
        if data.packing is not None:
            rule = "preferences are not packed: a row has one answer. Leave it out."
            raise setting_error("data.packing", data.packing, rule)
        for number, source in enumerate(data.train):
            if source.weight is not None:
                rule = "preferences of several sources are one set, in which each counts once. Leave it out."
                raise setting_error(f"data.train.{number}.weight", source.weight, rule)
        super().prepare(folder, report)
        for key, sources in (("train", self.data.train), ("eval", self.data.eval)):
            for number, source in enumerate(sources):
                if source.kind == "feedback" and not self._objective.is_kto:
                    raise DataError(
                        f"data.{key}.{number}.path={source.name}: it has labeled answers, and "
                        f"task.options.objective={self._objective.name} needs pairs. Use objective=kto."
                    )

    def samples_per_epoch(self) -> int:
        return len(self._preferences.train)

    def samples(self, split: str) -> Any:
        return self._preferences.samples(split, self.config.train.global_batch)

    @cached_property
    def _preferences(self) -> Preferences:
        return Preferences(self.data, self.config.train.seq_len, is_kto=self._objective.is_kto)

    def collate(self, samples: list[Any]) -> Any:
        return self._preferences.collate(samples)

    def batches(self, share: Share) -> Batches:
        self._rows_at_once = max(1, share.rows)
        return Task.batches(self, share)

    def sample_lines(self, place: int) -> Sequence[str]:
        return self._preferences.lines(self.config.seed, place)

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        return Task.eval_batches(self, share)

    def nominal_count(self) -> int:
        return self.config.train.global_batch

    # --- before a step ---

    def begin(self, forwards: Forwards) -> None:
        """Keep `forwards`. With reference=cached, read the log-probabilities from the run folder, or compute them.

        Raises:
            DataError: if the log-probabilities of a resumed run are missing, or belong to other data.
        """
        reference, stored = self.reference, self._preferences
        self._values = StepValues(forwards, reference, self.config.train.global_batch, is_kto=self._objective.is_kto)
        if reference == "cached":
            assert self.text.folder is not None
            sets = {"train": stored.train, "eval": stored.eval}
            found = ready_reference(forwards, self.text.folder, stored.key, sets, stored.collate, self._rows_at_once)
            for name, one in sets.items():
                one.reference = found[name]

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the batches with the reference's log-probabilities, and for kto with `z`, the mean log-ratio."""
        assert self._values is not None
        return self._values.added(batches)

    # --- loss ---

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        losses = self._objective.losses(self._answers(output, batch), batch)
        total = losses.sum()
        if not self._is_counted:
            return total - total.detach(), 0  # keeps the gradient, counts nothing
        return total, losses.numel()

    loss.takes_head_loss = "tokens"

    @property
    def _is_counted(self) -> bool:
        return self._values is None or self._values.forwards.is_counted

    def _answers(self, output: Any, batch: Any) -> list[Any]:
        policy = row_log_probs(output, batch)
        if self._values is not None:
            policy = self._values.forwards.along_sequence(policy)
        return self._objective.answers(policy, batch)

    # --- metrics ---

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        found = self._objective.sums(self._answers(output, batch), batch)
        return {name: value.detach() * self._is_counted for name, value in found.items()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        has_both = sums["num_better"] and sums["num_worse"]
        margin = sums["better"] / sums["num_better"] - sums["worse"] / sums["num_worse"] if has_both else None
        return {"reward_accuracy": sums["right"] / sums["count"] if sums["count"] else None, "reward_margin": margin}

    def flops_per_count(self) -> float | None:
        """Return None: the lengths of answers vary."""
        return None

    # --- for the planner and users ---

    def describe(self) -> PlannedModel:
        """Describe the model for the planner: two rows per pair, and the cost of the reference in each step."""
        found, reference, is_kto = super().describe(), self.reference, self._objective.is_kto
        # For kto, the mean over the batch needs as many additional rows, of model and reference.
        each = 2 if is_kto else 1
        own = (each if reference == "adapter_off" else 0) + (1 if is_kto else 0)
        frozen = None
        if reference == "frozen_copy":
            frozen = FrozenWork(own=own, shape=found.shape, other=each)
        elif own:
            frozen = FrozenWork(own=own)
        return replace(found, sample_unit=self.sample_unit, texts=1 if is_kto else 2, frozen=frozen)

    def data_lines(self) -> Sequence[str]:
        lines, wanted, number = list(super().data_lines()), self.config.train.global_batch, len(self._preferences.eval)
        if 0 < number < wanted:
            lines.append(
                f"evaluation: {number} {self.unit} are fewer than train.global_batch={wanted}, so each "
                "is read several times to fill batches"
            )
        return lines

    def batch_line(self) -> str:
        train, objective = self.config.train, self._objective
        compares = {"adapter_off": "the model without its adapter", "cached": "log-probabilities cached before step 1",
                    "frozen_copy": "a frozen copy", "": "no reference"}[self.reference]  # fmt: skip
        return (
            f"{train.global_batch} {self.unit} a step, answers of at most {train.seq_len} tokens; {objective.name} "
            f"with beta {objective.weighing.beta:g} against {compares}; {train.steps} steps, "
            f"{format_count(train.global_batch * train.steps)} {self.unit}"
        )


class StepValues:
    """Values without a gradient that all microbatches of a step need: see the module docstring.

    Args:
        forwards: runs the sharded model.
        reference: the value of `PreferTask.reference`.
        global_batch: samples per step.
        is_kto: True to add the mean log-ratio as `z`.
    """

    def __init__(self, forwards: Forwards, reference: str, global_batch: int, *, is_kto: bool):
        self.forwards, self._global_batch, self._is_kto = forwards, global_batch, is_kto
        # Weights of the reference, or None if batches have its log-probabilities or do not need them.
        weights: dict[str, Which] = {"adapter_off": "base", "frozen_copy": "second"}
        self._of: Which | None = weights.get(reference)

    def added(self, batches: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the microbatches with the reference's log-probabilities, and for kto also with the mean."""
        changed = [dict(batch) for batch in batches]
        if self._of is not None:
            for batch, found in zip(changed, self.forwards.rows(changed, row_log_probs, of=self._of), strict=True):
                batch["reference"] = found
        if self._is_kto:
            z = self._mean_gain(changed)
            changed = [{**{k: v for k, v in batch.items() if k != "mixed"}, "z": z} for batch in changed]
        return changed

    def _mean_gain(self, batches: Sequence[Any]) -> torch.Tensor:
        """Return max(0, mean log-ratio of policy to reference over mismatched answers of the global batch), (1,)."""
        mixed = [batch["mixed"] for batch in batches]
        policy = self.forwards.rows(mixed, row_log_probs)
        if self._of is None:
            # On a rank without output, both values are 0.
            has_output = [bool(one.any()) for one in policy]
            before = [one["reference"].to(found) * here
                      for one, found, here in zip(mixed, policy, has_output, strict=True)]  # fmt: skip
        else:
            before = self.forwards.rows(mixed, row_log_probs, of=self._of)
        gains = [(now - then).sum() for now, then in zip(policy, before, strict=True)]
        counts = [is_counted for _, is_counted in Microbatches(batches).counted()]
        own = torch.stack([gain * is_counted for gain, is_counted in zip(gains, counts, strict=True)]).sum()
        return (self.forwards.total(own.reshape(1)) / self._global_batch).clamp(min=0)


def _check_options(
    objective: str, beta: float, reference: str, smoothing: float, wanted: float, unwanted: float
) -> None:
    key = "task.options"
    for name, value, known in (("objective", objective, _OBJECTIVES), ("reference", reference, _REFERENCES)):
        if value not in known:
            rule = f"it is one of {', '.join(known)}.{did_you_mean(value, known)} Use {name}={known[0]}."
            raise setting_error(f"{key}.{name}", value, rule)
    if beta < 0:
        raise setting_error(f"{key}.beta", beta, "it must be above 0. Use 0.1, or leave it out.")
    if not 0 <= smoothing < 0.5:
        raise setting_error(f"{key}.smoothing", smoothing, "it is a share of at least 0 and below 0.5. Use 0.1.")
    if smoothing and objective != "dpo":
        raise setting_error(
            f"{key}.smoothing", smoothing, f"only dpo has it, and the objective is {objective}. Leave it out."
        )
    for name, value in (("wanted", wanted), ("unwanted", unwanted)):
        if value < 0:
            raise setting_error(f"{key}.{name}", value, "a weight is at least 0. Use 1.")
