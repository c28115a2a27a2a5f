"""`weft train`: check the config, prepare the run, start the ranks."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import env
from weft.cli.console import say, split_words
from weft.cli.launch.launch import count_ranks, process_age_s, usable_cores, visible_gpus
from weft.cli.launch.rank import typed_command
from weft.cli.launch.start_method import rank_starter
from weft.config.plan import Plan
from weft.errors import CommError, ConfigError, LaunchError, WeftError
from weft.monitor.terminal import busy
from weft.units import counted, parse_seconds

if TYPE_CHECKING:
    from weft.cli.launch.start import Preparation
    from weft.comm.store import RankZeroMessage
    from weft.config.run_config import RunConfig
    from weft.env import RankEnv
    from weft.train.engine import ReplicaWorld
    from weft.train.folder import RunFolder

#: Seconds for which other ranks suppress an error that rank 0 probably reports too.
_FIRST_WORD_S = 3.0

#: Config sections that rank 0's message must not change: they select the code to run and the files to write.
_OF_THE_COMMAND = ("run", "task", "channel", "sink", "checkpoint", "model")

#: Minimum length of a rendezvous key.
_KEY_LENGTH = 16


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [key=value ...]",
            help="A config file, and settings that override it, such as train.steps=500. Without a file, Weft trains "
            "a small model on the source code of Python's standard library.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model. The same command again resumes from the newest checkpoint.

    Under torchrun or srun each process is one rank. Otherwise the command starts the ranks of this machine.
    """
    from weft.config.files import load_config

    path, overrides = split_words(words or [])
    place = env.rank_env()
    if place is None:
        train_locally(load_config(path, overrides).config)
        return
    try:
        train_as_rank(load_config(path, overrides).config, place)
    except (WeftError, typer.Exit):
        # All ranks have the same error, or rank 0 was refused. Rank 0 reports it and its launcher then ends the
        # others. A rank that still runs after the delay is the only one with its error, and reports it.
        if place.rank != 0:
            time.sleep(_FIRST_WORD_S)
        raise


def train_locally(config: RunConfig) -> None:
    """Prepare the run and start its ranks on this machine. Returns when they have succeeded."""
    if not config.launch.replicas_apart:
        train_world(config, typed_command())
    elif (world := _world_of(config)) is not None:
        from weft.cli.launch.replicas import rendezvous_server

        with rendezvous_server(config, world, say):
            train_world(config, typed_command(), world)
    elif code := _train_replicas(config):
        raise typer.Exit(code)


def _world_of(config: RunConfig) -> ReplicaWorld | None:
    """Return the replica that this machine starts, or None if it starts the complete plan."""
    from weft.monitor.sinks.base import secret_of
    from weft.train.engine import ReplicaWorld

    launch = config.launch
    if launch.replica is None or launch.meet_at is None:
        return None
    key = secret_of(launch.meeting_key, "launch.meeting_key")
    if key is not None and len(key) < _KEY_LENGTH:
        raise ConfigError(
            f"launch.meeting_key={launch.meeting_key}: this secret has {counted(len(key), 'character')}. Use "
            f"{_KEY_LENGTH} or more, such as those of: openssl rand -hex 32."
        )
    return ReplicaWorld(launch.replica, launch.meet_at, key or "")


def _train_replicas(config: RunConfig) -> int:
    """Start all replicas of a plan on this machine, each as a separate world. Return the exit code."""
    cores = usable_cores()
    with busy(sys.stderr, "starting the replicas"):
        gpus = visible_gpus() if config.launch.device != "cpu" else 0
        num_ranks = count_ranks(config, gpus, cores)
        from weft.cli.launch.replicas import Replicas
    whole = {"plan": Plan.parse(config.plan, num_ranks).format()}
    # Each launcher starts the ranks of one replica, whose number follows from the plan.
    config = config.model_copy(update={**whole, "launch": config.launch.model_copy(update={"ranks": "all"})})
    return Replicas(config, gpus, cores, typed_command(), say).run()


