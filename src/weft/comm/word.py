"""The first rank's word, heard by the others before there is a process group.

Ranks that torchrun or srun started must not touch the run's folder before one of them holds it. That one may tokenise
for hours, so the others ask the ranks' common store now and then: a collective would run into its time limit.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from weft import env
from weft.env import RankEnv
from weft.errors import CommError
from weft.private_torch import Store

#: How often (s) a rank asks, at first and at last.
_ASK_S = (0.02, 1.0)
#: How long (s) the first rank, which may host the store, stays for the others to hear its word.
_STAY_S = 10.0


class FirstWord:
    """One message of rank 0 to all others. Its methods raise CommError when the store is lost."""

    def __init__(self, place: RankEnv, store: Store):
        """store: of all ranks, as `weft.mesh.open_store` gives it."""
        self._place, self._store = place, store
        # A launcher that restarts its ranks may keep the store.
        self._key = f"weft/word/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def say(self, word: bytes) -> None:
        """Say rank 0's word; returns at once."""
        try:
            self._store.set(self._key, word)  # pyright: ignore[reportArgumentType]  # bytes are taken too; the stub says str
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(error) from error

    def hear(self) -> bytes:
        """Wait for rank 0's word, as long as it takes, on another rank."""
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

    def wait_heard(self) -> None:
        """Wait on rank 0 until all others have heard, at most 10 s; call it before leaving after a refusal."""
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
            f"before training began: {error}. The log of one of them says why."
        )
