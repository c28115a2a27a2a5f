"""Control messages between ranks over their store, for a thread that must not issue collectives.

Sending costs one store request, independent of the number of ranks. Rank 0 reads all messages in batches of 1,024 keys.
A second process group would need a socket for every other rank. A `StoreKey` signs all messages.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import secrets
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft import env
from weft.comm.private_torch import as_bytes, broadcast, connect_store
from weft.env import RankEnv
from weft.errors import CheckpointError, CommError, WeftError, WeftWarning
from weft.private_torch import Store

_SECRET_BYTES = 32
_SIGNATURE_LENGTH = 64
#: The key of each process group of this process. A key does not outlive its group.
_keys: list[tuple[weakref.ref[dist.ProcessGroup], StoreKey]] = []


class StoreKey:
    """Signs messages and checks signatures. A signature is bound to the message's key in the store.

    secret: shared by all ranks, and by no other process.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._numbers = Counter[str]()
        self._warned: set[str] = set()

    def next_number(self, purpose: str) -> int:
        """Return 1, 2, 3, ... for calls with the same purpose, equal on all ranks that make the same calls."""
        self._numbers[purpose] += 1
        return self._numbers[purpose]

    def sign(self, name: str, message: str | bytes) -> bytes:
        """Return the signed message, to be stored under the key `name`."""
        text = message.encode() if isinstance(message, str) else message
        return self._signature(name, text) + text

    def opened(self, name: str, stored: bytes) -> bytes | None:
        """Return the message stored under the key `name`, or None with a warning if its signature is wrong."""
        signature, text = stored[:_SIGNATURE_LENGTH], stored[_SIGNATURE_LENGTH:]
        if hmac.compare_digest(signature, self._signature(name, text)):
            return text
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{forged(name)} It is ignored.", WeftWarning, stacklevel=2)
        return None

    def _signature(self, name: str, text: bytes) -> bytes:
        # The digest of the name has a fixed length, so no other split of name and text gives the same bytes.
        bound = hashlib.sha256(name.encode()).digest() + text
        return hmac.new(self._secret, bound, hashlib.sha256).hexdigest().encode()


def forged(name: str) -> str:
    """Return a sentence about a stored value without a valid signature."""
    return (
        f"store key {name}: the value is not signed by a rank of this run. Another process that reaches the ranks' "
        "store wrote it."
    )


def store_key() -> StoreKey:
    """Return the key of the current process group. The first call creates it by `share_store_key`, a collective."""
    group = dist.group.WORLD
    _keys[:] = [one for one in _keys if one[0]() is not None]
    return next((key for of, key in _keys if of() is group), None) or share_store_key()


def share_store_key(given: str = "", common: bytes = b"") -> StoreKey:
    """Return a new key of the current process group. Collective, unless a secret is given.

    given: hex digits of the secret, if every rank has it already. common: settings that this rank received before there
    was a group. They must be equal on all ranks. Raises CommError if `common` differs from rank 0's, or if the ranks
    cannot be reached.
    """
    group = dist.group.WORLD
    assert group is not None, "the ranks have not joined"
    secret = bytes.fromhex(given) or _broadcast_secret(group, hashlib.sha256(common).digest())
    key = StoreKey(secret)
    _keys[:] = [(of, one) for of, one in _keys if of() not in (None, group)] + [(weakref.ref(group), key)]
    return key


def _broadcast_secret(group: dist.ProcessGroup, common: bytes) -> bytes:
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(_SECRET_BYTES) + common), dtype=torch.uint8)
    try:
        broadcast(drawn, src=0, group=group, async_op=True).wait()
    except (dist.DistError, RuntimeError) as error:
        raise CommError(f"the ranks could not agree on a key for their store: {error}.") from error
    received = as_bytes(drawn)
    if received[_SECRET_BYTES:] != common:
        raise CommError(
            f"rank {dist.get_rank()} received other settings than rank 0 sent. Another process wrote to the ranks' "
            "store before training began. Start the run again, on a network where only the ranks reach that port."
        )
    return received[:_SECRET_BYTES]


# Control messages.


#: Time (s) that one request waits for missing messages. It is repeated without a limit.
_SLICE = datetime.timedelta(seconds=60)
#: Messages per request.
_AT_ONCE = 1024
#: Time (s) that a reader waits for a signed message to replace an unsigned one, and its poll interval.
_FORGED_S, _LOOK_AGAIN_S = 30.0, 0.1