def train_world(
    config: RunConfig,
    command: Sequence[str],
    world: ReplicaWorld | None = None,
    prepared: Callable[[], None] = lambda: None,
) -> None:
    """Prepare a run and start the ranks of one world on this machine. Returns when they have succeeded.

    Args:
        config: the run's config.
        command: the command line of the user.
        world: the replica of these ranks; None for the complete plan.
        prepared: called once the run is checked and its data is ready.
    """
    cores = usable_cores()
    # Exit in this order: the server must end before the lock is released.
    with ExitStack() as held, ExitStack() as until_over:
        with busy(sys.stderr, "starting"):
            gpus = visible_gpus() if config.launch.device != "cpu" else 0
            num_ranks = count_ranks(config, gpus, cores, of_one_replica=world is not None)
            from weft.train.folder import run_folder

            own = run_folder(config, None if world is None else world.replica)
            # The server now loads the ranks' modules, while this process checks the run and prepares data.
            starter = until_over.enter_context(rank_starter(own.path, config, num_ranks, cores))
            from weft.checkpoint.peer_copies import CopyServer
            from weft.cli.launch.launch import launch_ranks
            from weft.cli.launch.monitor_process import monitor_process
            from weft.cli.launch.restarts import Restarts
            from weft.train.folder import run_lock

        # Hold the lock before the first write, and in the ranks too, so that a refused command changes nothing.
        lock = held.enter_context(run_lock(own.path, config.run.mode))
        copies = CopyServer() if config.checkpoint.peer_every and config.launch.restarts else None
        home = asdict(copies.home) if copies is not None else None

        besides: list[Path] = []

        def attempt(settled: RunConfig, ranks: int) -> None:
            folder = starter.prepare(_preparation(settled, ranks, ranks, world))
            if not besides:  # after preparing the folder, so that a refused run leaves nothing
                prepared()
                until_over.enter_context(monitor_process(folder.path, settled, say))
                besides.append(folder.path)
            given = {"texts": folder.texts, "started": time.monotonic() - process_age_s(), "command": list(command)}
            given |= {"copies": home, "world": asdict(world) if world else None, "store_key": secrets.token_hex(32)}
            settings = json.dumps(given).encode()
            launch_ranks(starter, ranks, folder.logs, cores=cores, settings=settings, lock=lock, notice=say)

        copied = copies.newest_step if copies is not None else lambda: None
        Restarts(config, own, num_ranks, say, copied=copied).keep(attempt)


def train_as_rank(config: RunConfig, place: RankEnv) -> None:
    """Run one of the ranks that torchrun or srun started. Ends the process if training fails."""
    from weft.cli.launch.copy_holder import copy_home
    from weft.cli.launch.rank import run_as_rank, second_handle
    from weft.comm.mesh import open_store
    from weft.comm.store import RankZeroMessage
    from weft.train.rank_run import Start, run_rank

    world = _world_of(config)
    if config.launch.replicas_apart and world is None:
        raise LaunchError(
            f"launch.replicas_apart=true: {place.starter} starts one world. Start each replica by a command of "
            "its own, with launch.replica=0, 1, ... and launch.meet_at=HOST:PORT."
        )
    started = time.monotonic() - process_age_s()
    # Kept until the end, because rank 0 may host it.
    store = open_store(place, parse_seconds(config.launch.timeout)) if place.world_size > 1 else None
    word = RankZeroMessage(place, store) if store is not None else None
    alarm = second_handle(2)
    with ExitStack() as held:
        if place.rank == 0:
            folder = _prepared_by_the_first(config, place, word, held, world)
        else:
            folder = _prepared_elsewhere(config, word)
        copies = copy_home(place) if config.checkpoint.peer_every else None
        command = tuple(typed_command())
        start = Start(locked=True, began=started, alarm=alarm, store=store, command=command, copies=copies, world=world)
        run_as_rank(folder.logs, place, lambda terminal: run_rank(folder, place, terminal, start))


