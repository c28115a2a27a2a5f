"""Clients of a federated run: their records, and the clients of a round. Pure functions of the seed.

Whether a client is sampled, drops out or is late depends on (seed, round, client) alone, so a run that continues, and a
run with another number of workers, trains the same clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import ConfigError, DataError
from weft.federated.config import FederatedConfig
from weft.privacy.draws import drawn
from weft.train.batches.data_share import MapDataset
from weft.train.engine import derive_seed
from weft.train.privacy.units import Units, numbered_values

_SAMPLED, _DROPPED, _LATE, _FEWER = range(4)


def split_records(config: FederatedConfig, samples: MapDataset) -> list[np.ndarray]:
    """Return the records of each client, int64, ascending. Each record belongs to one client.

    Raises:
        DataError: if there are fewer records than clients, or a record has no label or column.
    """
    total = len(samples)
    if config.split == "column":
        return list(Units.of(numbered_values(samples, config.column)))
    if total < config.clients:
        raise DataError(f"clients={config.clients}: there are {total} records. Use at most that number of clients.")
    random = np.random.Generator(np.random.Philox(derive_seed(config.seed, total, config.clients)))
    if config.split == "equal":
        return [np.sort(part) for part in np.array_split(random.permutation(total), config.clients)]
    return _dirichlet(numbered_values(samples, "label"), config.clients, config.alpha, random)


def _dirichlet(labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator) -> list[np.ndarray]:
    """Divide the records of each label by shares from a Dirichlet distribution. A client has at least one record."""
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(random.dirichlet(np.full(clients, alpha))) * len(own)).astype(np.int64)
        for part, some in zip(parts, np.split(own, ends[:-1]), strict=True):
            part += some.tolist()
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


@dataclass(frozen=True, slots=True)
class Participants:
    """Clients of a round.

    Attributes:
        steps: local steps by client, in ascending order of clients.
        dropped, late: number of clients that were left out, or that sent fewer steps.
    """

    steps: dict[int, int]
    dropped: int
    late: int


def participants(
    config: FederatedConfig, sizes: Sequence[int], batch: int, round_: int, key: bytes | None
) -> Participants:
    """Return the clients of a round.

    Args:
        config: the run.
        sizes: number of records of each client.
        batch: records of a local step.
        round_: rounds done before.
        key: the secret key of a private run, whose clients are drawn independently; None for a fixed number of clients.
    """
    clients, seed = len(sizes), config.seed
    sampled = config.sampled or clients
    if sampled > clients:
        raise ConfigError(f"sampled={sampled}: there are {clients} clients. Use at most that number.")
    if key is not None:
        chosen = drawn(key, round_, clients, sampled / clients).tolist()
    elif sampled == clients:
        chosen = list(range(clients))
    else:
        order = sorted(range(clients), key=lambda client: derive_seed(seed, _SAMPLED, round_, client))
        chosen = sorted(order[:sampled])
    steps: dict[int, int] = {}
    dropped = late = 0
    for client in chosen:
        num_steps = local_steps(config, sizes[client], batch)
        if _chance(seed, _DROPPED, round_, client) < config.faults.drop:
            dropped += 1
            continue
        if _chance(seed, _LATE, round_, client) < config.faults.straggle:
            late += 1
            num_steps = 1 + int(_chance(seed, _FEWER, round_, client) * (num_steps - 1))
            if config.faults.late == "out":
                continue
        steps[client] = num_steps
    return Participants(steps, dropped, late)


def local_steps(config: FederatedConfig, size: int, batch: int) -> int:
    """Return the local steps of a client with `size` records in a round without faults."""
    return config.local_steps or max(1, round(config.local_epochs * size / min(size, batch)))


def _chance(*parts: int) -> float:
    return derive_seed(*parts) / 2**63
