"""The completions of one rollout with their rewards and advantages, as rows of batches and as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints
from weft.config.sections import GrpoSection
from weft.data.text.tokenizer import Tokenizer
from weft.errors import StepRefused
from weft.files import replace_text
from weft.rl.objective import group_advantages, token_log_probs, token_weights
from weft.rl.prompt_data import PromptRecord, decoded
from weft.rl.rewards import RewardFunctions
from weft.rl.rollout import Sampled
from weft.train.folder import RunFolder
from weft.train.states.state_io import gather
from weft.train.tasks.decoder_loss import IGNORE
from weft.train.tasks.description import Forwards, Which


@dataclass
class Rollout:
    """All completions of the global batch, prompt after prompt.

    Attributes:
        samples: the completions.
        rewards: rewards of all completions by function; nan without one.
        advantages: advantage of each completion.
        weights: weight of each completion's tokens.
        values: log probabilities of trained tokens by name ("old", "reference") and completion, if they are stored.
    """

    samples: list[Sampled]
    rewards: dict[str, list[float]]
    advantages: list[float]
    weights: list[float]
    values: dict[str, list[list[float]]] = field(default_factory=dict)

    def rows(self, numbers: Sequence[int], pad_id: int, unit: int, longest: int) -> dict[str, Any]:
        """Return a batch of completions.

        input_ids, labels and positions are int64 (R, T); advantages, sampled (log probabilities), weights_of_tokens and
        counts are float64 (R, T). The sum of counts is the number of completions. width is T.

        Args:
            numbers: indices of the completions.
            pad_id: padding id.
            unit, longest: T is rounded up to a multiple of `unit`, but not beyond `longest`.
        """
        lengths = [len(self.samples[number].prompt_ids) + len(self.samples[number].ids) - 1 for number in numbers]
        width = max(*lengths, min(longest, -(-max(lengths) // unit) * unit))
        ids, labels = (torch.full((len(numbers), width), value) for value in (pad_id, IGNORE))
        advantages, sampled, weights, counts = torch.zeros(4, len(numbers), width, dtype=torch.float64)
        for row, number in enumerate(numbers):
            one = self.samples[number]
            whole = torch.tensor([*one.prompt_ids, *one.ids])
            span = slice(len(one.prompt_ids) - 1, len(whole) - 1)
            trained = torch.tensor(one.trained, dtype=torch.bool)
            ids[row, : len(whole) - 1] = whole[:-1]
            labels[row, span] = torch.tensor(one.ids).where(trained, IGNORE)
            sampled[row, span] = torch.tensor(one.log_probs, dtype=torch.float64)
            advantages[row], weights[row], counts[row, 0] = self.advantages[number], self.weights[number], 1.0
        return {
            "input_ids": ids, "labels": labels, "positions": torch.arange(width).repeat(len(numbers), 1),
            "advantages": advantages, "sampled": sampled, "weights_of_tokens": weights, "counts": counts,
            "width": width,
        }  # fmt: skip

    def stored(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the stored log probabilities of completions by name, float64 (R, T) in the shape of the batch."""
        trained = batch["labels"] != IGNORE
        found = {}
        for name, values in self.values.items():
            found[name] = torch.zeros(trained.shape, dtype=torch.float64)
            found[name][trained] = torch.tensor(
                [one for number in numbers for one in values[number]], dtype=torch.float64
            )
        return found


def score(
    forwards: Forwards, functions: RewardFunctions, tokenizer: Tokenizer, grpo: GrpoSection,
    prompts: Sequence[PromptRecord], samples: list[Sampled],
) -> Rollout:  # fmt: skip
    """Return completions with rewards, which the first rank computes, and advantages. All ranks call it.

    Raises:
        StepRefused: if a reward function fails, unless grpo.reward_errors=count.
    """

    def call() -> list[Any]:
        found = functions.call(arguments(tokenizer, grpo, prompts, samples))
        return [[[None if math.isnan(one) else one for one in each.values], each.error] for each in found]

    rewards = dict[str, list[float]]()
    for source, (values, error) in zip(grpo.reward, forwards.on_first(call) if grpo.reward else [], strict=True):
        rewards[source] = [math.nan if one is None else one for one in values]
        if error and grpo.reward_errors == "pause":
            raise StepRefused(
                f"grpo.reward={source}: {error}. Correct the function, or set grpo.reward_errors=count to train on the "
                "other completions."
            )
    advantages = [0.0] * len(samples)
    if grpo.method != "distill":
        weights = grpo.reward_weights or (1.0,) * len(rewards)
        total = torch.tensor(list(rewards.values()), dtype=torch.float64).T @ torch.tensor(weights, dtype=torch.float64)
        advantages = group_advantages(total.view(-1, grpo.completions), grpo.method).flatten().tolist()
    return Rollout(samples, rewards, advantages, token_weights([sum(one.trained) for one in samples], grpo))


