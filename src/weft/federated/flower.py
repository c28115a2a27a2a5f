"""A ClientApp and a ServerApp of Flower for a federated run: connections, TLS and scheduling of clients are Flower's.

The server combines and checks updates, and accounts for privacy, as `weft federate` does. A
message has the server's weights and its round; a reply has the client's update, its number of records and its loss.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.config.files import parse_config
from weft.config.plan import Plan
from weft.errors import ConfigError, MissingExtra
from weft.federated.clients import Participants, local_steps, participants, split_records
from weft.federated.config import FederatedConfig, read_federated
from weft.federated.server import ServerState
from weft.federated.simulation import Collected, federated_folder, prepared_task, run_rounds
from weft.federated.trainer import ClientTrainer
from weft.federated.updates import ClientUpdate, Tensors

# Flower requires older versions of packages than the development environment, so no type checker finds it there.
# pyright: reportMissingImports=false

#: Seconds between two checks whether enough clients are connected.
_CHECK_S = 0.5
_LOG = logging.getLogger(__name__)


def flower_app(
    config: str | Path | FederatedConfig, out: str | Path | None = None, *, timeout_s: float = 3600.0
) -> tuple[Any, Any]:
    """Return Flower's ClientApp and ServerApp for a federated run.

    A client with the `partition-id` of a simulation trains its part of the task's records; another client trains all
    records that the task has on its machine.

    Args:
        config: file of `weft federate`. `clients` is the number of clients that the server waits for.
        out: folder of the server, by default federated/NAME. The same folder continues a run.
        timeout_s: seconds that the server waits for the updates of a round. Later ones are left out.

    Raises:
        MissingExtra: if flwr is not installed.
        ConfigError: if the file is invalid, has faults, which only `weft federate` simulates, or has no number of
            clients.
    """
    try:
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
    except ImportError as error:
        raise MissingExtra("flwr", "federated", "weft.federated.flower_app") from error

    settings = config if isinstance(config, FederatedConfig) else read_federated(Path(config))
    if settings.faults.drop or settings.faults.straggle:
        raise ConfigError("faults.drop: clients of Flower have faults of their own. Leave [faults] out.")
    if (ranks := Plan.parse(parse_config(settings.base, "config").config.plan, 1).world_size) > 1:
        raise ConfigError(
            f"plan: {ranks} ranks, and a client of Flower trains in one process. Use plan=dp_replicate=1."
        )
    if not settings.clients:
        raise ConfigError(
            "clients=0: Flower's server waits for a number of clients. Use another split, and clients = 20."
        )
    folder = Path(out or Path("federated") / (Path(config).stem if isinstance(config, str | Path) else "flower"))
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        about = message.content["config"]
        weights = _tensors(message.content["arrays"])
        update = _trained(settings, context.node_config, weights, int(about["round"]))
        arrays = ArrayRecord({name: _array(one) for name, one in update.delta.items()})
        numbers = MetricRecord({"round": update.round, "num-examples": update.samples, "loss": update.loss})
        return Message(content=RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        del context

        def collect(trainer: ClientTrainer, state: ServerState, key: bytes | None) -> Collected:
            return _collect(grid, settings, state, trainer.batch, key, timeout_s)

        with federated_folder(settings, folder, has_records=False):
            run_rounds(settings, folder.resolve(), settings.clients, collect, _LOG.info)

    return client_app, server_app


def _collect(
    grid: Any, config: FederatedConfig, state: ServerState, batch: int, key: bytes | None, timeout_s: float
) -> Collected:
    """Send the weights to the clients of a round, and return their updates. Clients without one count as dropped."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    nodes = _connected(grid, config.clients)
    chosen = participants(config, [batch] * len(nodes), batch, state.round, key)
    arrays = ArrayRecord({name: _array(one) for name, one in state.weights.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"round": state.round})})
    messages = [Message(content=content, message_type="train", dst_node_id=nodes[client]) for client in chosen.steps]
    client_of = {node: client for client, node in enumerate(nodes)}
    updates: list[ClientUpdate] = []
    for reply in grid.send_and_receive(messages, timeout=timeout_s):
        client = client_of.get(reply.metadata.src_node_id, -1)
        if reply.has_error():
            _LOG.warning("client %d failed: %s", client, reply.error.reason)
        else:
            updates.append(_read(reply.content, client))
    lost = len(set(chosen.steps) - {one.client for one in updates})
    return Collected(Participants(chosen.steps, dropped=lost, late=0), [lambda one=one: one for one in updates])


def _connected(grid: Any, number: int) -> list[int]:
    """Wait for `number` clients, and return the ids of the first ones, ascending."""
    while len(nodes := sorted(grid.get_node_ids())) < number:
        time.sleep(_CHECK_S)
    return nodes[:number]


class _Warm:
    """The trainer of this process, which trains for several clients in a simulation."""

    config: FederatedConfig | None = None
    trainer: ClientTrainer
    folder: tempfile.TemporaryDirectory[str]
    parts: list[np.ndarray] | None


def _trained(config: FederatedConfig, node: Any, weights: Tensors, round_: int) -> ClientUpdate:
    if _Warm.config != config:
        _Warm.folder = tempfile.TemporaryDirectory(prefix="weft-client-")
        prepared_task(config, Path(_Warm.folder.name))
        _Warm.trainer, _Warm.parts = ClientTrainer(config, Path(_Warm.folder.name)), None
        _Warm.config = config
    trainer, client = _Warm.trainer, int(node.get("partition-id", 0))
    if "partition-id" in node:
        _Warm.parts = _Warm.parts or split_records(config, trainer.samples)
        records = _Warm.parts[client]
    else:
        records = np.arange(len(trainer.samples))
    steps = local_steps(config, len(records), trainer.batch)
    return trainer.train(weights, records, round_, client, steps)


def _array(tensor: torch.Tensor) -> Any:
    from flwr.app import Array

    return Array(tensor.detach().cpu().numpy())


def _tensors(arrays: Any) -> Tensors:
    """Return a record's tensors. Flower reads them by numpy without pickle."""
    return {name: torch.from_numpy(np.array(one.numpy())) for name, one in arrays.items()}


def _read(content: Any, client: int) -> ClientUpdate:
    """Return the update in a reply. One that cannot be read has no records, so the server refuses it."""
    try:
        numbers = content["metrics"]
        return ClientUpdate(
            int(numbers["round"]), client, int(numbers["num-examples"]), float(numbers["loss"]),
            _tensors(content["arrays"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, EOFError) as error:
        _LOG.warning("client %d sent a reply that cannot be read: %r", client, error)
        return ClientUpdate(-1, client, 0, math.nan, {})
