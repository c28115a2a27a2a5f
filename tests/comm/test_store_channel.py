"""`StoreChannel`: gather on rank 0, broadcast from rank 0, deleted keys and signed values."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from weft.comm import store as module
from weft.comm.store import StoreChannel, StoreKey, StoreReports
from weft.errors import CheckpointError, CommError, WeftWarning

SECRET = b"of these ranks alone"


def run_ranks(number: int, act, open_store) -> list:
    """Return the value or error of `act(channel, rank)` for each of `number` ranks, which are threads."""
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


def test_gather_reaches_rank_0_and_its_result_reaches_all(server):
    def act(channel, rank):
        gathered = [channel.gather(f"{rank}".encode()) for _ in range(3)]
        return gathered, [channel.on_first(lambda: {"sum": len(gathered)}) for _ in range(2)], channel.gather(b"")

    found = run_ranks(4, act, lambda: server.clone())
    assert found[0] == ([[b"0", b"1", b"2", b"3"]] * 3, [{"sum": 3}] * 2, [b""] * 4)
    assert found[1:] == [([[]] * 3, [{"sum": 3}] * 2, [])] * 3
    # All message keys were deleted.
    assert not [key for key in server.list_keys() if key.startswith("weft/talk/")]


def test_error_on_rank_0_is_raised_on_all_ranks(server):
    def act(channel, rank):
        return channel.on_first(lambda: 1 / 0)

    first, *others = run_ranks(3, act, lambda: server.clone())
    assert isinstance(first, ZeroDivisionError)
    assert [(type(one), str(one)) for one in others] == [
        (CheckpointError, "rank 0: ZeroDivisionError: division by zero")
    ] * 2


def test_gather_waits_for_a_late_message(server, monkeypatch):
    monkeypatch.setattr(module, "_SLICE", datetime.timedelta(milliseconds=50))

    def act(channel, rank):
        if rank:
            threading.Event().wait(0.3)
        return channel.gather(b"x")

    assert run_ranks(2, act, lambda: server.clone())[0] == [b"x", b"x"]


def test_lost_store_raises_comm_error():
    class Gone(HashStore):
        def set(self, *args):
            raise RuntimeError("connection reset by peer")

    with pytest.raises(CommError, match=r"rank 1 of 2 lost the other ranks while a checkpoint was saved \(connection"):
        StoreChannel(1, 2, Gone, StoreKey(SECRET)).gather(b"")


def test_requests_per_rank_do_not_grow_with_world_size():
    """Check with 8,192 ranks: sending takes one request, and rank 0 reads 1,024 messages per request."""

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
    channel = StoreChannel(8191, 8192, lambda: last, StoreKey(SECRET))
    channel.gather(b"x" * 250)
    assert last.requests == 1
    assert len(StoreChannel(0, 8192, lambda: first, StoreKey(SECRET)).gather(b"x" * 250)) == 8192
    assert first.requests == 16


def test_forged_message_is_ignored_until_the_signed_one_is_sent(server):
    """Forge messages as another user of the machine could: in the next slots, before the ranks write them."""
    for turn in (1, 2):
        for key in (f"weft/talk/1/{turn}", f"weft/talk/1/{turn}/1"):
            server.set(key, '{"value": "/tmp/stolen"}')

    def act(channel, rank):
        if rank == 1:
            time.sleep(0.5)  # so that rank 0 reads the forged message first
        return channel.gather(b"own"), channel.on_first(lambda: ".tmp-own")

    with pytest.warns(WeftWarning, match="store key weft/talk/1/") as warned:
        first, second = run_ranks(2, act, lambda: server.clone())
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
        # A signed message in another slot, or with another split of key and text.
        StoreKey(SECRET).sign("weft/talk/1/2", b'{"value": 1}'),
        StoreKey(SECRET).sign("weft/talk/1/1{", b'"value": 1}'),
        b"\xff" * 100,
    ],
)
def test_message_that_stays_forged_raises_with_its_key(server, monkeypatch, stored):
    monkeypatch.setattr(module, "_FORGED_S", 0.2)
    server.set("weft/talk/1/1", stored)
    channel = StoreChannel(1, 2, lambda: server.clone(), StoreKey(SECRET))
    with pytest.raises(CommError, match=r"^store key weft/talk/1/1: the value is not signed by a rank of this run"):
        channel.on_first(lambda: None)


@pytest.mark.filterwarnings("ignore:store key")
def test_forged_and_replayed_reports_are_ignored(server):
    first, second = (StoreReports(rank, 2, lambda: server.clone(), StoreKey(SECRET)) for rank in range(2))
    second.post("old")
    assert first.read() == ["", "old"]
    before = server.get("weft/figures/1")
    second.post("new")
    assert first.read() == ["", "new"]
    server.set("weft/figures/0", before)  # signed by another rank
    server.set("weft/figures/1", before)  # replayed
    assert first.read() == ["", "new"]
    server.set("weft/figures/1", '{"step": 7}')
    assert first.read() == ["", "new"]
