"""Preference training: `task.name = "prefer"`. A sample is a pair of answers, or for kto an answer with a verdict.

Values without a gradient are computed before a step, for all its microbatches: the reference's log-probabilities, and
kto's mean over the global batch. So losses are the same under every plan and accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError, DataError, Problem, did_you_mean
from weft.train.data_share import Batches, Share
from weft.train.tasks.base import Metric, Report, Task
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.description import Forwards
from weft.train.tasks.pretrained import PretrainedTask
from weft.units import format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder
    from weft.train.tasks.preference_data import PairSamples, VerdictSamples

_OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo")
_REFERENCES = ("auto", "adapter_off", "cached", "frozen_copy")


class PreferTask(DecoderTask):
    """Preference training of one of Weft's decoders.

    Args:
        objective: dpo, ipo, kto, orpo or simpo; tasks/preference_data.py has their formulas.
        beta: beta of the objective; 0 for its paper's value.
        reference: the model that dpo, ipo and kto compare with. adapter_off: the model without its adapter. cached:
            log-probabilities computed once before the first step and stored in the run folder. frozen_copy: a second
            model under the same plan. auto: adapter_off with an adapter, else cached.
        smoothing: for dpo: the share of pairs whose labels are assumed to be swapped.
        margin: for simpo: the target margin of the chosen answer.
        wanted: for kto: weight of wanted answers.
        unwanted: for kto: weight of the others.

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
        from weft.train.tasks.preference_data import DEFAULT_BETAS, Weighing

        _check_options(objective, beta, reference, smoothing, wanted, unwanted)
        self._objective, self._asked = objective, reference
        self._weighing = Weighing(
            float(beta or DEFAULT_BETAS[objective]), float(smoothing), float(margin), float(wanted), float(unwanted)
        )
        self._forwards: Forwards | None = None
        self._rows_at_once = 1

    @property
    def reference(self) -> str:
        """Method that computes the reference, or "" if the objective has no reference.

        Raises:
            ConfigError: if the config forbids it.
        """
        from weft.train.tasks.preference_data import WITH_REFERENCE

        has_adapter = bool(self.config.adapter.rank)
        if self._objective not in WITH_REFERENCE:
            if self._asked != "auto":
                rule = f"objective={self._objective} compares with no reference. Leave it out."
                raise _wrong("task.options.reference", self._asked, rule)
            return ""
        if self._asked == "auto":
            return "adapter_off" if has_adapter else "cached"
        if self._asked == "adapter_off" and not has_adapter:
            rule = "the run trains no adapter that could be off. Set adapter.rank, or use cached or frozen_copy."
            raise _wrong("task.options.reference", self._asked, rule)
        return self._asked

    def second_model(self, plan: Plan) -> nn.Module | None:
        return self.initial_model(plan) if self.reference == "frozen_copy" else None

    def second_weights(self, model: nn.Module) -> StateSource | None:
        return self.initial_weights(model)

    # --- data ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Tokenise the preferences.

        Raises:
            ConfigError: for settings that do not apply to preferences.
            DataError: for data that the objective does not support.
        """
        _ = self.reference
        data = self.config.data
        if data.packing is not None:
            rule = "preferences are not packed: a row has one answer. Leave it out."
            raise _wrong("data.packing", data.packing, rule)
        for number, source in enumerate(data.train):
            if source.weight is not None:
                rule = "preferences of several sources are one set, in which each counts once. Leave it out."
                raise _wrong(f"data.train.{number}.weight", source.weight, rule)
        super().prepare(folder, report)
        for key, sources in (("train", self.data.train), ("eval", self.data.eval)):
            for number, source in enumerate(sources):
                if source.kind == "feedback" and self._objective != "kto":
                    raise DataError(
                        f"data.{key}.{number}.path={source.name}: it has labeled answers, and "
                        f"task.options.objective={self._objective} needs pairs. Use objective=kto."
                    )

    def samples_per_epoch(self) -> int:
        return len(self._of_train)

    def samples(self, split: str) -> Sequence[Any] | PairSamples | VerdictSamples | None:
        from weft.train.tasks.preference_data import fill_batches

        if split == "train":
            return self._of_train
        size = self.config.train.global_batch
        return fill_batches(self._of_eval, size) if 0 < len(self._of_eval) < size else self._of_eval

    @cached_property
    def _of_train(self) -> PairSamples | VerdictSamples:
        return self._stored(self.data.train)

    @cached_property
    def _of_eval(self) -> PairSamples | VerdictSamples:
        return self._stored(self.data.eval)

    def _stored(self, sources: Any) -> PairSamples | VerdictSamples:
        from weft.train.tasks.preference_data import PairSamples, StoredAnswers, VerdictSamples

        answers = StoredAnswers(sources, self.config.train.seq_len)
        return VerdictSamples(answers) if self._objective == "kto" else PairSamples(answers)

    def collate(self, samples: list[Any]) -> Any:
        from weft.train.tasks.preference_data import collate_answers

        return collate_answers(samples, self.data.train[0].pad_id, self.config.train.seq_len)

    def batches(self, share: Share) -> Batches:
        self._rows_at_once = max(1, share.rows)
        return Task.batches(self, share)

    def sample_lines(self, place: int) -> Sequence[str]:
        """Show the text of the answers, with their prompt in double brackets."""
        from weft.data.order.loader import marked, view_answer
        from weft.train.tasks.indexed import sample_in_order  # imported here, because it loads torch

        where, sample = sample_in_order(self._of_train, self.config.seed, place)
        lines = [where]
        for ids, labels in sample["rows"]:
            weights = [0.0, *(labels >= 0).astype(float).tolist()]
            # The last label is a token that no input contains.
            whole = [*ids.tolist(), *labels[-1:][labels[-1:] >= 0].tolist()]
            lines += marked(view_answer(whole, weights[: len(whole)], self.data.tokenizer)).split("\n")
        return lines

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        return Task.eval_batches(self, share)

    def nominal_count(self) -> int:
        return self.config.train.global_batch

    # --- before a step ---

    def begin(self, forwards: Forwards) -> None:
        """Keep a reference to the sharded model. Compute a cached reference, or read it from the run folder.

        Raises:
            DataError: if a resumed run's cache is missing.
        """
        from weft.train.tasks.preference_data import ready_reference

        self._forwards = forwards
        if self.reference == "cached":
            assert self._folder is not None
            sets = {"train": self._of_train, "eval": self._of_eval}
            key = f"{self.data.digest}/{self.config.train.seq_len}/{self._objective == 'kto'}"
            found = ready_reference(forwards, self._folder, key, sets, self.collate, self._rows_at_once)
            for name, one in sets.items():
                one.reference = found[name]

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Add the reference's log-probabilities, and for kto the mean over the global batch."""
        from weft.train.tasks.preference_data import row_log_probs

        forwards, reference = self._forwards, self.reference
        assert forwards is not None
        of = {"adapter_off": "base", "frozen_copy": "second"}.get(reference)
        changed = [dict(batch) for batch in batches]
        if of is not None:
            for batch, found in zip(changed, forwards.rows(changed, row_log_probs, of=of), strict=True):  # pyright: ignore[reportArgumentType] - a literal
                batch["reference"] = found
        if self._objective == "kto":
            z = self._mean_gain(changed, of)
            changed = [{**{k: v for k, v in batch.items() if k != "mixed"}, "z": z} for batch in changed]
        return changed

    def _mean_gain(self, batches: Sequence[Any], of: Any) -> torch.Tensor:
        """Return max(0, mean log-ratio of policy to reference on mixed answers over the global batch), (1,)."""
        import torch

        from weft.train.microbatches import Microbatches
        from weft.train.tasks.preference_data import row_log_probs

        forwards = self._forwards
        assert forwards is not None
        mixed = [batch["mixed"] for batch in batches]
        policy = forwards.rows(mixed, row_log_probs)
        if of is None:
            # On a rank without output both are 0.
            has_output = [bool(one.any()) for one in policy]
            before = [one["reference"].to(found) * here
                      for one, found, here in zip(mixed, policy, has_output, strict=True)]  # fmt: skip
        else:
            before = forwards.rows(mixed, row_log_probs, of=of)
        gains = [(now - then).sum() for now, then in zip(policy, before, strict=True)]
        counts = [is_counted for _, is_counted in Microbatches(batches).counted()]
        own = torch.stack([gain * is_counted for gain, is_counted in zip(gains, counts, strict=True)]).sum()
        return (forwards.total(own.reshape(1)) / self.config.train.global_batch).clamp(min=0)

    # --- loss ---

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        losses = self._losses(output, batch)
        total = losses.sum()
        if self._forwards is not None and not self._forwards.is_counted:
            return total - total.detach(), 0  # keeps the gradient, counts nothing
        return total, losses.numel()

    loss.takes_head_loss = "tokens"

    def _losses(self, output: Any, batch: Any) -> torch.Tensor:
        from weft.train.tasks.preference_data import PAIR_LOSSES, kto_losses

        answers = self._answers(output, batch)
        if self._objective == "kto":
            (one,) = answers
            return kto_losses(one, batch["wanted"], batch["z"].to(one.policy), self._weighing)
        chosen, rejected = answers
        return PAIR_LOSSES[self._objective](chosen, rejected, self._weighing)

    def _answers(self, output: Any, batch: Any) -> list[Any]:
        """Return the chosen and the rejected answers, or for kto the answers."""
        import torch

        from weft.train.tasks.preference_data import Answers, row_log_probs

        policy = row_log_probs(output, batch)
        if self._forwards is not None:
            policy = self._forwards.along_sequence(policy)
        reference = batch["reference"].to(policy) if self.reference else torch.zeros_like(policy)
        tokens = batch["tokens"].to(policy).clamp(min=1)
        if self._objective == "kto":
            return [Answers(policy, reference, tokens)]
        return [Answers(policy[place::2], reference[place::2], tokens[place::2]) for place in (0, 1)]

    # --- metrics ---

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        answers = self._answers(output, batch)
        rewards = [self._reward(one) for one in answers]
        if self._objective == "kto":
            (reward,), wanted = rewards, batch["wanted"]
            right = ((reward > self._weighing.beta * batch["z"].to(reward)) == wanted).sum()
            better, worse, num = reward.where(wanted, 0.0).sum(), reward.where(~wanted, 0.0).sum(), wanted.sum()
            found = {"right": right, "better": better, "worse": worse, "num_better": num, "num_worse": (~wanted).sum()}
        else:
            better, worse = rewards
            number = (better == better).sum()
            found = {"right": (better > worse).sum(), "better": better.sum(), "worse": worse.sum(),
                     "num_better": number, "num_worse": number}  # fmt: skip
        is_counted = self._forwards is None or self._forwards.is_counted
        return {name: value.detach() * is_counted for name, value in found.items()}

    def _reward(self, answer: Any) -> torch.Tensor:
        return self._weighing.beta * (answer.gain if self.reference else answer.mean)

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        has_both = sums["num_better"] and sums["num_worse"]
        margin = sums["better"] / sums["num_better"] - sums["worse"] / sums["num_worse"] if has_both else None
        return {
            "reward_accuracy": sums["right"] / sums["count"] if sums["count"] else None,
            "reward_margin": margin,
        }

    def flops_per_count(self) -> float | None:
        """Return None: the lengths of answers vary."""
        return None

    # --- for the planner and users ---

    def describe(self) -> PlannedModel:
        """Describe the model with two rows for each pair, and the reference's work in each step."""
        from weft.planner.space.trained_part import FrozenWork

        found, reference, is_kto = super().describe(), self.reference, self._objective == "kto"
        # For kto, the mean over the batch runs the model and the reference on as many mixed rows.
        each = 2 if is_kto else 1
        own = (each if reference == "adapter_off" else 0) + (1 if is_kto else 0)
        frozen = None
        if reference == "frozen_copy":
            frozen = FrozenWork(own=own, shape=found.shape, other=each)
        elif own:
            frozen = FrozenWork(own=own)
        return replace(found, sample_unit=self.sample_unit, texts=1 if is_kto else 2, frozen=frozen)

    def data_lines(self) -> Sequence[str]:
        lines, wanted = list(super().data_lines()), self.config.train.global_batch
        if 0 < len(self._of_eval) < wanted:
            lines.append(
                f"evaluation: {len(self._of_eval)} {self.unit} are fewer than train.global_batch={wanted}, so each "
                "is read several times to fill batches"
            )
        return lines

    def batch_line(self) -> str:
        train, what = self.config.train, self._objective
        compares = {"adapter_off": "the model without its adapter", "cached": "log-probabilities cached before step 1",
                    "frozen_copy": "a frozen copy", "": "no reference"}[self.reference]  # fmt: skip
        return (
            f"{train.global_batch} {self.unit} a step, answers of at most {train.seq_len} tokens; {what} with beta "
            f"{self._weighing.beta:g} against {compares}; {train.steps} steps, "
            f"{format_count(train.global_batch * train.steps)} {self.unit}"
        )


