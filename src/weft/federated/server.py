"""Steps of the server: the combination of a round's updates, and the state that a run continues from.

With w the server's weights and delta_k = w - w_k for client k, in the order of the clients:

    fedavg, fedprox   d = weighted mean of delta_k
    median            d = median of delta_k, for each element
    trimmed_mean      d = mean of delta_k without the largest and smallest values, for each element
    private           d = (sum of min(1, clip / |delta_k|) delta_k + noise) / expected number of clients
    w = outer_step(w, d), the outer step of local SGD; fedadam has Adam's without bias correction instead

Sums are in float64 and in a fixed order, so the weights do not depend on the order in which updates arrive.

McMahan et al. 2017, arXiv 1602.05629; Yin et al. 2018, arXiv 1803.01498; Reddi et al. 2021, arXiv 2003.00295; McMahan
et al. 2018, arXiv 1710.06963.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.errors import CheckpointError
from weft.federated.config import FederatedConfig, ServerSettings
from weft.federated.updates import ClientUpdate, Tensors, problem_of, read_tensors, write_tensors
from weft.parallel.replicas.local_sgd import outer_step
from weft.privacy.ledger import PrivacyLedger
from weft.privacy.noise import noise_at

#: Elements of all clients that a median or trimmed mean sorts together.
_AT_ONCE = 2**22


@dataclass(slots=True)
class ServerState:
    """Weights and optimizer state after some rounds.

    Attributes:
        round: rounds done.
        weights: by name, on the CPU.
        moments: state of the outer optimizer by "momentum/NAME", "first/NAME" and "second/NAME".
        refused: updates that were refused so far.
        account: privacy account as JSON values, or None.
    """

    round: int
    weights: Tensors
    moments: Tensors = field(default_factory=Tensors)
    refused: int = 0
    account: dict[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Replace the state's file atomically."""
        tensors = {**{f"weights/{name}": one for name, one in self.weights.items()}, **self.moments}
        write_tensors(path, tensors, {"round": self.round, "refused": self.refused, "account": self.account})

    @classmethod
    def load(cls, path: Path) -> ServerState:
        """Read the state of a run. Raises CheckpointError if it is damaged."""
        tensors, about = read_tensors(path)
        weights = {name[8:]: one for name, one in tensors.items() if name.startswith("weights/")}
        moments = {name: one for name, one in tensors.items() if not name.startswith("weights/")}
        try:
            return cls(int(about["round"]), weights, moments, int(about["refused"]), about["account"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its header is damaged ({error!r}). Start a new run.") from error


@dataclass(slots=True)
class RoundResult:
    """Outcome of a round.

    Attributes:
        used: clients whose updates were used.
        refused: why each other update was refused.
        loss: mean of the clients' losses, weighted like their updates, or None without one.
        clipped: number of updates that were clipped.
    """

    used: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])
    loss: float | None = None
    clipped: int = 0


class _Kept(NamedTuple):
    client: int
    weight: float
    loss: float
    read: Callable[[], ClientUpdate]


