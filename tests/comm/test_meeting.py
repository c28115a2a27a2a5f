"""Meetings of replicas: who takes part, when one counts, and the link that carries it."""

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


class Told:
    """Replicas that speak to one state, by a clock of the test's own."""

    def __init__(self, replicas: int = 2, timeout_s: float = 10.0):
        self.rounds, self.now = RendezvousRounds(replicas, timeout_s), 0.0
        self.anchors = dict.fromkeys(range(replicas), (0, 7))
        self.sessions = dict.fromkeys(range(replicas), 1)

    def say(self, replica: int, say: str, **more):
        number, token = self.anchors[replica]
        said = {"say": say, "replica": replica, "session": self.sessions[replica], "number": number, "token": token}
        return self.rounds.handle({**said, "step": 50, "loss": 1.0, **more}, self.now)

    def arrive(self, replica: int, step: int = 50, layout: str = "2 tensors"):
        return self.say(replica, "arrive", doors=[f"h:{replica}"], layout=layout, step=step)

    def take(self, replica: int, meeting) -> None:
        self.anchors[replica] = meeting["number"], meeting["token"]


def test_all_who_arrive_meet_at_once_and_it_counts_when_all_say_so():
    told = Told()
    assert told.arrive(0) == {"do": "wait"}
    meeting = told.arrive(1)
    assert meeting["do"] == "meet"
    assert meeting["members"] == meeting["givers"] == [0, 1]
    assert told.arrive(0) == meeting
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "wait"}
    assert told.say(1, "done", id=meeting["id"], ok=True) == {"do": "commit"}
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "commit"}


def test_who_is_late_is_left_out_and_joins_the_next_meeting_without_giving():
    told = Told()
    told.say(1, "beat")
    told.arrive(0)
    told.now = 9.0
    told.say(1, "beat")  # it lives, and is slow
    assert told.arrive(0) == {"do": "wait"}
    told.now = 10.5
    meeting = told.arrive(0)
    assert meeting["members"] == [0]
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "commit"}
    told.take(0, meeting)
    assert told.arrive(1) == {"do": "wait"}, "the newest anchor is with one that trains"
    assert told.say(1, "beat")["behind"]
    assert not told.say(0, "beat")["behind"]
    meeting = told.arrive(0, step=100)
    assert (meeting["members"], meeting["givers"], meeting["step"]) == ([0, 1], [0], 100)


def test_nobody_waits_twice_for_one_that_is_lost():
    told = Told()
    told.arrive(0)
    told.now = 11.0
    meeting = told.arrive(0)
    told.say(0, "done", id=meeting["id"], ok=True)
    told.take(0, meeting)
    told.now = 60.0
    assert told.arrive(0)["members"] == [0]


def test_a_failed_exchange_counts_for_none_of_them():
    told = Told()
    told.arrive(0)
    meeting = told.arrive(1)
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "wait"}
    assert told.say(1, "done", id=meeting["id"], ok=False) == {"do": "abort"}
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "abort"}
    told.arrive(0)
    assert told.arrive(1)["number"] == 1, "they meet again, from the same anchor"


def test_a_member_that_never_says_how_it_went_ends_the_meeting():
    told = Told()
    told.arrive(0)
    meeting = told.arrive(1)
    told.say(0, "done", id=meeting["id"], ok=True)
    told.now = 10.5
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "abort"}
    assert told.say(1, "done", id=meeting["id"], ok=True) == {"do": "abort"}, "it comes back, and must not commit"


def test_a_member_that_starts_again_ends_the_meeting():
    told = Told()
    told.arrive(0)
    meeting = told.arrive(1)
    told.sessions[1] = 2
    told.say(1, "beat")
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "abort"}


def test_where_the_newest_anchor_is_lost_the_next_newest_goes_on():
    told = Told(3)
    told.anchors = {0: (5, 1), 1: (4, 2), 2: (4, 2)}
    for replica in range(3):
        told.say(replica, "beat")
    assert told.arrive(1) == {"do": "wait"}
    assert told.arrive(2) == {"do": "wait"}
    told.now = 9.0
    assert told.arrive(1) == {"do": "wait"}
    assert told.arrive(2) == {"do": "wait"}
    told.now = 11.0  # 0 has not been heard for 11 s
    meeting = told.arrive(1)
    assert told.arrive(2) == meeting
    assert (meeting["members"], meeting["givers"], meeting["number"]) == ([1, 2], [1, 2], 5)


def test_who_is_asked_to_stop_leaves_and_ends_the_meeting_that_it_was_to_join():
    told = Told()
    told.arrive(0)
    told.say(0, "leave")
    assert told.arrive(1) == {"do": "wait"}, "0 lives, and does not wait any more"
    meeting = told.arrive(0)
    assert meeting["members"] == [0, 1]
    told.say(1, "leave")
    assert told.say(0, "done", id=meeting["id"], ok=True) == {"do": "abort"}


def test_all_begin_once_each_stands_before_its_first_step_or_has_ended():
    told = Told()
    assert not told.say(0, "beat", begins=True)["begin"]
    assert not told.say(1, "beat", begins=False)["begin"], "it still reads its weights"
    assert told.say(1, "beat", begins=True)["begin"]
    told.sessions[1] = 2
    assert told.say(1, "beat", begins=False)["begin"], "who starts again is not waited for"
    told = Told()
    told.say(0, "end", where="runs/a", begins=False)
    assert told.say(1, "beat", begins=True)["begin"]