class StoreChannel:
    """Ordered control messages between all ranks.

    Every rank constructs the channel and calls the same methods in the same order, from one thread. If a rank exits,
    the others block until the launcher ends the job. Methods raise CommError if the store is lost, or if a message is
    not signed.

    open_store: opens a store connection for this thread, or None to connect to the ranks' store. key: signs the
    messages, or None to use the key of the process group.
    """

    def __init__(
        self, rank: int, number: int, open_store: Callable[[], Store] | None = None, key: StoreKey | None = None
    ):
        self._rank, self._number = rank, number
        self._open_store = open_store or (lambda: connect_store(_SLICE))
        self._key = key or store_key()
        self._store: Store | None = None
        self._turn = 0
        self._spent: list[str] = []
        # Counted here and not in the store, where other processes could change the count.
        self._prefix = f"weft/talk/{self._key.next_number('talk')}"

    def gather(self, record: bytes) -> list[bytes]:
        """Return every rank's bytes on rank 0, in rank order. Other ranks return [] without waiting."""
        turn = self._next()
        with self._errors_if_lost() as store:
            if self._rank:
                _put(store, self._key, f"{turn}/{self._rank}", record)
                return []
            keys = [f"{turn}/{rank}" for rank in range(1, self._number)]
            found = [record, *self._read(store, keys)]
            # A rank that has sent its message has read all earlier ones.
            for key in (*keys, *self._spent):
                store.delete_key(key)
            self._spent.clear()
        return found

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Run `act` on rank 0 and return its JSON value on every rank.

        Raises:
            CheckpointError: on other ranks, with the message of the error that `act` raised on rank 0. Rank 0 raises
                the error itself.
        """
        turn = self._next()
        if self._rank:
            with self._errors_if_lost() as store:
                said = json.loads(self._read(store, [turn])[0])
            if "error" in said:
                raise CheckpointError(said["error"])
            return said["value"]
        try:
            said = {"value": act()}
        except BaseException as error:
            told = str(error) if isinstance(error, WeftError) else f"rank 0: {type(error).__name__}: {error}"
            self._post(turn, {"error": told})
            raise
        self._post(turn, said)
        return said["value"]

    def _post(self, key: str, said: dict[str, Any]) -> None:
        with self._errors_if_lost() as store:
            _put(store, self._key, key, json.dumps(said).encode())
            self._spent.append(key)

    def _next(self) -> str:
        self._turn += 1
        return f"{self._prefix}/{self._turn}"

    def _read(self, store: Store, keys: Sequence[str]) -> list[bytes]:
        """Wait for messages without a time limit, and return them."""
        untyped: Any = store
        found: list[bytes] = []
        for first in range(0, len(keys), _AT_ONCE):
            some = list(keys[first : first + _AT_ONCE])
            while not _all_set(store, some):
                pass
            found += [self._opened(store, key, one) for key, one in zip(some, untyped.multi_get(some), strict=True)]
        return found

    def _opened(self, store: Store, key: str, stored: bytes) -> bytes:
        """Wait until the stored value has a valid signature, and return its message.

        The rank that writes this key replaces forged values. Raises CommError if no valid value arrives in time.
        """
        end = time.monotonic() + _FORGED_S
        while (text := self._key.opened(key, stored)) is None:
            if time.monotonic() > end:
                raise CommError(f"{forged(key)} Start the run where only its ranks reach the store.")
            time.sleep(_LOOK_AGAIN_S)
            stored = store.get(key)
        return text

    @contextmanager
    def _errors_if_lost(self) -> Generator[Store]:
        try:
            if self._store is None:
                self._store = self._open_store()
            yield self._store
        except (dist.DistError, RuntimeError) as error:
            raise CommError(
                f"rank {self._rank} of {self._number} lost the other ranks while a checkpoint was saved ({error}). "
                "The log of one of them has the reason."
            ) from error


def _all_set(store: Store, keys: list[str]) -> bool:
    """Wait up to 60 s for all messages. Return False if some are still missing."""
    try:
        store.wait(keys, _SLICE)
    except dist.DistStoreError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True


def _put(store: Store, signing: StoreKey, key: str, message: bytes) -> None:
    store.set(key, signing.sign(key, message))  # pyright: ignore[reportArgumentType]  # accepts bytes


# A message of rank 0 that the other ranks receive before there is a process group.

#: First and last poll interval (s) of a waiting rank.
_ASK_S = (0.02, 1.0)
#: Time (s) that rank 0, which may host the store, waits for the others to receive its message.
_STAY_S = 10.0


class RankZeroMessage:
    """One message of rank 0 to all others. Its methods raise CommError if the store is lost.

    store: the store of all ranks, from `weft.comm.mesh.open_store`.
    """

    def __init__(self, place: RankEnv, store: Store):
        self._place, self._store = place, store
        # A launcher that restarts its ranks may keep the store.
        self._key = f"weft/word/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def send(self, word: bytes) -> None:
        """Send rank 0's message without waiting."""
        try:
            self._store.set(self._key, word)  # pyright: ignore[reportArgumentType]  # accepts bytes; the stub declares str
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(error) from error

    def receive(self) -> bytes:
        """Wait on another rank for rank 0's message, without a time limit, and return it."""
        pause = _ASK_S[0]
        try:
            while not self._store.check([self._key]):
                time.sleep(pause)
                pause = min(2 * pause, _ASK_S[1])
            word = self._store.get(self._key)
            self._store.add(f"{self._key}/heard", 1)
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(error) from error
        return word

    def wait_until_received(self) -> None:
        """Wait on rank 0 until all others have received the message, 10 s at most. Call it before an exit on error."""
        end = time.monotonic() + _STAY_S
        try:
            while self._store.add(f"{self._key}/heard", 0) < self._place.world_size - 1 and time.monotonic() < end:
                time.sleep(_ASK_S[0])
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommError:
        place = self._place
        return CommError(
            f"rank {place.rank} of {place.world_size} lost the others at {place.master_addr}:{place.master_port} "
            f"before training began: {error}. The log of one of them has the reason."
        )