class PretrainedPreferTask(PreferTask, PretrainedTask):
    """Preference training of a Hugging Face folder's model."""

    @property
    def _needs_folder(self) -> bool:
        return bool(self.config.adapter.rank) or self.reference == "frozen_copy"


def _check_options(
    objective: str, beta: float, reference: str, smoothing: float, wanted: float, unwanted: float
) -> None:
    key = "task.options"
    for name, value, known in (("objective", objective, _OBJECTIVES), ("reference", reference, _REFERENCES)):
        if value not in known:
            rule = f"it is one of {', '.join(known)}.{did_you_mean(value, known)} Use {name}={known[0]}."
            raise _wrong(f"{key}.{name}", value, rule)
    if beta < 0:
        raise _wrong(f"{key}.beta", beta, "it must be above 0. Use 0.1, or leave it out.")
    if not 0 <= smoothing < 0.5:
        raise _wrong(f"{key}.smoothing", smoothing, "it is a share of at least 0 and below 0.5. Use 0.1.")
    if smoothing and objective != "dpo":
        raise _wrong(f"{key}.smoothing", smoothing, f"only dpo has it, and the objective is {objective}. Leave it out.")
    for name, value in (("wanted", wanted), ("unwanted", unwanted)):
        if value < 0:
            raise _wrong(f"{key}.{name}", value, "a weight is at least 0. Use 1.")


def _wrong(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(key, f"{key}={value}: {rule}")])
