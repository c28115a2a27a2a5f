"""`weft train`: check the config, prepare the run, start the ranks."""

from __future__ import annotations

import json
import secrets
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import env
from weft.cli.console import print_line, split_words
from weft.cli.launch.fork_server import rank_starter
from weft.cli.launch.launch import count_ranks, process_age_s, usable_cores, visible_devices
from weft.cli.launch.rank import RankInputs, train_rank
from weft.cli.launch.spec import LaunchSpec
from weft.config.plan import Plan
from weft.errors import CommError, LaunchError, WeftError
from weft.monitor.terminal import busy
from weft.units import parse_seconds

if TYPE_CHECKING:
    from weft.comm.store import RankZeroMessage
    from weft.config.run_config import RunConfig
    from weft.train.folder import RunFolder

#: Seconds that other ranks wait before they report an error, because rank 0 probably reports it too.
_FIRST_WORD_S = 3.0

#: Config sections that rank 0's message must not change, because they select the code to run and the files to read and
#: write. It may only add the commits of models on the hub.
_OF_THE_COMMAND = ("run", "task", "grpo", "channel", "sink", "checkpoint", "model")


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
    rank = env.rank_env()
    try:
        execute(LaunchSpec.of(load_config(path, overrides).config, rank))
    except (WeftError, typer.Exit):
        # Usually all ranks have the same error. Rank 0 reports it, and its launcher then ends the others. A rank that
        # still runs after the delay is the only one with its error, so it reports it.
        if rank is not None and rank.rank != 0:
            time.sleep(_FIRST_WORD_S)
        raise


def execute(spec: LaunchSpec) -> None:
    """Run training as the spec describes. Returns when training has succeeded."""
    if spec.config.launch.engine == "jax":
        _run_jax(spec)
        return
    if spec.rank is not None:
        _run_rank(spec)
        return
    cores = usable_cores()
    with busy(sys.stderr, "starting the replicas" if spec.starts_replicas else "starting"):
        gpus = visible_devices(spec.config.launch.device)
        num_ranks = count_ranks(spec.config, gpus, cores, of_one_replica=spec.world is not None)
    if not spec.starts_replicas:
        _start_ranks(spec, num_ranks, cores)
        return
    from weft.cli.launch.replicas import Replicas
    from weft.train.folder import run_folder
    from weft.train.states.hub_names import resolved_config

    # Each launcher starts the ranks of one replica, whose number follows from the plan.
    launch = spec.config.launch.model_copy(update={"ranks": "all"})
    plan = Plan.parse(spec.config.plan, num_ranks).format()
    config = resolved_config(spec.config, run_folder(spec.config))  # all replicas read the same commit
    config = config.model_copy(update={"plan": plan, "launch": launch})
    if code := Replicas(config, gpus, cores, spec.command, print_line).run():
        raise typer.Exit(code)


def _run_jax(spec: LaunchSpec) -> None:
    """Train in this process, which drives all devices of the plan."""
    if spec.rank is not None:
        raise LaunchError(
            f"launch.engine=jax: one process drives all devices, and {spec.rank.starter} started ranks. Start it with "
            "weft train alone."
        )
    from weft.jax_engine.rules import check
    from weft.train.folder import run_folder, run_lock
    from weft.train.rank_run import JAX, Start, run_rank

    config, began = spec.config, time.monotonic() - process_age_s()
    num_ranks = count_ranks(config, 0, usable_cores())
    check(Plan.parse(config.plan, num_ranks))
    with run_lock(run_folder(config).path, config.run.mode):
        folder = spec.preparation(config, num_ranks, num_ranks).prepare_locally()
        run_rank(folder, None, None, Start(locked=True, began=began, command=tuple(spec.command), engine=JAX))


def _start_ranks(spec: LaunchSpec, num_ranks: int, cores: int) -> None:
    config, world = spec.config, spec.world
    # The order matters: at exit, the server must end before the lock is released.
    with _rendezvous(spec), ExitStack() as held, ExitStack() as until_over:
        with busy(sys.stderr, "starting"):
            from weft.train.folder import run_folder

            own = run_folder(config, None if world is None else world.replica)
            # The fork server now imports the ranks' modules, while this process checks the run and prepares data.
            starter = until_over.enter_context(rank_starter(own.path, config, num_ranks, cores))
            from weft.checkpoint.peer_copies import CopyServer
            from weft.cli.launch.launch import launch_ranks
            from weft.cli.launch.monitor_process import monitor_process
            from weft.cli.launch.restarts import Restarts
            from weft.train.folder import run_lock

        # Lock the folder before the first write, so that a rejected command changes nothing. The ranks hold the lock
        # too.
        lock = held.enter_context(run_lock(own.path, config.run.mode))
        copies = CopyServer() if config.checkpoint.peer_every and config.launch.restarts else None
        home = asdict(copies.home) if copies is not None else None
        monitored: list[Path] = []

        def attempt(settled: RunConfig, ranks: int) -> None:
            folder = starter.prepare(spec.preparation(settled, ranks, ranks))
            if not monitored:  # after preparing the folder, so that a rejected run leaves no files
                spec.report_prepared()
                until_over.enter_context(monitor_process(folder.path, settled, print_line))
                monitored.append(folder.path)
            began, key = time.monotonic() - process_age_s(), secrets.token_hex(32)
            inputs = RankInputs(folder.texts, began, spec.command, home, asdict(world) if world else None, key)
            settings = json.dumps(asdict(inputs)).encode()
            launch_ranks(starter, ranks, folder.logs, cores=cores, settings=settings, lock=lock, notice=print_line)

        copied = copies.newest_step if copies is not None else lambda: None
        Restarts(config, own, num_ranks, print_line, copied=copied).keep(attempt)


