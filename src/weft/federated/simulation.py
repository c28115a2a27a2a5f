"""A federated run: rounds of local training on a pool of workers, and the server's steps.

federated/<name>/
  federated.json       the run's config      base.toml       the config of the clients' training
  clients.npz          records of each client
  state.safetensors    weights and optimizer state after the last round, which a killed run continues from
  rounds.jsonl         one line per round    model.safetensors    weights at the end
  rounds/NNNNNN/       updates of the current round, and the journal of its tasks
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from weft.config.files import parse_config
from weft.errors import ConfigError, TasksFailed
from weft.federated.clients import Participants, participants, split_records
from weft.federated.config import FederatedConfig, client_privacy
from weft.federated.server import RoundResult, Server, ServerState
from weft.federated.trainer import (
    CLIENTS,
    RUN,
    STATE,
    ClientTrainer,
    read_clients,
    update_file,
    write_clients,
)
from weft.federated.updates import ClientUpdate, read_update
from weft.files import replace_text
from weft.pools.pool import Pool
from weft.pools.task_folder import locked_folder
from weft.privacy.keys import create_key, read_key
from weft.privacy.ledger import PrivacyLedger
from weft.train.folder import RunFolder
from weft.train.privacy.records import single_records
from weft.train.tasks.base import Task
from weft.train.tasks.registry import find_task

#: Function that trains a client, in a worker.
TRAIN = "weft.federated.trainer:train_client"
ROUNDS = "rounds.jsonl"
Note = Callable[[str], None]


@dataclass(slots=True)
class FederatedResult:
    """A run so far.

    Attributes:
        rounds: records of rounds, as in rounds.jsonl.
        epsilon: privacy of clients so far, or None for a run that is not private.
        is_spent: the privacy budget ended the run.
    """

    folder: Path
    state: ServerState
    rounds: list[dict[str, Any]] = field(default_factory=list)
    epsilon: float | None = None
    is_spent: bool = False


@contextmanager
def federated_folder(config: FederatedConfig, folder: Path, *, has_records: bool = True) -> Iterator[None]:
    """Hold the lock of a run's folder, and prepare its data and clients.

    has_records: divide the training records among clients. False on a server whose clients have them.

    Raises:
        ConfigError: if another command works in it, or it belongs to another run.
        PoolError: if the disk is full.
    """
    with locked_folder(folder):
        _claim(folder, config, has_records)
        yield


def _claim(folder: Path, config: FederatedConfig, has_records: bool) -> None:
    about = folder / RUN
    if about.exists():
        _refuse_other(about, config)
    elif others := [one.name for one in folder.iterdir() if one.name[0] != "." and one.name not in _EARLY]:
        raise ConfigError(f"{folder}: it has other files, such as {others[0]}. Give a new folder.")
    else:
        task = prepared_task(config, folder)
        if has_records:
            samples = single_records(task, f"task.name={task.config.task.name}")
            write_clients(folder / CLIENTS, split_records(config, samples))
        replace_text(folder / "base.toml", config.base)
    replace_text(about, config.model_dump_json(indent=1) + "\n")


def prepared_task(config: FederatedConfig, folder: Path) -> Task:
    """Prepare the data of a run's task, write the task's files into a folder, and return the task."""
    base = parse_config(config.base, "config").config
    task, run = find_task(base), RunFolder(folder, resolved=base)
    task.prepare(run, None)
    for name, text in task.keep(run, []).items():
        replace_text(folder / name, text)
    return task


#: Files that a command may have written before it was killed and claimed the folder.
_EARLY = (CLIENTS, "base.toml", "model.json", "data.json", "tokenizer", "privacy.key")


def _refuse_other(about: Path, config: FederatedConfig) -> None:
    try:
        known = FederatedConfig.model_validate_json(about.read_bytes()).identity()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{about}: it is damaged. Give another --out.") from error
    for key, value in config.identity().items():
        if known[key] != value:
            what = "the clients' config" if key == "base" else key
            raise ConfigError(
                f"{about.parent}: its run began with another value of {what}. Restore it to continue, or give another "
                "--out."
            )


def run_federated(config: FederatedConfig, folder: Path, pool: Pool, note: Note) -> FederatedResult:
    """Run the rounds that a folder lacks. Call it inside `federated_folder`.

    Args:
        config, folder, pool: the run, its locked folder, and its workers.
        note: prints a line.

    Raises:
        ConfigError: if a client's training fails with an error.
        PoolError: if the workers cannot be reached.
    """
    folder = folder.resolve()
    sizes = [len(one) for one in read_clients(folder / CLIENTS)]

    def collect(trainer: ClientTrainer, state: ServerState, key: bytes | None) -> Collected:
        chosen = participants(config, sizes, trainer.batch, state.round, key)
        _train(folder, state.round, chosen, trainer.num_ranks, pool)
        files = [update_file(folder, state.round, client) for client in chosen.steps]
        return Collected(chosen, [lambda file=file: read_update(file) for file in files])

    return run_rounds(config, folder, len(sizes), collect, note)


@dataclass(frozen=True, slots=True)
class Collected:
    """Clients of a round, and functions that read their updates."""

    chosen: Participants
    updates: list[Callable[[], ClientUpdate]]


def run_rounds(
    config: FederatedConfig,
    folder: Path,
    clients: int,
    collect: Callable[[ClientTrainer, ServerState, bytes | None], Collected],
    note: Note,
) -> FederatedResult:
    """Run the server's part of the rounds that a folder lacks.

    Args:
        config, folder: the run and its locked folder.
        clients: number of clients.
        collect: returns the updates of a round. Its arguments are the trainer of this process, the state, and the
            secret key of a private run.
        note: prints a line.
    """
    trainer = ClientTrainer(config, folder, alone=True)
    ledger, key = _account(config, folder, trainer, clients)
    if not (folder / STATE).exists():
        ServerState(0, trainer.weights()).save(folder / STATE)
    state = ServerState.load(folder / STATE)
    if ledger is not None and state.account is not None:
        ledger.restore(state.account)
    server = Server(config, state, trainer.float_buffers, ledger, key or b"")
    result = FederatedResult(folder, state, _rounds_before(folder, state.round))
    for old in (folder / "rounds").glob("[0-9]*"):  # of a command that was killed after its round
        if int(old.name) < state.round:
            shutil.rmtree(old, ignore_errors=True)
    while state.round < config.rounds:
        if ledger is not None and ledger.is_spent:
            result.is_spent = True
            note(f"privacy.epsilon={config.privacy.epsilon:g}: it is spent after {state.round} rounds")
            break
        round_, found = state.round, collect(trainer, state, key)
        done = server.step(list(found.chosen.steps), found.updates)
        record = _record(config, trainer, state, found.chosen, done)
        with (folder / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        state.save(folder / STATE)
        shutil.rmtree(folder / "rounds" / f"{round_:06d}", ignore_errors=True)
        result.rounds.append(record)
        note(_line(config, record))
        for why in done.refused[:3]:
            note(f"refused: {why}")
    save_file(state.weights, folder / "model.safetensors")
    result.epsilon = ledger.epsilon() if ledger is not None else None
    return result


def _account(
    config: FederatedConfig, folder: Path, trainer: ClientTrainer, clients: int
) -> tuple[PrivacyLedger | None, bytes | None]:
    if not config.privacy.is_on:
        return None, None
    if buffers := trainer.float_buffers:
        raise ConfigError(
            f"privacy.clip={config.privacy.clip:g}: clients average the buffer {buffers[0]}, and noise makes running "
            "statistics useless. Use a model without batch norm, such as one with group norm."
        )
    privacy = client_privacy(config, clients, str(folder / "privacy.key")).resolved()
    create_key(privacy.key)
    return PrivacyLedger(privacy), read_key(privacy.key)


def _train(folder: Path, round_: int, chosen: Participants, ranks: int, pool: Pool) -> None:
    """Train the clients of a round that have no update yet. ranks: ranks of a client."""
    if not chosen.steps:
        return
    own = folder / "rounds" / f"{round_:06d}"
    own.mkdir(parents=True, exist_ok=True)
    items = [
        {"folder": str(folder), "round": round_, "client": client, "steps": steps, "ranks": ranks}
        for client, steps in chosen.steps.items()
    ]
    try:
        pool.map(TRAIN, items, own / "tasks")
    except TasksFailed as failed:
        index, why = next(iter(failed.errors.items()))
        raise ConfigError(
            f"round {round_}, client {items[index]['client']}: its training failed ({why}). {own / 'tasks'} has the "
            "traceback. Correct it, and run the same command: finished clients are kept."
        ) from failed


def _record(
    config: FederatedConfig, trainer: ClientTrainer, state: ServerState, chosen: Participants, done: RoundResult
) -> dict[str, Any]:
    is_last = state.round == config.rounds
    record: dict[str, Any] = {
        "round": state.round, "clients": len(done.used), "dropped": chosen.dropped, "late": chosen.late,
        "refused": len(done.refused), "clipped": done.clipped, "loss": done.loss,
    }  # fmt: skip
    if config.eval_every and (is_last or state.round % config.eval_every == 0):
        found = trainer.evaluate(state.weights)
        if found is not None:
            record |= {"eval_loss": found.loss if np.isfinite(found.loss) else None, **found.metrics}
    return record


def _line(config: FederatedConfig, record: dict[str, Any]) -> str:
    counts = ("dropped", "late", "refused", "clipped")
    text = f"round {record['round']}/{config.rounds}: {record['clients']} clients"
    text += "".join(f", {record[name]} {name}" for name in counts if record[name])
    measured = {name: value for name, value in record.items() if name not in (*counts, "round", "clients")}
    return text + "".join(f"  {name} {value:.4g}" for name, value in measured.items() if isinstance(value, float))


def _rounds_before(folder: Path, round_: int) -> list[dict[str, Any]]:
    """Return the records of finished rounds, and remove the line of a round that a killed run did not finish."""
    path = folder / ROUNDS
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["round"] <= round_:
            found.append(record)
    replace_text(path, "".join(json.dumps(one) + "\n" for one in found))
    return found
