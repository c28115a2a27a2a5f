"""What is kept in memory between forward and backward, and where."""

from __future__ import annotations

from weft.memory.activations import offload_activations
from weft.memory.host_copy import HostCopies
from weft.memory.host_link import Waitable
from weft.memory.offload import Host, HostPart, choose, offload_lines, open_host, shard_offload, step_on_host
from weft.memory.opaque import Handle, Opaque
from weft.memory.pool import MOST_OF_HOST
from weft.memory.recompute import Recompute, apply_recompute, recompute_of

__all__ = [
    "Handle",
    "Host",
    "HostCopies",
    "HostPart",
    "MOST_OF_HOST",
    "Opaque",
    "Recompute",
    "Waitable",
    "apply_recompute",
    "choose",
    "offload_activations",
    "offload_lines",
    "open_host",
    "recompute_of",
    "shard_offload",
    "step_on_host",
]
