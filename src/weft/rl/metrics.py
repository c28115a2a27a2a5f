"""Metrics of rollouts and of the policy loss, and samples of completions in the run folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.config.metrics import series
from weft.config.sections import GrpoSection
from weft.data.text.tokenizer import Tokenizer
from weft.rl.objective import TokenLosses
from weft.rl.prompts import Prompt, decoded
from weft.rl.scored import Rollout
from weft.train.folder import RunFolder
from weft.train.state_io import gather
from weft.train.tasks.decoder_loss import IGNORE
from weft.train.tasks.description import Forwards

#: Prompts of a step whose completions are written, and completions of each.
_PROMPTS, _EACH = 4, 2


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """Return the name of each function for metrics: without its file, unless two functions have the same name."""
    names = [source.rpartition(":")[2] for source in sources]
    return {source: name if names.count(name) == 1 else source for source, name in zip(sources, names, strict=True)}


def reward_metrics(step: int, rollout: Rollout, grpo: GrpoSection) -> dict[str, object]:
    """Return the event with rewards and lengths of a step's completions."""
    found: dict[str, float] = {}
    for source, name in short_names(grpo.reward).items():
        known = [one for one in rollout.rewards[source] if not math.isnan(one)]
        if known:
            found[series("rl.reward", name)] = statistics.fmean(known)
            found[series("rl.reward_std", name)] = statistics.pstdev(known)
    lengths = [sum(one.trained) for one in rollout.samples]
    missing = sum(any(map(math.isnan, each)) for each in zip(*rollout.rewards.values(), strict=True))
    found |= {
        "rl.length": statistics.fmean(lengths),
        "rl.length_max": max(lengths),
        "rl.truncated": statistics.fmean(one.reason == "length" for one in rollout.samples),
        "rl.reward_errors": missing,
    }
    return {"event": "figures", "step": step, "figures": found}


class StepSums:
    """Sums over the tokens of a step, from its loss. A microbatch counts once, even if its loss is computed again."""

    def __init__(self) -> None:
        self._step = 0
        self._sums: dict[int, Tensor] = {}

    def begin(self, step: int) -> None:
        """Begin a step, unless it has begun."""
        if step != self._step:
            self._step, self._sums = step, {}

    def add(self, index: int, labels: Tensor, found: TokenLosses) -> None:
        """Add the tokens of a microbatch: count, and sums of mismatch, clipped tokens, KL divergence and -log p."""
        if index in self._sums or not self._step:
            return
        parts = [
            found.mismatch.sum(),
            found.clipped.sum(),
            found.kl.sum(),
            -found.log_probs.sum(),
            found.mismatch.max(),
        ]
        self._sums[index] = torch.stack([(labels != IGNORE).sum(), *parts]).double()

    def event(self, step: int, forwards: Forwards) -> dict[str, object] | None:
        """Return the event with the metrics of a step over all ranks. All ranks call it."""
        mesh, own = forwards.mesh, None
        if self._sums:
            every = torch.stack(list(self._sums.values()))
            own = [*every[:, :-1].sum(0).tolist(), float(every[:, -1].max())]
        told = json.dumps([[mesh.data.rank, mesh["cp"].rank], own]).encode()
        # The ranks of tp have the same tokens, and only the last stage of a pipeline has any.
        parts = {tuple(at): values for at, values in map(json.loads, gather(mesh, told)) if values is not None}
        count, mismatch, clipped, kl, negative = (math.fsum(one[at] for one in parts.values()) for at in range(5))
        if not count:
            return None
        found = {
            "rl.mismatch": mismatch / count,
            "rl.mismatch_max": max(one[5] for one in parts.values()),
            "rl.clipped": clipped / count,
            "rl.kl": kl / count,
            "rl.entropy": negative / count,
        }
        return {"event": "figures", "step": step, "figures": found}


class SampleWriter:
    """Writes completions with their rewards to samples/step_N.jsonl."""

    def __init__(self, folder: RunFolder, tokenizer: Tokenizer):
        self._folder, self._tokenizer = folder.path / "samples", tokenizer

    def write(self, step: int, prompts: Sequence[Prompt], rollout: Rollout, number: int) -> None:
        """Write some completions of some prompts. number: completions of each prompt."""
        self._folder.mkdir(exist_ok=True)
        places = [
            prompt * number + index for prompt in range(min(_PROMPTS, len(prompts))) for index in range(number)[:_EACH]
        ]
        lines = [json.dumps(self._line(rollout, place), ensure_ascii=False) for place in places]
        (self._folder / f"step_{step:08d}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")

    def _line(self, rollout: Rollout, place: int) -> Mapping[str, Any]:
        one = rollout.samples[place]
        rewards = {
            name: None if math.isnan(values[place]) else values[place] for name, values in rollout.rewards.items()
        }
        return {
            "prompt": decoded(self._tokenizer, one.prompt_ids, specials=True),
            "completion": decoded(self._tokenizer, one.ids, specials=True),
            "rewards": rewards,
            "advantage": rollout.advantages[place],
            "tokens": sum(one.trained),
            "reason": one.reason,
        }
