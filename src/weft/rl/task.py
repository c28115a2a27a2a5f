"""Learning from rewards: `task.name = "grpo"`. A sample is a completion that the model samples before a step.

All values that depend on the full batch (rewards, advantages, weights of tokens) are computed before a step from the
completions of all ranks, so the loss is the same under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft.config.rules.rule import Facts
from weft.config.sections import GrpoSection
from weft.config.shapes.traced_model import Limit
from weft.data.store.prepare import cache_folder, stop_ids
from weft.data.store.prepared import PreparedData, ready_tokenizer
from weft.data.table_data import Rows, SplitTables, TableReader, TableRecord
from weft.errors import ConfigError, DataError, Problem
from weft.generation.batch import Limits
from weft.generation.requests import Sampling
from weft.hub import local_folder
from weft.lazy import named_object
from weft.models.inspect import hugging_face
from weft.parallel.dropout.drop_state import marked_samples
from weft.parallel.layers.documents import call_in_documents
from weft.planner.space.trained_part import FrozenWork
from weft.rl.metrics import StepSums, reward_metrics, write_samples
from weft.rl.objective import policy_losses, token_log_probs
from weft.rl.prompts import PromptBatches, decoded, prompt_rows
from weft.rl.rewards import RewardFunctions
from weft.rl.rollout import Dialogues, EngineSampler, Sampler, sample_prompts
from weft.rl.scored import Rollout, RolloutFiles, TokenValues, score
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import mark
from weft.train.folder import RunFolder, free_name
from weft.train.tasks.base import Report, setting_error
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.description import Forwards, Which, describe_folder
from weft.train.tasks.distill import Teacher
from weft.units import format_count, parse_seconds

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel

_ROWS = "prompts.json"
#: Settings that a resumed run cannot change.
_FIXED = tuple(f"grpo.{name}" for name in GrpoSection.model_fields if name not in ("reward_timeout", "reward_errors"))
#: Row lengths are rounded up to a multiple of this, so that few different shapes occur.
_UNIT = 8
#: Rollouts in memory: a step that went wrong is computed again from the same completions.
_KEPT = 2


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

    _tables: SplitTables | None = None
    _forwards: Forwards | None = None

    @property
    def settings(self) -> GrpoSection:
        """The config's [grpo] section."""
        return self.config.grpo

    # --- models ---

    @cached_property
    def _teacher(self) -> Teacher | None:
        folder = self.settings.teacher
        return Teacher(local_folder(folder, "grpo.teacher")) if folder else None

    @property
    def _reference(self) -> Which | None:
        """Weights that tokens are compared with: "base" without the adapter, "second", or None."""
        if self.settings.method == "distill":
            return "second"
        if not self.settings.beta:
            return None
        adapter = self.config.adapter
        return "base" if adapter.rank and not adapter.modules_to_save else "second"

    @property
    def rereads_weights(self) -> bool:
        return self._reference == "second" and self._teacher is None

    def second_model(self, plan: Plan) -> nn.Module | None:
        if self._reference != "second":
            return None
        return self.initial_model(plan) if self._teacher is None else self._teacher.shapes()

    def second_weights(self, model: nn.Module) -> StateSource | None:
        return self.initial_weights(model) if self._teacher is None else self._teacher.source(model)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if self._teacher is not None and not self.config.model.path and hugging_face.is_hugging_face(model):
            return call_in_documents(model, batch).logits
        return self.network.forward(model, batch)

    # --- preparing ---

    @property
    def plan_limits(self) -> Mapping[str, Limit]:  # pyright: ignore[reportIncompatibleVariableOverride] read only
        """Plan fields that the task limits."""
        why = "a teacher of another shape would need a pipeline of its own"
        return {} if self._teacher is None else {"pp": Limit((1,), why)}

    def facts(self, world_size: int) -> Facts:
        self._check_settings()
        return super().facts(world_size)

    def _check_settings(self) -> None:
        """Raise ConfigError for settings that do not fit together."""
        grpo, train = self.settings, self.config.train
        rules: list[tuple[bool, str, object, str]] = [
            (train.global_batch % grpo.completions > 0, "train.global_batch", train.global_batch,
             f"it counts completions, {grpo.completions} of each prompt. Use a multiple of {grpo.completions}."),
            (grpo.completions < 2 and grpo.method != "distill", "grpo.completions", grpo.completions,
             f"{grpo.method} compares the completions of a prompt. Use 2 or more."),
            (not grpo.reward and grpo.method != "distill", "grpo.reward", '""',
             f"{grpo.method} learns from rewards. Give a function, such as rewards.py:correct."),
            (bool(grpo.reward_weights) and len(grpo.reward_weights) != len(grpo.reward), "grpo.reward_weights",
             list(grpo.reward_weights), f"there are {len(grpo.reward)} reward functions. Give one weight for each."),
            (len({one.rpartition(":")[2] for one in grpo.reward}) < len(grpo.reward), "grpo.reward", list(grpo.reward),
             "two functions have the same name, and metrics could not tell them apart. Rename one."),
            ((grpo.method == "distill") != bool(grpo.teacher), "grpo.teacher", grpo.teacher or '""',
             "method=distill needs a teacher, and other methods use none. Set both, or neither."),
            (grpo.method == "distill" and grpo.beta > 0, "grpo.beta", grpo.beta,
             "distill already follows its teacher. Leave it out."),
            (bool(grpo.engine) != bool(grpo.engine_folder), "grpo.engine_folder", grpo.engine_folder or '""',
             "an engine reads its weights from a folder, and without one none is written. Set both, or neither."),
            (bool(grpo.engine and grpo.top_k), "grpo.top_k", grpo.top_k,
             "an engine's log probabilities are of the tokens that are left, and the loss's of all. Leave it out."),
            (bool(grpo.engine) and grpo.top_p < 1, "grpo.top_p", grpo.top_p,
             "an engine's log probabilities are of the tokens that are left, and the loss's of all. Leave it out."),
            (grpo.method == "distill" and grpo.ratio == "sequence", "grpo.ratio", grpo.ratio,
             "the tokens of a completion have different advantages under method=distill. Use ratio=token."),
            (bool(grpo.engine) and not self.config.model.path, "grpo.engine", grpo.engine,
             "engines serve Hugging Face models, and this is a decoder of Weft. Leave it out, or use model.path."),
            (grpo.max_tokens > train.seq_len, "grpo.max_tokens", grpo.max_tokens,
             f"with its prompt, a completion has at most train.seq_len + 1 tokens. Use at most {train.seq_len}."),
            (bool(self.config.data.eval), "data.eval", "(files)", "grpo does not evaluate. Leave it out."),
            (self.config.data.stream, "data.stream", "true", "all prompts are read first. Leave it out."),
            (self.config.data.packing is not None, "data.packing", self.config.data.packing,
             "completions are not packed: a row has one. Leave it out."),
            (self.config.tokenizer.kind == "bpe" and not self.config.model.path, "tokenizer.kind", "bpe",
             "prompts are too few to train a tokenizer. Use file or bytes, or model.path."),
        ]  # fmt: skip
        problems = [Problem.of(key, value, rule) for is_wrong, key, value, rule in rules if is_wrong]
        if problems:
            raise ConfigError(problems)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the weights, read the prompts, and check that the reward functions exist.

        Raises:
            CheckpointError, ModelError: if weights cannot be read, or do not fit their config.
            ConfigError: if settings do not fit together, or a function cannot be imported.
            DataError: if a prompt is missing or too long, or the prompts differ from those that the folder's run was
                started with.
        """
        for source in (*self.settings.reward, *filter(None, [self.settings.rollout])):
            key = "grpo.rollout" if source == self.settings.rollout else "grpo.reward"
            _function(key, source)
        self.network.prepare(folder, packs=False)
        self.text.prepared = tokenizer = self.tokens(report)
        self.network.check_vocabulary(tokenizer.vocab_size)
        if self._teacher is not None:
            self._teacher.check(self.config.train.seq_len)
            self._teacher.check_tokenizer(tokenizer.tokenizer)
        if (folder.path / _ROWS).is_file() and SplitTables.from_json(folder.text(_ROWS)).digests != self.tables.digests:
            raise DataError(
                f"data: the prompts are not those that the run in {str(folder.path)!r} was started with. Use "
                f"{free_name(folder)} for a new run, or bring the old data back to resume."
            )

    def tokens(self, report: Report | None) -> PreparedData:
        """Fill the caches of this machine, and return data without documents, which has only the tokenizer."""
        tokenizer = self._prepared_tokenizer(report)
        self._tables = self._read_tables(tokenizer, report)
        return tokenizer

    def _prepared_tokenizer(self, report: Report | None) -> PreparedData:
        config = self.text.with_tokenizer(self.network.tokenizer_folder, self.network.new_tokens)
        cache = cache_folder(config.data)
        cache.mkdir(parents=True, exist_ok=True)
        place, tokenizer = ready_tokenizer(cache, config, [], report)
        return PreparedData((), (), place, tokenizer.vocab_size, [])

    def _read_tables(self, tokenizer: PreparedData, report: Report | None) -> SplitTables:
        column, longest = self.settings.prompt, self.config.train.seq_len + 1 - self.settings.max_tokens
        key = ["grpo", column, longest, str(tokenizer.tokenizer.vocabulary.digest)]

        def rows(records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
            return prompt_rows(records, tokenizer.tokenizer, column, longest)

        data = self.config.data.model_copy(update={"holdout": 0.0})
        tables = TableReader(data, key, rows, lambda records: {}, report).tables()
        return replace(tables, summary=tuple(line for line in tables.summary if not line.startswith("evaluation")))

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        tables = replace(self.tables, summary=(*self.tables.summary, *notes))
        return {**super().keep(folder, notes), _ROWS: tables.to_json()}

    def open(self, folder: RunFolder) -> None:
        super().open(folder)
        self._tables = SplitTables.from_json(folder.text(_ROWS))

    # --- batches ---

    @property
    def tables(self) -> SplitTables:
        """The prompts, after `prepare` or `open`."""
        assert self._tables is not None
        return self._tables

    def samples_per_epoch(self) -> int:
        return self.batches(Share(self.config.train.global_batch)).samples_per_epoch

    def batches(self, share: Share) -> PromptBatches:
        return PromptBatches(self.tables.train, self.config.seed, share, self.settings)

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
        grpo, tokenizer, plan = self.settings, self.data.tokenizer, forwards.plan
        for field, usual in (("sync", "step"), ("graphs", False)):
            if (value := getattr(plan, field)) != usual:
                raise setting_error(f"plan.{field}", value, "task=grpo does not support it. Leave it out.")
        self._forwards, self.loss.along_sequence = forwards, forwards.along_sequence
        sampling = Sampling(
            max_tokens=grpo.max_tokens, temperature=grpo.temperature, top_k=grpo.top_k or None, top_p=grpo.top_p,
            seed=self.config.seed, stop_ids=frozenset(stop_ids(tokenizer)),
        )  # fmt: skip
        limit_s, longest = parse_seconds(grpo.reward_timeout), self.config.train.seq_len + 1
        # All rows of the head, as in the loss: a tokenizer may have fewer entries.
        shapes: Any = self.shapes()
        limits = Limits(shapes.get_output_embeddings().weight.shape[0], longest, rows=64)
        self._sampler = (
            EngineSampler(forwards, grpo, sampling, limits) if grpo.engine else Sampler(forwards, sampling, limits)
        )
        function = _function("grpo.rollout", grpo.rollout) if grpo.rollout else None
        self._dialogues = Dialogues(grpo.rollout or "", function, tokenizer, limit_s, longest, grpo.max_tokens)
        self._rewards = RewardFunctions(grpo.reward if forwards.rank == 0 else (), limit_s)
        assert self.text.folder is not None
        self._files = RolloutFiles(self.text.folder, grpo.updates_per_rollout, forwards)
        self._rollouts: dict[int, Rollout] = {}
        self._values = TokenValues(forwards, grpo.temperature)

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's completions of a step. The first step of a rollout samples them.

        Raises:
            StepRefused: if completions or rewards are missing.
        """
        assert self._forwards is not None
        step = int(batches[0]["step"])
        first = step - step % self.settings.updates_per_rollout
        rollout = self._rollouts.get(first)
        if rollout is None:
            rollout = self._files.read(first) if first != step else None
            if rollout is None:
                with self._forwards.mesh.pulse.doing("samples completions"):
                    rollout = self._new_rollout(step)
            self._rollouts = {**dict(list(self._rollouts.items())[1 - _KEPT :]), first: rollout}
        numbers = [batch["numbers"].tolist() for batch in batches]
        # cp may divide a sequence into two chunks per rank.
        sizes = self.data.tokenizer.pad_id, math.lcm(_UNIT, 2 * self._forwards.plan.cp), self.config.train.seq_len
        made = [{**rollout.rows(own, *sizes), "index": index} for index, own in enumerate(numbers)]
        made = self._with_values(rollout, made, numbers, first)
        self.loss.sums.begin(step + 1)
        samples = [marked_samples(before) for before in batches]
        return [batch if own is None else mark(batch, own) for batch, own in zip(made, samples, strict=True)]

    def _new_rollout(self, step: int) -> Rollout:
        assert self._forwards is not None
        grpo, prompts = self.settings, self.batches(Share(self.config.train.global_batch)).prompts(step)
        self._sampler.update()
        if grpo.rollout:
            found = self._dialogues.sample(self._forwards, self._sampler, prompts, grpo.completions, step)
        else:
            found = sample_prompts(self._sampler, prompts, grpo.completions, step)
        rollout = score(self._forwards, self._rewards, self.data.tokenizer, grpo, prompts, found)
        self._forwards.record(reward_metrics(step + 1, rollout, grpo))
        if self._forwards.rank == 0 and step % self.config.log.every == 0:
            assert self.text.folder is not None
            write_samples(self.text.folder, self.data.tokenizer, step + 1, prompts, rollout)
        return rollout

    def _with_values(
        self, rollout: Rollout, made: list[dict[str, Any]], numbers: Sequence[Sequence[int]], first: int
    ) -> list[dict[str, Any]]:
        """Return the batches with log probabilities of the reference, and of the model at the time of sampling.

        With several steps per rollout, its first step computes and stores them.
        """
        several = self.settings.updates_per_rollout > 1
        wanted: dict[str, Which] = {"old": "model"} if several else {}
        if self._reference is not None:
            wanted["reference"] = self._reference
        if not rollout.values:
            found = {name: self._values.compute(made, of) for name, of in wanted.items()}
            if not several:
                every = zip(*found.values(), strict=True) if found else [()] * len(made)
                return [{**one, **dict(zip(found, own, strict=True))} for one, own in zip(made, every, strict=True)]
            rollout.values = self._values.gather(made, numbers, found)
            self._files.write(first, rollout)
        return [{**one, **rollout.stored(own, one)} for one, own in zip(made, numbers, strict=True)]

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
        found, grpo, reference = super().describe(), self.settings, self._reference
        own = (1 if reference == "base" else 0) + (1 if grpo.updates_per_rollout > 1 else 0)
        frozen = FrozenWork(own=own) if own else None
        if reference == "second":
            shape = found.shape
            if (teacher := self._teacher) is not None:
                shape = describe_folder(teacher.folder, lambda _: teacher.shapes()).shape
            frozen = FrozenWork(own=own, shape=shape, other=1)
        return replace(found, sample_unit=self.sample_unit, frozen=frozen)

    def data_lines(self) -> Sequence[str]:
        return self.tables.summary

    def batch_line(self) -> str:
        train, grpo = self.config.train, self.settings
        prompts = train.global_batch // grpo.completions
        return (
            f"{prompts} prompts x {grpo.completions} completions of at most {grpo.max_tokens} tokens a step; "
            f"{grpo.method}; {train.steps} steps, {format_count(train.global_batch * train.steps)} {self.unit}"
        )

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the prompt at a position in training order."""
        batch = self.config.train.global_batch
        number = place % batch // self.settings.completions
        prompt = self.batches(Share(batch)).prompts(place // batch)[number]
        text = decoded(self.data.tokenizer, prompt.ids, specials=True)
        return [f"prompt of {len(prompt.ids)} tokens", *text.split("\n")]

    def sample(self, folder: RunFolder, step: int, forwards: Forwards) -> str:
        """Return "", because `samples/` has completions of all steps."""
        return ""

    def try_line(self, folder: RunFolder) -> str:
        return f"weft generate {folder.path} --prompt TEXT"


def _function(key: str, source: str) -> Callable[..., Any]:
    """Return a user's function. Raise ConfigError if it cannot be imported or called."""
    try:
        found = named_object(source)
    except Exception as error:  # user code may raise anything
        why = f"{type(error).__name__}: {error}"
        raise setting_error(key, source, f"it cannot be imported ({why}). Give a function as file.py:name.") from error
    if not callable(found):
        raise setting_error(key, source, f"it is a {type(found).__name__}. Give a function.")
    return found
