"""What an engine is made for, and the seeds that it draws from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.env import RankEnv
from weft.spec import RunConfig
from weft.spec.plan import Plan
from weft.train.folder import RunFolder
from weft.train.task import Task

if TYPE_CHECKING:
    from weft.private_torch import Store


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """One replica of several, each a world of its own.

    replica: which one. meet_at: HOST:PORT where they leave word. key: that the place there must have.
    """

    replica: int
    meet_at: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineJob:
    """What an engine is made for.

    place: this process among the ranks; None is a single rank. store: where the ranks have met already. tell: shows
    people a line, of a rank that waits for another one. on_hang: takes an event of it, where this rank may write one.
    world: which replica of the plan's these ranks are, where each is a world of its own. store_key: hex digits of the
    secret that signs the ranks' messages in their store; "": they agree on one when they have joined.
    """

    folder: RunFolder
    config: RunConfig
    task: Task
    plan: Plan
    place: RankEnv | None
    tell: Callable[[str], None]
    store: Store | None = None
    on_hang: Callable[[Mapping[str, object]], None] = lambda event: None
    world: ReplicaWorld | None = None
    store_key: str = field(default="", repr=False)


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed from whole numbers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
