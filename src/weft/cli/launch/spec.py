"""Description of how a process of `weft train` trains: the ranks that it starts, or its own rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING

from weft.cli.launch.rank import die_with, typed_command
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, LaunchError
from weft.units import counted

if TYPE_CHECKING:
    from weft.cli.launch.start import Preparation
    from weft.env import RankEnv
    from weft.train.engine import ReplicaWorld

#: Minimum length of a rendezvous key.
_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Inputs of one process of `weft train`.

    Attributes:
        config: the run's config.
        command: the command line of the user.
        rank: the rank of this process, if torchrun or srun started it; None to start the ranks of this machine.
        world: the replica of this process's ranks, if each replica has a separate world; None for the complete plan.
        parent: id of the process that sent this spec with `lines` and serves the replicas' rendezvous.
        prepared: file descriptor to write to once the run is checked; None for no notification.
    """

    config: RunConfig
    command: Sequence[str]
    rank: RankEnv | None = None
    world: ReplicaWorld | None = None
    parent: int | None = None
    prepared: int | None = None

    @classmethod
    def of(cls, config: RunConfig, rank: RankEnv | None = None) -> LaunchSpec:
        """Return the spec of a process that a user or a launcher such as torchrun started.

        Raises:
            ConfigError: if the rendezvous key is too short.
            LaunchError: if a launcher starts one world, and the config has several.
        """
        from weft.monitor.sinks.base import secret_of
        from weft.train.engine import ReplicaWorld

        launch, world = config.launch, None
        if launch.replica is not None and launch.meet_at is not None:
            key = secret_of(launch.meeting_key, "launch.meeting_key")
            if key is not None and len(key) < _KEY_LENGTH:
                raise ConfigError(
                    f"launch.meeting_key={launch.meeting_key}: this secret has {counted(len(key), 'character')}. Use "
                    f"{_KEY_LENGTH} or more, such as those of: openssl rand -hex 32."
                )
            world = ReplicaWorld(launch.replica, launch.meet_at, key or "")
        if rank is not None and launch.replicas_apart and world is None:
            raise LaunchError(
                f"launch.replicas_apart=true: {rank.starter} starts one world. Start each replica by a command of "
                "its own, with launch.replica=0, 1, ... and launch.meet_at=HOST:PORT."
            )
        return cls(config, typed_command(), rank, world)

    @property
    def starts_replicas(self) -> bool:
        """True if this process starts one launcher per replica, each with a separate world."""
        return self.config.launch.replicas_apart and self.world is None

    def preparation(self, config: RunConfig, num_ranks: int, num_local: int) -> Preparation:
        """Return the preparation of a run.

        Args:
            config: the run's config.
            num_ranks, num_local: ranks of this world, and those on this machine.
        """
        from weft.cli.launch.start import Preparation

        if self.world is None:
            return Preparation(config, num_ranks, num_local)
        return Preparation(config, num_ranks, num_local, self.world.replica, Plan.parse(config.plan).dp_replicate)

    def lines(self) -> bytes:
        """Return the spec as two lines, for the standard input of a child process.

        Sending the content, like a rank's inputs, ensures that no other command changes it and no secret is on a
        command line.
        """
        own = [None if self.world is None else asdict(self.world), list(self.command), self.parent, self.prepared]
        config = self.config.model_dump(mode="json", by_alias=True)
        return json.dumps(own).encode() + b"\n" + json.dumps(config).encode() + b"\n"

    @classmethod
    def read(cls, stream: IO[bytes]) -> LaunchSpec:
        """Read the spec of this process. From then on, this process dies with its parent."""
        world, command, parent, prepared = json.loads(stream.readline())
        die_with(parent)
        from weft.train.engine import ReplicaWorld

        config = RunConfig.model_validate_json(stream.readline(), strict=False)
        own = None if world is None else ReplicaWorld(**world)
        return cls(config, command, world=own, parent=parent, prepared=prepared)

    def report_prepared(self) -> None:
        """Send the parent a notification that the run is checked and its data is ready. Call it once."""
        if self.prepared is not None:
            os.write(self.prepared, b"1")
            os.close(self.prepared)
