"""The meeting place of replicas on several machines, where this one starts the first of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from weft.comm.peer.meeting import MeetingPlace
from weft.spec import RunConfig
from weft.spec.plan import Plan
from weft.train.engine import ReplicaWorld
from weft.units import parse_seconds


@contextmanager
def meeting_place(config: RunConfig, world: ReplicaWorld, say: Callable[[str], None]) -> Generator[None]:
    """Answer replicas on other machines within the block, where this one starts replica 0 of them.

    After it, the place stays until the others have ended too, or were not heard for `launch.meeting_timeout`.

    Args:
        config: of the run.
        world: the replica that this machine starts.
        say: shows the user a line.

    Raises:
        LaunchError: where this machine cannot listen at `launch.meet_at`.
    """
    if world.replica != 0:
        yield
        return
    host, _, port = world.meet_at.rpartition(":")
    replicas = Plan.parse(config.plan).dp_replicate
    timeout_s = parse_seconds(config.launch.meeting_timeout)
    place = MeetingPlace(host.strip("[]"), int(port), replicas, timeout_s, world.key)
    try:
        yield
        if not place.is_over():
            say(f"replica 0 has ended; other replicas still meet at {world.meet_at} until they end too")
            place.wait_until_over()
    finally:
        place.close()