class Server:
    """Combines the updates of rounds.

    Args:
        config: the federated run.
        state: initial weights, or the state of earlier rounds.
        buffers: names of the tensors that are averaged without an optimizer, such as running statistics.
        ledger: account of a private run, or None.
        key: secret key of a private run.
    """

    def __init__(
        self, config: FederatedConfig, state: ServerState, buffers: Sequence[str] = (),
        ledger: PrivacyLedger | None = None, key: bytes = b"",
    ):  # fmt: skip
        self.state, self.ledger = state, ledger
        self._settings, self._buffers, self._key = config.server, frozenset(buffers), key

    @torch.no_grad()
    def step(self, expected: Sequence[int], updates: Sequence[Callable[[], ClientUpdate]]) -> RoundResult:
        """Combine the updates of a round, and count it.

        Args:
            expected: the clients of the round.
            updates: functions that read the updates, which are called one by one, more than once.
        """
        result, kept = RoundResult(), list[_Kept]()
        for read in updates:
            update = read()
            why = problem_of(update, self.state.round, expected, result.used, self.state.weights)
            if why:
                result.refused.append(why)
                continue
            result.used.append(update.client)
            weight = float(update.samples) if self._settings.weights == "samples" else 1.0
            kept.append(_Kept(update.client, weight, update.loss, read))
        kept.sort(key=lambda one: one.client)
        total = sum(one.weight for one in kept)
        if kept:
            result.loss = sum(one.weight * one.loss for one in kept) / total
        result.used.sort()
        if kept or self.ledger is not None:  # a private round without clients adds noise, too
            self._apply(self._combined(kept, total, result))
        if self.ledger is not None:
            self.ledger.add()
            self.state.account = self.ledger.to_json()
        self.state.refused += len(result.refused)
        self.state.round += 1
        return result

    def _combined(self, kept: Sequence[_Kept], total: float, result: RoundResult) -> Tensors:
        method = self._settings.method
        if self.ledger is not None:
            return self._private_mean([one.read for one in kept], result)
        if method in ("median", "trimmed_mean"):
            deltas = [one.read().delta for one in kept]
            return {name: _robust([one[name] for one in deltas], self._settings) for name in self.state.weights}
        sums = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in self.state.weights.items()}
        for one in kept:
            for name, delta in one.read().delta.items():
                sums[name].add_(delta.double(), alpha=one.weight / total)
        return sums

    def _private_mean(self, reads: Sequence[Callable[[], ClientUpdate]], result: RoundResult) -> Tensors:
        assert self.ledger is not None
        privacy = self.ledger.privacy
        assert privacy.noise is not None
        sums = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in self.state.weights.items()}
        for read in reads:
            delta = {name: one.double() for name, one in read().delta.items()}
            norm = float(sum(float(delta[name].square().sum()) for name in sums)) ** 0.5
            factor = min(1.0, privacy.clip / norm) if norm > 0 else 1.0
            result.clipped += factor < 1
            for name, one in sums.items():
                one.add_(delta[name], alpha=factor)
        for name, one in sums.items():
            noise = noise_at(self._key, self.state.round, name, np.arange(one.numel()))
            one.view(-1).add_(torch.from_numpy(noise).double(), alpha=privacy.noise * privacy.clip)
            one.div_(privacy.batch)
        return sums

    def _apply(self, deltas: Tensors) -> None:
        settings, moments = self._settings, self.state.moments

        def moment(kind: str, name: str, like: torch.Tensor) -> torch.Tensor:
            return moments.setdefault(f"{kind}/{name}", torch.zeros(like.shape, dtype=torch.float64))

        for name, delta in deltas.items():
            weights = self.state.weights[name].double()
            if name in self._buffers:
                outer_step(weights, delta, None, lr=1.0, factor=0.0)
            elif settings.method == "fedadam":
                first, second = moment("first", name, delta), moment("second", name, delta)
                first.mul_(settings.beta1).add_(delta, alpha=1 - settings.beta1)
                second.mul_(settings.beta2).addcmul_(delta, delta, value=1 - settings.beta2)
                weights.addcdiv_(first, second.sqrt().add_(settings.tau), value=-settings.lr)
            elif settings.momentum:
                momentum = moment("momentum", name, delta)
                outer_step(weights, delta, momentum, lr=settings.lr, factor=settings.momentum)
            else:
                outer_step(weights, delta.mul_(settings.lr), None, lr=1.0, factor=0.0)
            self.state.weights[name] = weights.to(self.state.weights[name].dtype)


def _robust(deltas: Sequence[torch.Tensor], settings: ServerSettings) -> torch.Tensor:
    """Return the median or trimmed mean of each element over clients, float64."""
    count, shape = len(deltas), deltas[0].shape
    cut = (count - 1) // 2 if settings.method == "median" else int(settings.trim * count)
    flats, parts = [one.reshape(-1) for one in deltas], list[torch.Tensor]()
    numel, each = flats[0].numel(), max(1, _AT_ONCE // count)
    for start in range(0, numel, each):
        ordered = torch.stack([one[start : start + each].double() for one in flats]).sort(0).values
        parts.append(ordered[cut : count - cut].mean(0))
    return torch.cat(parts).view(shape) if parts else torch.zeros(shape, dtype=torch.float64)