# Reports in the ranks' store: each rank stores a small one, and rank 0 reads them all.

_TIMEOUT = datetime.timedelta(seconds=5)
_PREFIX = "weft/figures/"


class StoreReports:
    """Reports of all ranks in the store. They are signed and numbered, so no other process can forge or replay one.

    open_store: opens a store connection, or None to connect to the ranks' store. key: signs the reports, or None to use
    the key of the process group.
    """

    def __init__(
        self, rank: int, number: int, open_store: Callable[[], Store] | None = None, key: StoreKey | None = None
    ):
        self._rank, self._number = rank, number
        self._open_store = open_store or (lambda: connect_store(_TIMEOUT))
        self._key = key or store_key()
        self._store: Store | None = None
        self._all_set = False
        self._num_posted = 0
        self._newest: dict[int, tuple[int, str]] = {}

    def post(self, text: str) -> None:
        """Replace this rank's report."""
        self._num_posted += 1
        name = f"{_PREFIX}{self._rank}"
        stored = self._key.sign(name, f"{self._num_posted} {text}")
        self._open().set(name, stored)  # pyright: ignore[reportArgumentType]  # accepts bytes

    def read(self) -> Sequence[str]:
        """Return the newest report of every rank, or "" for a rank without one."""
        store = self._open()
        untyped: Any = store
        keys = [f"{_PREFIX}{rank}" for rank in range(self._number)]
        if not self._all_set:
            # A request would wait for a missing key. An existing key keeps its value.
            for key in keys:
                store.compare_set(key, "", "")
            self._all_set = True
        found: list[bytes] = []
        for first in range(0, self._number, _AT_ONCE):
            found += untyped.multi_get(keys[first : first + _AT_ONCE])
        for rank, stored in enumerate(found):
            self._take(rank, keys[rank], stored)
        return [self._newest.get(rank, (0, ""))[1] for rank in range(self._number)]

    def _take(self, rank: int, key: str, stored: bytes) -> None:
        """Store a report if it is signed and newer than the last one."""
        text = self._key.opened(key, stored) if stored else None
        if text is None:
            return
        number, _, report = text.decode(errors="replace").partition(" ")
        if int(number) > self._newest.get(rank, (0, ""))[0]:
            self._newest[rank] = int(number), report

    def _open(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store