def _rendezvous(spec: LaunchSpec) -> AbstractContextManager[None]:
    """Return a context that serves the replicas' rendezvous, if this machine starts replica 0 and no parent does."""
    if spec.world is None or spec.parent is not None:
        return nullcontext()
    from weft.cli.launch.replicas import rendezvous_server

    return rendezvous_server(spec.config, spec.world, print_line)


def _run_rank(spec: LaunchSpec) -> None:
    from weft.cli.launch.copy_holder import copy_home
    from weft.comm.mesh import open_store
    from weft.comm.store import RankZeroMessage

    config, place = spec.config, spec.rank
    assert place is not None
    began = time.monotonic() - process_age_s()
    # Keep the store until the end, because rank 0 may host it.
    store = open_store(place, parse_seconds(config.launch.timeout)) if place.world_size > 1 else None
    message = RankZeroMessage(place, store) if store is not None else None
    with ExitStack() as held:
        if place.rank == 0:
            folder = _prepare_on_first_rank(spec, message, held)
        else:
            assert message is not None
            folder = _receive_prepared(spec, message)
        copies = copy_home(place) if config.checkpoint.peer_every else None
        world = asdict(spec.world) if spec.world else None
        inputs = RankInputs(folder.texts, began, spec.command, asdict(copies) if copies else None, world)
        train_rank(folder.path, place, inputs, store=store)


def _prepare_on_first_rank(spec: LaunchSpec, message: RankZeroMessage | None, held: ExitStack) -> RunFolder:
    """Lock and prepare the folder, and send the result (or the exit code of an error) to the other ranks."""
    from weft.cli.launch.failure import exit_code_of
    from weft.cli.launch.monitor_process import monitor_process
    from weft.cli.launch.restarts import config_for_world_size
    from weft.train.folder import run_folder, run_lock

    assert spec.rank is not None
    result: dict[str, object] = {"exit_code": 1}
    try:
        held.enter_context(run_lock(run_folder(spec.config).path, spec.config.run.mode))
        config = config_for_world_size(spec.config, spec.rank.world_size)
        folder = spec.preparation(config, spec.rank.world_size, spec.rank.local_world_size).prepare_locally()
        held.enter_context(_rendezvous(spec))
        held.enter_context(monitor_process(folder.path, folder.config(), print_line))
        result = {"path": str(folder.path), "texts": folder.texts}
    except BaseException as error:
        result = {"exit_code": exit_code_of(error)}
        raise
    finally:
        if message is not None:
            message.send(json.dumps(result).encode())
            if "exit_code" in result:
                message.wait_until_received()
    return folder


def _receive_prepared(spec: LaunchSpec, message: RankZeroMessage) -> RunFolder:
    """Return the folder that rank 0 prepared, after downloading and tokenizing data that this machine's caches lack.

    Exit with rank 0's code if it failed, without repeating its report.
    """
    from weft.train.folder import RunFolder
    from weft.train.states.hub_names import download_all
    from weft.train.tasks.decoder import DecoderTask
    from weft.train.tasks.registry import find_task

    result = _checked_message(message.receive(), spec.config)
    if "exit_code" in result:
        raise typer.Exit(result["exit_code"])
    # Fill this machine's caches, unless it shares them with rank 0.
    download_all(result["config"])
    task = find_task(result["config"])
    if isinstance(task, DecoderTask):
        task.tokens(None)
    return RunFolder(Path(result["path"]), result["texts"], result["config"])


def _checked_message(text: bytes, config: RunConfig) -> dict[str, Any]:
    """Parse a message that claims to be rank 0's: an exit code, or the run folder's path, files and config.

    Before the process group exists, its sender is not verified. So it may not change the code to run or the
    folder to write, which this rank's own command sets. Once the group exists, the ranks compare their settings.

    Raises CommError: if it does change them, or is malformed.
    """
    from weft.config.files import parse_config
    from weft.train.folder import run_folder
    from weft.train.states.hub_names import without_commits

    said: Any = None
    with suppress(ValueError, RecursionError):
        said = json.loads(text)
    if isinstance(said, dict) and type(said.get("exit_code")) is int:
        return {"exit_code": said["exit_code"]}
    texts = said.get("texts") if isinstance(said, dict) else None
    if isinstance(texts, dict) and all(isinstance(one, str) for one in texts.values()):
        settled = parse_config(texts.get("config.toml", ""), "config.toml").config
        own_path = str(run_folder(config).path)
        said_first = without_commits(settled, config)
        differ = [key for key in _OF_THE_COMMAND if getattr(said_first, key) != getattr(config, key)]
        if said.get("path") == own_path and not differ:
            return {"path": own_path, "texts": texts, "config": settled}
    else:
        differ = []
    what = f"another {differ[0]}" if differ else "another run folder"
    raise CommError(
        f"store key weft/word: the received settings of rank 0 have {what} than this rank's command. Start all ranks "
        "with the same command and config, where only they reach the store of MASTER_ADDR and MASTER_PORT."
    )


def main() -> None:
    """Run the launcher of one replica, which `weft train` started."""
    from weft.cli.app import show_error

    try:
        execute(LaunchSpec.read(sys.stdin.buffer))
    except WeftError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
