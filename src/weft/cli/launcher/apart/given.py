"""What the launcher of one replica is given by the command that started it: two lines over its standard input.

By value, as ranks get their settings: no other command can change it, and secrets stay out of command lines.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

from weft.cli.launcher.rank import die_with
from weft.spec import RunConfig
from weft.train.engine import ReplicaWorld


@dataclass(frozen=True, slots=True)
class Given:
    """config: of the run. world: which replica, and where all leave word. command: what the user typed.

    parent: the process that gives it. prepared: descriptor that hears once the run is checked; None: it is not asked.
    """

    config: RunConfig
    world: ReplicaWorld
    command: list[str]
    parent: int
    prepared: int | None = None

    def lines(self) -> bytes:
        """Return what is written."""
        own = [asdict(self.world), self.command, self.parent, self.prepared]
        config = self.config.model_dump(mode="json", by_alias=True)
        return json.dumps(own).encode() + b"\n" + json.dumps(config).encode() + b"\n"

    def tell_prepared(self) -> None:
        """Tell who waits that the run is checked and its data is ready. To be called once."""
        if self.prepared is not None:
            os.write(self.prepared, b"1")
            os.close(self.prepared)


def given_replica() -> Given:
    """Return what this process was given. From here on it does not outlive the one that gave it."""
    world, command, parent, prepared = json.loads(sys.stdin.buffer.readline())
    die_with(parent)
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline(), strict=False)
    return Given(config, ReplicaWorld(**world), command, parent, prepared)