def test_the_place_is_over_once_all_have_ended_or_fell_silent():
    told = Told()
    assert told.rounds.is_over(0.0), "nobody has come yet"
    told.say(0, "beat")
    told.say(1, "beat")
    told.say(0, "end", where="runs/a")
    assert not told.rounds.is_over(5.0)
    assert told.rounds.is_over(10.5), "1 has not been heard for 10.5 s"


def test_other_models_do_not_meet_and_who_comes_after_the_end_is_told_where_the_model_is():
    told = Told()
    told.arrive(0)
    assert told.arrive(1, layout="3 tensors")["do"] == "refuse"
    told = Told()
    told.anchors[0] = (3, 9)
    told.say(0, "end", where="runs/a", step=200)
    found = told.arrive(1)
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


def axis_of(doors, place: int, meeting: int = 5, timeout_s: float = 5.0) -> tuple[Axis, SocketLink]:
    calls = doors[place].join(meeting, place, [door.address for door in doors], timeout_s)
    link = SocketLink(calls, place, timeout_s, lambda other: True)
    group, size = object(), len(doors)
    axis = Axis("dp_replicate", size, place, tuple(range(size)), group, links={(group, "cpu"): link})
    return axis, link


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_sums_over_sockets_have_the_bits_of_the_tree(size, wire):
    doors = [PeerListener("127.0.0.1") for _ in range(size)]
    parts = [torch.randn(40_001, generator=torch.Generator().manual_seed(place)) for place in range(size)]
    found: dict[int, torch.Tensor] = {}

    def body(place: int) -> None:
        axis, link = axis_of(doors, place)
        own = parts[place].clone()
        broadcast(first := parts[place].clone(), axis, 1)
        assert torch.equal(first, parts[1])
        coder = Coders(find_wire(wire))["a"] if wire else None
        all_reduce(own, axis, wire=coder)
        found[place] = own
        link.close()

    assert not run_all([lambda place=place: body(place) for place in range(size)])
    wanted = parts[0] + parts[1] + (parts[2] if size == 3 else 0)
    for place in range(size):
        assert torch.equal(found[place], found[0])
        torch.testing.assert_close(found[place], wanted, rtol=0, atol=0.2 if wire else 0)
    for door in doors:
        door.close()


def test_a_member_that_goes_or_stands_still_is_an_error_in_time():
    doors = [PeerListener("127.0.0.1") for _ in range(2)]
    said: list[str] = []

    def stays(place: int) -> None:
        axis, link = axis_of(doors, place, timeout_s=0.3)
        with pytest.raises(CommError, match="dp_replicate") as error:
            all_reduce(torch.ones(1 << 20), axis)
        said.append(str(error.value))
        link.close()

    def goes(place: int) -> None:
        axis_of(doors, place)[1].close()

    def stands(place: int) -> None:
        link = axis_of(doors, place)[1]
        threading.Event().wait(1.0)
        link.close()

    assert not run_all([lambda: stays(0), lambda: goes(1)])
    assert not run_all([lambda: stays(0), lambda: stands(1)])
    assert "nothing came or went for 0.3 s" in said[1]
    with pytest.raises(ConnectionRefusedError):
        doors[0].join(6, 0, [doors[0].address, "127.0.0.1:1"], 0.3)
    for door in doors:
        door.close()


def test_the_place_answers_and_a_port_that_is_taken_is_one_sentence():
    place = RendezvousServer("127.0.0.1", 0, 2, 5.0, "the key")
    line = RendezvousClient(place.address, 0, 1, "the key")
    answer = line.ask("beat", number=0, token=1, step=3, loss=2.5)
    assert answer == {"do": "go on", "behind": False, "begin": False, "replicas": {"0": [3, 2.5]}}
    with pytest.raises(ConnectionResetError):
        line.ask("beat")  # half of what is to be said
    stranger = RendezvousClient(place.address, 0, 2, "another key")
    with pytest.raises(ConfigError, match=r"^launch.meeting_key: the rendezvous at 127.0.0.1:\d+ has anot"):
        stranger.ask("beat", number=9, token=1, step=3, loss=2.5)
    host, _, port = place.address.rpartition(":")
    text = b'{"say": "beat"}'
    said_before = hmac.new(b"the key", b"the number of another call asks " + text, "sha256").hexdigest().encode()
    with socket.create_connection((host, int(port))) as call:
        call.recv(64)
        call.sendall(said_before + b" " + text + b"\n")
        assert call.recv(64) == b"wrong key\n"
    assert line.ask("beat", number=0, token=1, step=3, loss=2.5) == answer  # and what they said was not heard
    assert address_towards(place.address) == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"^launch.meet_at=nowhere.invalid:1: this machine cannot resolve or"):
        address_towards("nowhere.invalid:1")
    with pytest.raises(LaunchError, match=r"^launch.meet_at=127.0.0.1:\d+: this machine cannot listen there"):
        RendezvousServer("127.0.0.1", int(place.address.rpartition(":")[2]), 2, 5.0, "")
    place.close()
    with pytest.raises(ConnectionRefusedError):
        line.ask("beat", number=0, token=1, step=3, loss=2.5)