def arguments(
    tokenizer: Tokenizer, grpo: GrpoSection, prompts: Sequence[PromptRecord], samples: Sequence[Sampled]
) -> dict[str, list[Any]]:
    """Return the arguments of reward functions: lists with one entry per completion, by name."""
    records = [prompt.record for prompt in prompts for _ in range(grpo.completions)]
    columns = dict.fromkeys(name for record in records for name in record)
    return {
        **{str(name): [record.get(name) for record in records] for name in columns},
        "prompts": [record[grpo.prompt] for record in records],
        "completions": [decoded(tokenizer, one.ids) for one in samples],
        "completion_ids": [list(one.ids) for one in samples],
    }


class TokenValues:
    """Log probabilities of the tokens of batches, by weights of choice.

    Args:
        forwards: runs the sharded model.
        temperature: divides logits.
    """

    def __init__(self, forwards: Forwards, temperature: float):
        self._forwards, self._temperature = forwards, temperature

    def compute(self, batches: Sequence[dict[str, Any]], of: Which) -> list[Tensor]:
        """Return the log probabilities of labels, float64 (R, T) per batch; 0 on pipeline stages without output."""

        def each(output: Any, local: Any) -> Tensor:
            values = token_log_probs(output, local["labels"], self._temperature).double()
            # Under cp, the values of this rank's tokens are added to zeros at the other ranks' tokens.
            whole = values.new_zeros(len(values), local["width"])
            return whole.scatter(1, local["positions"], values)

        found = self._forwards.rows(batches, each, of=of)
        return [
            one if one.ndim == 2 else one.new_zeros(batch["labels"].shape)
            for one, batch in zip(found, batches, strict=True)
        ]

    def gather(
        self, batches: Sequence[dict[str, Any]], numbers: Sequence[Sequence[int]], found: dict[str, list[Tensor]]
    ) -> dict[str, list[list[float]]]:
        """Return the values of all completions, from the values that each rank computed. All ranks call it.

        Args:
            batches: this rank's batches.
            numbers: number of each row in the global batch.
            found: results of `compute` by name.
        """
        mesh, own = self._forwards.mesh, []
        for index, batch in enumerate(batches):
            for row, number in enumerate(numbers[index]):
                trained = batch["labels"][row] != IGNORE
                own.append([number, {name: one[index].cpu()[row][trained].tolist() for name, one in found.items()}])
        told = json.dumps([[mesh.data.rank, mesh["pp"].rank], own]).encode()
        # The ranks of tp and cp have equal values. Of the stages of a pipeline, one has values, and the others zeros.
        records = {tuple(at): values for at, values in map(json.loads, gather(mesh, told))}
        sums: dict[str, dict[int, Tensor]] = {name: {} for name in found}
        for values in records.values():
            for number, one in dict(map(tuple, values)).items():
                for name in found:
                    more = torch.tensor(one[name], dtype=torch.float64)
                    sums[name][number] = more + sums[name].get(number, 0.0)
        return {name: [one[number].tolist() for number in sorted(one)] for name, one in sums.items()}


class RolloutFiles:
    """Stores rollouts that several steps use, so that a run can resume between these steps.

    Args:
        folder: the run's folder.
        updates: steps per rollout.
        forwards: for communication.
    """

    def __init__(self, folder: RunFolder, updates: int, forwards: Forwards):
        self._folder, self._updates, self._forwards = folder, updates, forwards

    def _path(self, step: int) -> Any:
        return self._folder.path / "rollouts" / f"step_{step:08d}.json"

    def write(self, step: int, rollout: Rollout) -> None:
        """Write the rollout of a step, and delete those from which no checkpoint resumes. All ranks call it."""

        def act() -> None:
            saved = [step_in_name(path.name) for path in list_checkpoints(self._folder.checkpoints)]
            needed = {self._path(one - one % self._updates) for one in saved if one is not None}
            path = self._path(step)
            path.parent.mkdir(exist_ok=True)
            replace_text(path, json.dumps(asdict(rollout)))
            for old in path.parent.glob("step_*.json"):
                if old != path and old not in needed:
                    old.unlink(missing_ok=True)

        self._forwards.on_first(act)

    def read(self, step: int) -> Rollout:
        """Return the rollout of a step. All ranks call it.

        Raises:
            StepRefused: if its file is missing or damaged.
        """

        def act() -> Any:
            try:
                return json.loads(self._path(step).read_text("utf-8"))
            except (OSError, ValueError):
                return None

        found = self._forwards.on_first(act)
        if found is None:
            raise StepRefused(
                f"{self._path(step)}: the completions of step {step + 1} are not there, and the run resumes between "
                f"the {self._updates} steps that use them. Bring the file back, or resume with resume.step from a "
                f"checkpoint of a multiple of {self._updates} steps."
            )
        found["samples"] = [Sampled.from_json(one) for one in found["samples"]]
        return Rollout(**found)
