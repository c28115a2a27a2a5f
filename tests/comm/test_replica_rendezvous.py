"""Rendezvous of replicas: members of a round, when it is committed, and the socket link between them."""

from __future__ import annotations

import hmac
import socket
import threading

import pytest
import torch

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.mesh import Axis
from weft.comm.replica_client import PeerListener, SocketLink
from weft.comm.replica_rendezvous import RendezvousClient, RendezvousRounds, RendezvousServer, address_towards
from weft.comm.wire.coder import Coders
from weft.comm.wire.wire_format import find_wire
from weft.errors import CommError, ConfigError, LaunchError


class Replicas:
    """Replicas that send messages to one `RendezvousRounds`, with a clock that the test sets."""

    def __init__(self, replicas: int = 2, timeout_s: float = 10.0):
        self.rounds, self.now = RendezvousRounds(replicas, timeout_s), 0.0
        self.anchors = dict.fromkeys(range(replicas), (0, 7))
        self.sessions = dict.fromkeys(range(replicas), 1)

    def send(self, replica: int, kind: str, **more):
        number, token = self.anchors[replica]
        message = {"say": kind, "replica": replica, "session": self.sessions[replica], "number": number, "token": token}
        return self.rounds.handle({**message, "step": 50, "loss": 1.0, **more}, self.now)

    def join_round(self, replica: int, step: int = 50, layout: str = "2 tensors"):
        return self.send(replica, "arrive", doors=[f"h:{replica}"], layout=layout, step=step)

    def adopt_anchor(self, replica: int, round_) -> None:
        self.anchors[replica] = round_["number"], round_["token"]


def test_round_begins_once_all_join_and_commits_once_all_succeed():
    replicas = Replicas()
    assert replicas.join_round(0) == {"do": "wait"}
    round_ = replicas.join_round(1)
    assert round_["do"] == "meet"
    assert round_["members"] == round_["givers"] == [0, 1]
    assert replicas.join_round(0) == round_
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "wait"}
    assert replicas.send(1, "done", id=round_["id"], ok=True) == {"do": "commit"}
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "commit"}


def test_late_replica_is_skipped_and_joins_next_round_without_giving():
    replicas = Replicas()
    replicas.send(1, "beat")
    replicas.join_round(0)
    replicas.now = 9.0
    replicas.send(1, "beat")  # it is alive, but slow
    assert replicas.join_round(0) == {"do": "wait"}
    replicas.now = 10.5
    round_ = replicas.join_round(0)
    assert round_["members"] == [0]
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "commit"}
    replicas.adopt_anchor(0, round_)
    assert replicas.join_round(1) == {"do": "wait"}, "a replica that trains has the newest anchor"
    assert replicas.send(1, "beat")["behind"]
    assert not replicas.send(0, "beat")["behind"]
    round_ = replicas.join_round(0, step=100)
    assert (round_["members"], round_["givers"], round_["step"]) == ([0, 1], [0], 100)


def test_lost_replica_is_waited_for_only_once():
    replicas = Replicas()
    replicas.join_round(0)
    replicas.now = 11.0
    round_ = replicas.join_round(0)
    replicas.send(0, "done", id=round_["id"], ok=True)
    replicas.adopt_anchor(0, round_)
    replicas.now = 60.0
    assert replicas.join_round(0)["members"] == [0]


def test_failed_exchange_aborts_the_round_for_all():
    replicas = Replicas()
    replicas.join_round(0)
    round_ = replicas.join_round(1)
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "wait"}
    assert replicas.send(1, "done", id=round_["id"], ok=False) == {"do": "abort"}
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "abort"}
    replicas.join_round(0)
    assert replicas.join_round(1)["number"] == 1, "the next round starts from the same anchor"


def test_member_without_a_result_aborts_the_round():
    replicas = Replicas()
    replicas.join_round(0)
    round_ = replicas.join_round(1)
    replicas.send(0, "done", id=round_["id"], ok=True)
    replicas.now = 10.5
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "abort"}
    assert replicas.send(1, "done", id=round_["id"], ok=True) == {"do": "abort"}, "it reconnects, and must not commit"


def test_restarted_member_aborts_the_round():
    replicas = Replicas()
    replicas.join_round(0)
    round_ = replicas.join_round(1)
    replicas.sessions[1] = 2
    replicas.send(1, "beat")
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "abort"}


def test_next_newest_anchor_continues_if_the_newest_is_lost():
    replicas = Replicas(3)
    replicas.anchors = {0: (5, 1), 1: (4, 2), 2: (4, 2)}
    for replica in range(3):
        replicas.send(replica, "beat")
    assert replicas.join_round(1) == {"do": "wait"}
    assert replicas.join_round(2) == {"do": "wait"}
    replicas.now = 9.0
    assert replicas.join_round(1) == {"do": "wait"}
    assert replicas.join_round(2) == {"do": "wait"}
    replicas.now = 11.0  # no message from replica 0 for 11 s
    round_ = replicas.join_round(1)
    assert replicas.join_round(2) == round_
    assert (round_["members"], round_["givers"], round_["number"]) == ([1, 2], [1, 2], 5)


def test_leaving_replica_aborts_its_round():
    replicas = Replicas()
    replicas.join_round(0)
    replicas.send(0, "leave")
    assert replicas.join_round(1) == {"do": "wait"}, "replica 0 is alive, but no longer waits"
    round_ = replicas.join_round(0)
    assert round_["members"] == [0, 1]
    replicas.send(1, "leave")
    assert replicas.send(0, "done", id=round_["id"], ok=True) == {"do": "abort"}


