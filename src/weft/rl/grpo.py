"""Learning from rewards: `task.name = "grpo"`. A sample is a completion that the model samples before a step.

All values that depend on the full batch (rewards, advantages, weights of tokens) are computed before a step from the
completions of all ranks, so the loss is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft.config.rules.rule import Facts
from weft.config.sections import GrpoSection
from weft.config.shapes.traced_model import Limit
from weft.data.store.prepared import PreparedData
from weft.rl.collector import RolloutCollector, new_sampler
from weft.rl.objective import policy_losses, token_log_probs
from weft.rl.prompt_data import PromptBatches, PromptData, tokenizer_only
from weft.rl.reference_model import ReferenceModel
from weft.rl.reports import StepSums
from weft.rl.setting_rules import check_functions, check_settings
from weft.train.batches.data_share import Share
from weft.train.folder import RunFolder
from weft.train.tasks.base import Report
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.description import Forwards

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel

#: Settings that a resumed run cannot change.
_FIXED = tuple(f"grpo.{name}" for name in GrpoSection.model_fields if name not in ("reward_timeout", "reward_errors"))


class PolicyLoss:
    """The loss function of a step, with the formulas of `weft.rl.objective`.

    Attributes:
        takes_head_loss: "tokens" if the head may compute log probabilities, which it does at temperature 1.
        along_sequence: sums values over the ranks that have parts of a sequence.
    """

    def __init__(self, settings: GrpoSection):
        self._settings, self.sums = settings, StepSums()
        self.along_sequence: Callable[[Tensor], Tensor] = lambda values: values
        self.takes_head_loss = "tokens" if settings.temperature == 1 else False

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses of this rank's tokens, and its number of completions."""
        own = token_log_probs(output, batch["labels"], self._settings.temperature)
        found = policy_losses(own, batch, self._settings, self.along_sequence)
        self.sums.add(batch["index"], batch["labels"], found)
        return (found.losses * batch["weights_of_tokens"].to(found.losses)).sum(), batch["counts"].sum()


class GrpoTask(DecoderTask):
    """Trains a text decoder on its own completions, by their rewards or by a teacher. [grpo] has the settings."""

    unit = sample_unit = "completions"
    metrics = ()
    sum_names = ()
    has_documents = has_loss_level = False
    sections = (*DecoderTask.sections, "grpo")
    identity = (*DecoderTask.identity, *_FIXED)

    _forwards: Forwards | None = None

    @property
    def settings(self) -> GrpoSection:
        """The config's [grpo] section."""
        return self.config.grpo

    @cached_property
    def reference(self) -> ReferenceModel:
        """The weights that tokens are compared with."""
        return ReferenceModel(self.config)

    @cached_property
    def prompts(self) -> PromptData:
        """The prompts that the config describes."""
        return PromptData(self.config)

    # --- models ---

    @property
    def rereads_weights(self) -> bool:
        return self.reference.is_initial

    def second_model(self, plan: Plan) -> nn.Module | None:
        if self.reference.which != "second":
            return None
        teacher = self.reference.teacher
        return self.initial_model(plan) if teacher is None else teacher.shapes()

    def second_weights(self, model: nn.Module) -> StateSource | None:
        teacher = self.reference.teacher
        return self.initial_weights(model) if teacher is None else teacher.source(model)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if self.reference.is_teacher(model):
            return self.reference.teacher_logits(model, batch)
        return self.network.forward(model, batch)

    # --- preparing ---

    @property
    def plan_limits(self) -> Mapping[str, Limit]:  # pyright: ignore[reportIncompatibleVariableOverride] read only
        """Plan fields that the task limits."""
        return self.reference.plan_limits

    def facts(self, world_size: int) -> Facts:
        check_settings(self.config)
        return super().facts(world_size)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the weights, read the prompts, and check that the reward functions exist.

        Raises:
            CheckpointError, ModelError: if weights cannot be read, or do not fit their config.
            ConfigError: if settings do not fit together, or a function cannot be imported.
            DataError: if a prompt is missing or too long, or the prompts differ from those that the folder's run was
                started with.
        """
        check_functions(self.settings)
        self.network.prepare(folder, packs=False)
        self.text.prepared = data = self.tokens(report)
        self.network.check_vocabulary(data.vocab_size)
        if (teacher := self.reference.teacher) is not None:
            teacher.check(self.config.train.seq_len)
            teacher.check_tokenizer(data.tokenizer)
        self.prompts.refuse_other(folder)

    def tokens(self, report: Report | None) -> PreparedData:
        """Fill the caches of this machine, and return data without documents, which has only the tokenizer."""
        data = tokenizer_only(self.text.with_tokenizer(self.network.tokenizer_folder, self.network.new_tokens), report)
        self.prompts.read(data.tokenizer, report)
        return data

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return {**super().keep(folder, notes), **self.prompts.kept(notes)}

    def open(self, folder: RunFolder) -> None:
        super().open(folder)
        self.prompts.open(folder)

    # --- batches ---

    def samples_per_epoch(self) -> int:
        return self.prompts.all_batches().samples_per_epoch

    def batches(self, share: Share) -> PromptBatches:
        return self.prompts.batches(share)

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        return None

    def nominal_count(self) -> int:
        return self.config.train.global_batch

    # --- before and after a step ---

    def begin(self, forwards: Forwards) -> None:
        """Keep `forwards`, and make the sampler and the reward functions.

        Raises:
            ConfigError: under plans whose steps could not sample or report.
        """
        self._forwards, self.loss.along_sequence = forwards, forwards.along_sequence
        shapes: Any = self.shapes()
        num_rows = shapes.get_output_embeddings().weight.shape[0]  # all rows, as in the loss
        sampler = new_sampler(self.config, self.data.tokenizer, forwards, num_rows)
        assert self.text.folder is not None
        self._rollouts = RolloutCollector(
            self.config, self.text.folder, self.data.tokenizer, self.prompts.all_batches(), sampler,
            self.reference.which, forwards,
        )  # fmt: skip

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's completions of a step. The first step of a rollout samples them.

        Raises:
            StepRefused: if completions or rewards are missing.
        """
        found = self._rollouts.completions(batches)
        self.loss.sums.begin(int(batches[0]["step"]) + 1)
        return found

    def after_step(self, step: int) -> None:
        assert self._forwards is not None
        if (event := self.loss.sums.event(step, self._forwards)) is not None:
            self._forwards.record(event)

    # --- loss ---

    @cached_property
    def loss(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] an object with an attribute is a function
        """The loss function."""
        return PolicyLoss(self.settings)

    def flops_per_count(self) -> float | None:
        """Return None: the lengths of completions vary."""
        return None

    # --- for the planner and users ---

    def describe(self) -> PlannedModel:
        """Describe the model for the planner, with the forwards of the reference and of the stored log probabilities.

        Sampling is not included.
        """
        found = super().describe()
        return replace(found, sample_unit=self.sample_unit, frozen=self.reference.frozen_work(found))

    def data_lines(self) -> Sequence[str]:
        return self.prompts.tables.summary

    def batch_line(self) -> str:
        return self.prompts.batch_line()

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the prompt at a position in training order."""
        return self.prompts.sample_lines(place, self.data.tokenizer)

    def sample(self, folder: RunFolder, step: int, forwards: Forwards) -> str:
        """Return "", because `samples/` has completions of all steps."""
        return ""

    def try_line(self, folder: RunFolder) -> str:
        return f"weft generate {folder.path} --prompt TEXT"
