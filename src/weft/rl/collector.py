"""Collection of rollouts during training: a step's prompts become completions with rewards and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.config.run_config import RunConfig
from weft.data.store.prepare import stop_ids
from weft.data.text.tokenizer import Tokenizer
from weft.generation.batch import Limits
from weft.generation.requests import Sampling
from weft.parallel.dropout.drop_state import marked_samples
from weft.rl.prompt_data import PromptBatches
from weft.rl.reports import reward_metrics, write_samples
from weft.rl.rewards import RewardFunctions
from weft.rl.rollout import AnySampler, Dialogues, EngineSampler, Sampler, sample_prompts
from weft.rl.scored import Rollout, RolloutFiles, TokenValues, score
from weft.rl.setting_rules import check_plan, user_function
from weft.train.batches.microbatches import mark
from weft.train.folder import RunFolder
from weft.train.tasks.description import Forwards, Which
from weft.units import parse_seconds

#: Row lengths are rounded up to a multiple of this, so that few different shapes occur.
_UNIT = 8
#: Rollouts in memory: a step that went wrong is computed again from the same completions.
_KEPT = 2


def new_sampler(config: RunConfig, tokenizer: Tokenizer, forwards: Forwards, num_rows: int) -> AnySampler:
    """Return the sampler of a config: the training ranks, or an engine.

    num_rows: rows of the model's head. A tokenizer may have fewer entries.
    """
    grpo = config.grpo
    sampling = Sampling(
        max_tokens=grpo.max_tokens, temperature=grpo.temperature, top_k=grpo.top_k or None, top_p=grpo.top_p,
        seed=config.seed, stop_ids=frozenset(stop_ids(tokenizer)),
    )  # fmt: skip
    limits = Limits(num_rows, config.train.seq_len + 1, rows=64)
    return EngineSampler(forwards, grpo, sampling, limits) if grpo.engine else Sampler(forwards, sampling, limits)


def new_dialogues(config: RunConfig, tokenizer: Tokenizer) -> Dialogues | None:
    """Return the runner of the config's rollout function, or None without one."""
    grpo = config.grpo
    if not grpo.rollout:
        return None
    limit_s, longest = parse_seconds(grpo.reward_timeout), config.train.seq_len + 1
    function = user_function("grpo.rollout", grpo.rollout)
    return Dialogues(grpo.rollout, function, tokenizer, limit_s, longest, grpo.max_tokens)


class RolloutCollector:
    """Samples, scores and stores the rollouts of a run, and makes the batches of its steps from them.

    Args:
        config: the run's config.
        folder: the run's folder.
        tokenizer: the model's tokenizer.
        prompts: the prompts of all ranks.
        sampler: samples completions.
        reference: weights that tokens are compared with, or None.
        forwards: runs the sharded model.

    Raises:
        ConfigError: under plans whose steps could not sample or report.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, tokenizer: Tokenizer, prompts: PromptBatches, sampler: AnySampler,
        reference: Which | None, forwards: Forwards,
    ):  # fmt: skip
        self._config, self._folder, self._tokenizer, self._prompts = config, folder, tokenizer, prompts
        self._sampler, self._forwards = sampler, forwards
        check_plan(forwards.plan)
        grpo = config.grpo
        self._dialogues = new_dialogues(config, tokenizer)
        self._rewards = RewardFunctions(grpo.reward if forwards.rank == 0 else (), parse_seconds(grpo.reward_timeout))
        self._files = RolloutFiles(folder, grpo.updates_per_rollout, forwards)
        self._rollouts: dict[int, Rollout] = {}
        self._values = TokenValues(forwards, grpo.temperature)
        #: Names of log probabilities that the loss reads, and the weights that they are of.
        self._wanted: dict[str, Which] = {"old": "model"} if grpo.updates_per_rollout > 1 else {}
        if reference is not None:
            self._wanted["reference"] = reference

    def completions(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's completions of a step, for its batches of `PromptBatches`. All ranks call it.

        The first step of a rollout samples them.

        Raises:
            StepRefused: if completions or rewards are missing.
        """
        step = int(batches[0]["step"])
        first = step - step % self._config.grpo.updates_per_rollout
        rollout = self._rollouts.get(first)
        if rollout is None:
            rollout = self._files.read(first) if first != step else None
            if rollout is None:
                with self._forwards.mesh.pulse.doing("samples completions"):
                    rollout = self._new_rollout(step)
            self._rollouts = {**dict(list(self._rollouts.items())[1 - _KEPT :]), first: rollout}
        numbers = [batch["numbers"].tolist() for batch in batches]
        # cp may divide a sequence into two chunks per rank.
        sizes = self._tokenizer.pad_id, math.lcm(_UNIT, 2 * self._forwards.plan.cp), self._config.train.seq_len
        made = [{**rollout.rows(own, *sizes), "index": index} for index, own in enumerate(numbers)]
        made = self._with_values(rollout, made, numbers, first)
        samples = [marked_samples(before) for before in batches]
        return [batch if own is None else mark(batch, own) for batch, own in zip(made, samples, strict=True)]

    def _new_rollout(self, step: int) -> Rollout:
        grpo, prompts = self._config.grpo, self._prompts.prompts(step)
        self._sampler.update()
        if self._dialogues is not None:
            found = self._dialogues.sample(self._forwards, self._sampler, prompts, grpo.completions, step)
        else:
            found = sample_prompts(self._sampler, prompts, grpo.completions, step)
        rollout = score(self._forwards, self._rewards, self._tokenizer, grpo, prompts, found)
        self._forwards.record(reward_metrics(step + 1, rollout, grpo))
        if self._forwards.rank == 0 and step % self._config.log.every == 0:
            write_samples(self._folder, self._tokenizer, step + 1, prompts, rollout)
        return rollout

    def _with_values(
        self, rollout: Rollout, made: list[dict[str, Any]], numbers: Sequence[Sequence[int]], first: int
    ) -> list[dict[str, Any]]:
        """Return the batches with log probabilities of the reference, and of the model at the time of sampling.

        With several steps per rollout, its first step computes and stores them.
        """
        if not rollout.values:
            found = {name: self._values.compute(made, of) for name, of in self._wanted.items()}
            if self._config.grpo.updates_per_rollout == 1:
                every = zip(*found.values(), strict=True) if found else [()] * len(made)
                return [{**one, **dict(zip(found, own, strict=True))} for one, own in zip(made, every, strict=True)]
            rollout.values = self._values.gather(made, numbers, found)
            self._files.write(first, rollout)
        return [{**one, **rollout.stored(own, one)} for one, own in zip(made, numbers, strict=True)]
