"""Apps of Flower: the same weights as `weft federate`, and refused replies."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.federated.runs import train, weights, write_config
from weft.errors import ConfigError, MissingExtra
from weft.federated import flower_app

HAS_FLOWER = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not HAS_FLOWER, reason="flwr is not installed")
# Flower's typer uses names that click deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RUN = "rounds = 2\nclients = 3\nsplit = 'dirichlet'\nalpha = 0.5\nlocal_epochs = 1\n"


@pytest.mark.skipif(HAS_FLOWER, reason="flwr is installed")
def test_missing_flower_names_the_command(tmp_path):
    with pytest.raises(MissingExtra, match=r"flwr is not installed: weft.federated.flower_app needs it"):
        flower_app(write_config(tmp_path, RUN))


@needs_flower
def test_faults_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"faults.drop: clients of Flower have faults of their own"):
        flower_app(write_config(tmp_path, RUN + "[faults]\ndrop = 0.1\n"))
    with pytest.raises(ConfigError, match=r"clients=0: Flower's server waits for a number of clients"):
        flower_app(write_config(tmp_path, "split = 'column'\ncolumn = 'user'\nlocal_steps = 1\n"))


class Grid:
    """Clients of Flower in this process. change: edits the reply of a client."""

    def __init__(self, app, change=lambda client, reply: reply, partitions=3):
        self.app, self.change, self.partitions = app, change, partitions
        self.nodes = [100 + 7 * client for client in range(3)]

    def get_node_ids(self):
        return list(reversed(self.nodes))

    def send_and_receive(self, messages, timeout=None):
        from flwr.app import Context, RecordDict

        replies = []
        for message in messages:
            client = self.nodes.index(message.metadata.dst_node_id)
            node = {"partition-id": client, "num-partitions": self.partitions}
            context = Context(1, message.metadata.dst_node_id, node, RecordDict(), {})
            reply = self.change(client, self.app(message, context))
            if reply is not None:
                replies.append(reply)
        return replies


def serve(tmp_path, change=lambda client, reply: reply):
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # Flower's runtime sets them
    client_app, server_app = flower_app(write_config(tmp_path, RUN), tmp_path / "server")
    server_app._main(Grid(client_app, change), None)
    return weights(tmp_path / "server"), (tmp_path / "server/rounds.jsonl").read_text()


@needs_flower
def test_flower_gives_the_weights_of_weft(tmp_path):
    train(write_config(tmp_path, RUN), tmp_path / "weft")
    found, rounds = serve(tmp_path)
    wanted = weights(tmp_path / "weft")
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-12
    assert rounds == (tmp_path / "weft/rounds.jsonl").read_text()


@needs_flower
@pytest.mark.parametrize("kind", ["nan", "round", "shape", "metrics", "pickle", "lost"])
def test_bad_reply_is_left_out(tmp_path, kind):
    from flwr.app import Array, ArrayRecord, MetricRecord

    def change(client, reply):
        if client != 1:
            return reply
        arrays, metrics = reply.content["arrays"], reply.content["metrics"]
        first = next(iter(arrays))
        if kind == "nan":
            arrays[first] = Array(torch.full_like(torch.tensor(arrays[first].numpy()), torch.nan).numpy())
        elif kind == "shape":
            arrays[first] = Array(torch.zeros(2).numpy())
        elif kind == "round":
            metrics["round"] = 7
        elif kind == "pickle":
            arrays[first] = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x80\x04N.")
        elif kind == "metrics":
            reply.content["metrics"] = MetricRecord({"round": 0})
        elif kind == "lost":
            return None
        reply.content["arrays"] = ArrayRecord(dict(arrays.items()))
        return reply

    found, rounds = serve(tmp_path, change)
    assert all(one.isfinite().all() for one in found.values())
    assert rounds.count('"clients": 2') == 2
    assert rounds.count('"dropped": 1' if kind == "lost" else '"refused": 1') == 2
