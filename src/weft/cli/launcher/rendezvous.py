"""Where the ranks of one machine meet: one store in the launcher that listens on the loopback interface only.

torch's own rendezvous handlers open their stores on every interface, without a password. One machine needs neither.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from weft.env import LOOPBACK
from weft.mesh import loopback_store
from weft.private_torch import PrefixStore, Store


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent: rank 0 of 1, met at once. Its store serves the agent and the ranks.

    Raises OSError when the loopback interface gives no port.
    """

    def __init__(self, run_id: str):
        self._run_id = run_id
        # Port 0: the system chooses a free one, so two runs on one machine never meet.
        self._server = loopback_store(LOOPBACK, 0)
        self._store: Store = PrefixStore(run_id, self._server)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "weft"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._server.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other node."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
