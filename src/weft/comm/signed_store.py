"""Signatures of the messages that ranks write to their store.

The store has no password: every process that reaches its port can list, read and overwrite its keys. Each message of
Weft therefore carries an HMAC-SHA256 of its key and its text, with a secret that all ranks of one process group share.
`weft train` passes the secret to its ranks over a socket that checks the client's user. Under torchrun and srun, rank 0
draws it and broadcasts it over the process group, whose connections are not in the store.

Data that torch stores there (addresses of gloo, NCCL's id) is not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import warnings
import weakref
from collections import Counter

import torch
import torch.distributed as dist

from weft.comm.private_torch import as_bytes, broadcast
from weft.errors import CommError, WeftWarning

_SECRET_BYTES = 32
_SIGNATURE_LENGTH = 64
#: The key of each process group of this process. A key does not outlive its group.
_keys: list[tuple[weakref.ref[dist.ProcessGroup], StoreKey]] = []


class StoreKey:
    """Signs messages and checks signatures. A signature is bound to the message's key in the store. secret: shared by
    all ranks, and by no other process.
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
        """Return a message as it is stored under the key `name`."""
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
    """Return the key of the current process group. The first call is a `share_store_key` on all ranks."""
    group = dist.group.WORLD
    _keys[:] = [one for one in _keys if one[0]() is not None]
    return next((key for of, key in _keys if of() is group), None) or share_store_key()


def share_store_key(given: str = "", common: bytes = b"") -> StoreKey:
    """Return a new key of the current process group. All ranks call it; a collective unless a secret is given.

    given: hex digits of the secret, if every rank has it already. common: settings that this rank received before there
    was a group. They must be equal on all ranks.

    Raises:
        CommError: if `common` differs from rank 0's, or if the ranks cannot be reached.
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
