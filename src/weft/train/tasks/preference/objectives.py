"""Objectives of preference training, as losses of pairs and answers.

Written with c and r for log p(chosen) and log p(rejected) given the prompt, summed over the answer, a prime for
those of the reference, n for numbers of tokens, s for the logistic function, b for beta.

    dpo     -log s(b ((c - c') - (r - r')))                       Rafailov et al. 2023, arXiv 2305.18290, eq. 7
            smoothing e: (1 - e) of that, and e of it with the sign turned      Mitchell 2023 (conservative DPO)
    ipo     ((c - c') / n_c - (r - r') / n_r - 1 / (2 b))^2       Azar et al. 2023, arXiv 2310.12036, eq. 17, on means
    kto     w (1 - s(b (c - c' - z)))        of a wanted answer   Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8
            u (1 - s(b (z - (r - r'))))      of another one; z = max(0, mean over the global batch of log p - log p' of
            answers behind prompts that they are not of), without a gradient
    orpo    -c / n_c - b log s(odds(c / n_c) - odds(r / n_r)),    Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7
            where odds(x) = x - log(1 - exp x)
    simpo   -log s(b (c / n_c - r / n_r) - margin)                Meng et al. 2024, arXiv 2405.14734, eq. 6

A pair counts once, whatever its length, and the mean is over all pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

#: By objective, the beta that its paper or its users take where none is given.
DEFAULT_BETAS = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
#: Objectives that compare with a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")


@dataclass(frozen=True, slots=True)
class Weighing:
    """Numbers of an objective: see the head of this file. wanted, unwanted: w and u of kto."""

    beta: float = 0.1
    smoothing: float = 0.0
    margin: float = 1.0
    wanted: float = 1.0
    unwanted: float = 1.0


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one answer of each pair: its log-probability, that by the reference, and its number of tokens, (P,) each."""

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def gain(self) -> Tensor:
        """How much more likely the answer is than by the reference."""
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """Its log-probability for each token."""
        return self.policy / self.tokens


def _dpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    logits = weighing.beta * (chosen.gain - rejected.gain)
    return -(1 - weighing.smoothing) * F.logsigmoid(logits) - weighing.smoothing * F.logsigmoid(-logits)


def _ipo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    return (chosen.gain / chosen.tokens - rejected.gain / rejected.tokens - 0.5 / weighing.beta).square()


def _orpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    ratio = _log_odds(chosen.mean) - _log_odds(rejected.mean)
    return -chosen.mean - weighing.beta * F.logsigmoid(ratio)


def _simpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    return -F.logsigmoid(weighing.beta * (chosen.mean - rejected.mean) - weighing.margin)


#: (chosen, rejected, numbers) to the loss of each pair, (P,).
PAIR_LOSSES: dict[str, Callable[[Answers, Answers, Weighing], Tensor]] = {
    "dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo,
}  # fmt: skip


def kto_losses(answers: Answers, is_wanted: Tensor, z: Tensor, weighing: Weighing) -> Tensor:
    """Return the loss of each answer, (P,).

    Args:
        answers: one for each prompt.
        is_wanted: bool, (P,).
        z: of the global batch, 0-d.
        weighing: beta, and the weights of wanted and other answers.
    """
    logits = weighing.beta * (answers.gain - z)
    wanted = weighing.wanted * (1 - torch.sigmoid(logits))
    return wanted.where(is_wanted, weighing.unwanted * (1 - torch.sigmoid(-logits)))


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)). Of a p that rounds to 1 the odds are those of the largest number below it."""
    largest = -torch.finfo(log_p.dtype).eps
    log_p = log_p.clamp(max=largest)
    return log_p - torch.log(-torch.expm1(log_p))
