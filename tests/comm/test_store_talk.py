"""Words through a store: every rank's reach the first, the first one's reach all, and nothing stays behind."""

from __future__ import annotations

import datetime
import threading

import pytest
from torch.distributed import HashStore, TCPStore

from weft.comm import store as module
from weft.comm.store import StoreChannel, StoreKey, StoreReports
from weft.errors import CheckpointError, CommError, WeftWarning

SECRET = b"of these ranks alone"


def speak(number: int, act, open_store) -> list:
    """What `act(talk, rank)` returns or raises on each of `number` ranks, threads of this process."""
    found: list = [None] * number

    def one(rank: int) -> None:
        try:
            found[rank] = act(StoreChannel(rank, number, open_store, StoreKey(SECRET)), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))


def test_all_words_come_to_the_first_and_its_answer_to_all(server):
    def act(talk, rank):
        said = [talk.gather(f"{rank}".encode()) for _ in range(3)]
        return said, [talk.on_first(lambda: {"sum": len(said)}) for _ in range(2)], talk.gather(b"")

    found = speak(4, act, lambda: server.clone())
    assert found[0] == ([[b"0", b"1", b"2", b"3"]] * 3, [{"sum": 3}] * 2, [b""] * 4)
    assert found[1:] == [([[]] * 3, [{"sum": 3}] * 2, [])] * 3
    # No message is left.
    assert not [key for key in server.list_keys() if key.startswith("weft/talk/")]


def test_what_the_first_raises_all_raise(server):
    def act(talk, rank):
        return talk.on_first(lambda: 1 / 0)

    first, *others = speak(3, act, lambda: server.clone())
    assert isinstance(first, ZeroDivisionError)
    assert [(type(one), str(one)) for one in others] == [
        (CheckpointError, "rank 0: ZeroDivisionError: division by zero")
    ] * 2


def test_a_late_word_is_waited_for(server, monkeypatch):
    monkeypatch.setattr(module, "_SLICE", datetime.timedelta(milliseconds=50))

    def act(talk, rank):
        if rank:
            threading.Event().wait(0.3)
        return talk.gather(b"x")

    assert speak(2, act, lambda: server.clone())[0] == [b"x", b"x"]


def test_a_lost_store_is_one_sentence():
    class Gone(HashStore):
        def set(self, *args):
            raise RuntimeError("connection reset by peer")

    with pytest.raises(CommError, match=r"rank 1 of 2 lost the other ranks while a checkpoint was saved \(connection"):
        StoreChannel(1, 2, Gone, StoreKey(SECRET)).gather(b"")


def test_requests_of_a_rank_do_not_grow_with_the_ranks():
    """8,192 ranks: one request a word; the first rank asks for 1,024 words at once."""

    class Counting(HashStore):
        requests = 0

        def set(self, *args):
            self.requests += 1
            return super().set(*args)

        def multi_get(self, keys):
            self.requests += 1
            return [StoreKey(SECRET).sign(key, b"x" * 250) for key in keys]

        def wait(self, *args):
            self.requests += 1

        def delete_key(self, key):
            return True

    last, first = Counting(), Counting()
    talk = StoreChannel(8191, 8192, lambda: last, StoreKey(SECRET))
    talk.gather(b"x" * 250)
    assert last.requests == 1
    assert len(StoreChannel(0, 8192, lambda: first, StoreKey(SECRET)).gather(b"x" * 250)) == 8192
    assert first.requests == 16


def test_a_forged_message_is_ignored_until_the_rank_has_sent_its_own(server):
    """As another user of the machine does it, who wrote to the next slots before the ranks did."""
    for turn in (1, 2):
        for key in (f"weft/talk/1/{turn}", f"weft/talk/1/{turn}/1"):
            server.set(key, '{"value": "/tmp/stolen"}')

    def act(talk, rank):
        return talk.gather(b"own"), talk.on_first(lambda: ".tmp-own")

    with pytest.warns(WeftWarning, match="store key weft/talk/1/") as warned:
        first, second = speak(2, act, lambda: server.clone())
    assert first == ([b"own", b"own"], ".tmp-own")
    assert second == ([], ".tmp-own")
    assert "not signed by a rank of this run" in str(warned[0].message)


@pytest.mark.filterwarnings("ignore:store key")
@pytest.mark.parametrize(
    "stored",
    [
        b'{"value": "/tmp/stolen"}',
        b"",
        b"0" * 64 + b'{"value": 1}',
        StoreKey(b"another run").sign("weft/talk/1/1", b'{"value": 1}'),
        # A true message, moved to another slot, or with another split of key and text.
        StoreKey(SECRET).sign("weft/talk/1/2", b'{"value": 1}'),
        StoreKey(SECRET).sign("weft/talk/1/1{", b'"value": 1}'),
        b"\xff" * 100,
    ],
)
def test_a_message_that_stays_forged_is_refused_by_its_key(server, monkeypatch, stored):
    monkeypatch.setattr(module, "_FORGED_S", 0.2)
    server.set("weft/talk/1/1", stored)
    talk = StoreChannel(1, 2, lambda: server.clone(), StoreKey(SECRET))
    with pytest.raises(CommError, match=r"^store key weft/talk/1/1: the value is not signed by a rank of this run"):
        talk.on_first(lambda: None)


@pytest.mark.filterwarnings("ignore:store key")
def test_reports_of_others_and_old_ones_are_ignored(server):
    first, second = (StoreReports(rank, 2, lambda: server.clone(), StoreKey(SECRET)) for rank in range(2))
    second.post("old")
    assert first.read() == ["", "old"]
    before = server.get("weft/figures/1")
    second.post("new")
    assert first.read() == ["", "new"]
    server.set("weft/figures/0", before)  # of another rank
    server.set("weft/figures/1", before)  # of another time
    assert first.read() == ["", "new"]
    server.set("weft/figures/1", '{"step": 7}')
    assert first.read() == ["", "new"]