def _preparation(config: RunConfig, num_ranks: int, num_local: int, world: ReplicaWorld | None) -> Preparation:
    """Return the preparation of a run. `num_ranks` is the number of ranks in this world."""
    from weft.cli.launch.start import Preparation

    if world is None:
        return Preparation(config, num_ranks, num_local)
    return Preparation(config, num_ranks, num_local, world.replica, Plan.parse(config.plan).dp_replicate)


def _prepared_by_the_first(
    config: RunConfig, place: RankEnv, word: RankZeroMessage | None, held: ExitStack, world: ReplicaWorld | None = None
) -> RunFolder:
    """Hold the folder, prepare it, and send the result to the other ranks, or the exit code of an error."""
    from weft.cli.launch.failure import exit_code_of
    from weft.cli.launch.monitor_process import monitor_process
    from weft.cli.launch.restarts import config_for_world_size
    from weft.train.folder import run_folder, run_lock

    said: dict[str, object] = {"exit_code": 1}
    try:
        held.enter_context(run_lock(run_folder(config).path, config.run.mode))
        config = config_for_world_size(config, place.world_size)
        folder = _preparation(config, place.world_size, place.local_world_size, world).here()
        if world is not None:
            from weft.cli.launch.replicas import rendezvous_server

            held.enter_context(rendezvous_server(config, world, say))
        held.enter_context(monitor_process(folder.path, folder.config(), say))
        said = {"path": str(folder.path), "texts": folder.texts}
    except BaseException as error:
        said = {"exit_code": exit_code_of(error)}
        raise
    finally:
        if word is not None:
            word.say(json.dumps(said).encode())
            if "exit_code" in said:
                word.wait_until_received()
    return folder


def _prepared_elsewhere(config: RunConfig, word: RankZeroMessage | None) -> RunFolder:
    """Return the folder that rank 0 prepared. Exit with rank 0's code if it failed, without repeating its report."""
    from weft.train.folder import RunFolder
    from weft.train.tasks.decoder import DecoderTask
    from weft.train.tasks.registry import find_task

    assert word is not None
    said = _checked_word(word.hear(), config)
    if "exit_code" in said:
        raise typer.Exit(said["exit_code"])
    # Fill this machine's token cache, unless it shares one with rank 0.
    task = find_task(config)
    if isinstance(task, DecoderTask):
        task.tokens(None)
    return RunFolder(Path(said["path"]), said["texts"], said["config"])


def _checked_word(text: bytes, config: RunConfig) -> dict[str, Any]:
    """Return rank 0's message after checking it against this rank's own command.

    Before a process group exists, the message cannot be signed. It is compared with rank 0's when the ranks have
    joined. Until then it may not change the code to run or the folder to write.

    Raises:
        CommError: if it does.
    """
    from weft.config.files import parse_config
    from weft.train.folder import run_folder

    said: Any = None
    with suppress(ValueError, RecursionError):
        said = json.loads(text)
    if isinstance(said, dict) and type(said.get("exit_code")) is int:
        return {"exit_code": said["exit_code"]}
    texts = said.get("texts") if isinstance(said, dict) else None
    if isinstance(texts, dict) and all(isinstance(one, str) for one in texts.values()):
        settled = parse_config(texts.get("config.toml", ""), "config.toml").config
        own_path = str(run_folder(config).path)
        differ = [key for key in _OF_THE_COMMAND if getattr(settled, key) != getattr(config, key)]
        if said.get("path") == own_path and not differ:
            return {"path": own_path, "texts": texts, "config": settled}
    else:
        differ = []
    what = f"another {differ[0]}" if differ else "another run folder"
    raise CommError(
        f"store key weft/word: what arrived as rank 0's settings has {what} than this rank's command. Start all ranks "
        "with the same command and config, where only they reach the store of MASTER_ADDR and MASTER_PORT."
    )


def main() -> None:
    """Run the launcher of one replica, which `weft train` started."""
    from weft.cli.app import show_error
    from weft.cli.launch.replicas import read_replica_inputs

    given = read_replica_inputs()
    try:
        train_world(given.config, given.command, given.world, given.report_prepared)
    except WeftError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
