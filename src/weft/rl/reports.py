"""Metrics of rollouts and of the policy loss, and samples of completions in the run folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.config.metrics import series
from weft.config.sections import GrpoSection
from weft.data.text.tokenizer import Tokenizer
from weft.rl.objective import TokenLosses
from weft.rl.prompt_data import PromptRecord, decoded
from weft.rl.scored import Rollout
from weft.train.folder import RunFolder
from weft.train.states.state_io import gather
from weft.train.tasks.decoder_loss import IGNORE
from weft.train.tasks.description import Forwards

#: Prompts of a step whose completions are written, and completions of each.
_PROMPTS, _EACH = 4, 2


def reward_metrics(step: int, rollout: Rollout, grpo: GrpoSection) -> dict[str, object]:
    """Return the event with rewards and lengths of a step's completions."""
    found: dict[str, float] = {}
    for source in grpo.reward:
        name, known = source.rpartition(":")[2], [one for one in rollout.rewards[source] if not math.isnan(one)]
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


def write_samples(
    folder: RunFolder, tokenizer: Tokenizer, step: int, prompts: Sequence[PromptRecord], rollout: Rollout
) -> None:
    """Write some completions of some prompts with their rewards to samples/step_N.jsonl."""
    number, lines = len(rollout.samples) // len(prompts), list[str]()
    for at in [prompt * number + index for prompt in range(len(prompts))[:_PROMPTS] for index in range(number)[:_EACH]]:
        one = rollout.samples[at]
        values = {
            "prompt": decoded(tokenizer, one.prompt_ids, specials=True),
            "completion": decoded(tokenizer, one.ids, specials=True),
            "rewards": {name: None if math.isnan(each[at]) else each[at] for name, each in rollout.rewards.items()},
            "advantage": rollout.advantages[at],
            "tokens": sum(one.trained),
            "reason": one.reason,
        }
        lines.append(json.dumps(values, ensure_ascii=False))
    (folder.path / "samples").mkdir(exist_ok=True)
    (folder.path / "samples" / f"step_{step:08d}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