def test_replicas_begin_once_each_is_ready_or_has_ended():
    replicas = Replicas()
    assert not replicas.send(0, "beat", begins=True)["begin"]
    assert not replicas.send(1, "beat", begins=False)["begin"], "it still loads its weights"
    assert replicas.send(1, "beat", begins=True)["begin"]
    replicas.sessions[1] = 2
    assert replicas.send(1, "beat", begins=False)["begin"], "the others do not wait for a replica that restarts"
    replicas = Replicas()
    replicas.send(0, "end", where="runs/a", begins=False)
    assert replicas.send(1, "beat", begins=True)["begin"]


def test_rendezvous_is_over_once_all_have_ended_or_timed_out():
    replicas = Replicas()
    assert replicas.rounds.is_over(0.0), "no replica has connected yet"
    replicas.send(0, "beat")
    replicas.send(1, "beat")
    replicas.send(0, "end", where="runs/a")
    assert not replicas.rounds.is_over(5.0)
    assert replicas.rounds.is_over(10.5), "no message from replica 1 for 10.5 s"


def test_other_layouts_are_refused_and_late_replicas_get_the_final_model():
    replicas = Replicas()
    replicas.join_round(0)
    assert replicas.join_round(1, layout="3 tensors")["do"] == "refuse"
    replicas = Replicas()
    replicas.anchors[0] = (3, 9)
    replicas.send(0, "end", where="runs/a", step=200)
    found = replicas.join_round(1)
    assert (found["do"], found["where"], found["step"], found["token"]) == ("over", "runs/a", 200, 9)


def run_all(bodies):
    errors = []

    def guarded(body):
        try:
            body()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def axis_of(listeners, rank: int, round_id: int = 5, timeout_s: float = 5.0) -> tuple[Axis, SocketLink]:
    calls = listeners[rank].join(round_id, rank, [one.address for one in listeners], timeout_s)
    link = SocketLink(calls, rank, timeout_s, lambda other: True)
    group, size = object(), len(listeners)
    axis = Axis("dp_replicate", size, rank, tuple(range(size)), group, links={(group, "cpu"): link})
    return axis, link


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_socket_link_sums_match_the_tree_sum(size, wire):
    listeners = [PeerListener("127.0.0.1") for _ in range(size)]
    parts = [torch.randn(40_001, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    found: dict[int, torch.Tensor] = {}

    def body(rank: int) -> None:
        axis, link = axis_of(listeners, rank)
        own = parts[rank].clone()
        broadcast(first := parts[rank].clone(), axis, 1)
        assert torch.equal(first, parts[1])
        coder = Coders(find_wire(wire))["a"] if wire else None
        all_reduce(own, axis, wire=coder)
        found[rank] = own
        link.close()

    assert not run_all([lambda rank=rank: body(rank) for rank in range(size)])
    expected = parts[0] + parts[1] + (parts[2] if size == 3 else 0)
    for rank in range(size):
        assert torch.equal(found[rank], found[0])
        torch.testing.assert_close(found[rank], expected, rtol=0, atol=0.2 if wire else 0)
    for one in listeners:
        one.close()


def test_closed_or_stalled_member_raises_within_the_timeout():
    listeners = [PeerListener("127.0.0.1") for _ in range(2)]
    errors: list[str] = []

    def waits(rank: int) -> None:
        axis, link = axis_of(listeners, rank, timeout_s=0.3)
        with pytest.raises(CommError, match="dp_replicate") as error:
            all_reduce(torch.ones(1 << 20), axis)
        errors.append(str(error.value))
        link.close()

    def closes(rank: int) -> None:
        axis_of(listeners, rank)[1].close()

    def stalls(rank: int) -> None:
        link = axis_of(listeners, rank)[1]
        threading.Event().wait(1.0)
        link.close()

    assert not run_all([lambda: waits(0), lambda: closes(1)])
    assert not run_all([lambda: waits(0), lambda: stalls(1)])
    assert "nothing came or went for 0.3 s" in errors[1]
    with pytest.raises(ConnectionRefusedError):
        listeners[0].join(6, 0, [listeners[0].address, "127.0.0.1:1"], 0.3)
    for one in listeners:
        one.close()


def test_server_rejects_wrong_keys_and_reports_used_ports():
    server = RendezvousServer("127.0.0.1", 0, 2, 5.0, "the key")
    client = RendezvousClient(server.address, 0, 1, "the key")
    answer = client.ask("beat", number=0, token=1, step=3, loss=2.5)
    assert answer == {"do": "go on", "behind": False, "begin": False, "replicas": {"0": [3, 2.5]}}
    with pytest.raises(ConnectionResetError):
        client.ask("beat")  # without the required fields
    stranger = RendezvousClient(server.address, 0, 2, "another key")
    with pytest.raises(ConfigError, match=r"^launch.meeting_key: the rendezvous at 127.0.0.1:\d+ has anot"):
        stranger.ask("beat", number=9, token=1, step=3, loss=2.5)
    host, _, port = server.address.rpartition(":")
    text = b'{"say": "beat"}'
    replayed = hmac.new(b"the key", b"the number of another call asks " + text, "sha256").hexdigest().encode()
    with socket.create_connection((host, int(port))) as call:
        call.recv(64)
        call.sendall(replayed + b" " + text + b"\n")
        assert call.recv(64) == b"wrong key\n"
    assert client.ask("beat", number=0, token=1, step=3, loss=2.5) == answer  # the rejected messages changed nothing
    assert address_towards(server.address) == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"^launch.meet_at=nowhere.invalid:1: this machine cannot resolve or"):
        address_towards("nowhere.invalid:1")
    with pytest.raises(LaunchError, match=r"^launch.meet_at=127.0.0.1:\d+: this machine cannot listen there"):
        RendezvousServer("127.0.0.1", int(server.address.rpartition(":")[2]), 2, 5.0, "")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        client.ask("beat", number=0, token=1, step=3, loss=2.5)
