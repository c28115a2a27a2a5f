"""Seconds of collectives by where their ranks lie: inside one scale-up domain, or over the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.machine.tables import Tables

Array = NDArray[np.float64]

#: Transfers of the whole buffer that a ring makes: 2 (n - 1)/n or (n - 1)/n times this.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
#: Share of the network that all-to-alls of many nodes lose to conflicts (arXiv-free: AutoParallel's H100 fit).
_ALL_TO_ALL_LOSS = 0.44


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a cluster, as far as collectives need them. Rates in bytes/s that programs reach.

    rack: devices of a rack, 0: the network is one. thinner: how many times the adapters of a rack carry what its links
    to other racks do.
    """

    link_rate: float
    link_alpha_s: float
    nic_rate: float
    nic_alpha_s: float
    half_bytes: float
    domain: int
    mesh: bool
    rack: int = 0
    thinner: float = 1.0

    @classmethod
    def of(cls, tables: Tables, devices_per_node: int, rack_nodes: int = 0, oversubscription: float = 1.0) -> Fabric:
        """Return the links that the tables describe; a node of fewer devices than a domain is a domain of its own.

        Args:
            tables: constants of the device.
            devices_per_node: of the cluster.
            rack_nodes: nodes of a rack; 0: there are none.
            oversubscription: of the links between racks.
        """
        domain = min(tables.link_domain, devices_per_node) if tables.link_domain <= 16 else tables.link_domain
        return cls(
            link_rate=tables.link_rate * tables.link_eff,
            link_alpha_s=tables.link_alpha_s,
            nic_rate=tables.nic_rate * tables.nic_eff,
            nic_alpha_s=tables.nic_alpha_s,
            half_bytes=tables.half_bytes,
            domain=max(1, domain),
            mesh=tables.link_mesh,
            rack=rack_nodes * devices_per_node,
            thinner=oversubscription,
        )

    def in_rack(self, n: Any, stride: Any) -> Array:
        """Count the ranks of a group of n, `stride` apart, that share a rack."""
        n = np.asarray(n, dtype=np.float64)
        return np.clip(self.rack // np.maximum(1, np.asarray(stride)), 1, n) if self.rack else n

    def inside(self, n: Any, stride: Any) -> Array:
        """Count the ranks of a group of n, `stride` apart, that share a scale-up domain."""
        return np.clip(self.domain // np.maximum(1, np.asarray(stride)), 1, np.asarray(n)).astype(np.float64)

    def ring_s(self, kind: str, size: Any, n: Any, stride: Any) -> Array:
        """Return the seconds of an all_reduce, all_gather or reduce_scatter of `size` unsharded bytes over n ranks.

        The groups beside it are taken to be at work at the same time, so that each device has its own share of the
        network.

        Args:
            kind: the collective.
            size: bytes of the unsharded buffer.
            n: ranks of a group.
            stride: ranks from one member of the group to the next.
        """
        n = np.asarray(n, dtype=np.float64)
        size = np.asarray(size, dtype=np.float64)
        passes = _PASSES[kind]
        inner = self.inside(n, stride)
        outer = np.ceil(n / inner)
        moved = passes * (n - 1) / n * size
        link = self.link_rate * np.where(self.mesh, (inner - 1) / max(1, self.domain - 1), 1.0)
        # A ring leaves each rack once, whatever nodes it has there: of a rack's rings that many times fewer leave it.
        near = self.in_rack(n, stride)
        nic = self.nic_rate * np.where(near < n, np.minimum(1.0, near / inner / self.thinner), 1.0)
        rate = np.where(outer > 1, np.minimum(np.maximum(link, nic), nic * inner), link)
        # Rings over few nodes, trees and their like over many.
        hops = np.minimum(outer - 1, (2 if kind == "all_reduce" else 8) * np.log2(np.maximum(2, outer)))
        alpha = self.link_alpha_s + np.where(outer > 1, self.nic_alpha_s * passes * hops, 0.0)
        ramp = 1.0 + np.sqrt(self.half_bytes / np.maximum(size, 1.0))
        return np.where(n > 1, alpha + moved / np.maximum(rate, 1.0) * ramp, 0.0)

    def all_to_all_s(self, size: Any, n: Any, stride: Any, copies: int | None = None) -> Array:
        """Return the seconds of an all-to-all over n ranks.

        Args:
            size: bytes that each rank sends, its own share included.
            n: ranks of a group.
            stride: ranks from one member of the group to the next.
            copies: of each token, of which a node and each rank in it get one at most, as in DeepEP (DeepSeek-AI 2024,
                arXiv 2412.19437): the node's spreads while others arrive, and its kernels reach 0.87 to 0.89 of an
                adapter's line over 4 and 8 nodes, so they lose nothing to conflicts. None: each travels alone.
        """
        n = np.asarray(n, dtype=np.float64)
        size = np.asarray(size, dtype=np.float64)
        inner = self.inside(n, stride)
        outer = np.ceil(n / inner)
        near = size * (inner - 1) / n / self.link_rate
        crossing, lost = size * (n - inner) / n, _ALL_TO_ALL_LOSS / np.maximum(outer, 2)
        if copies is not None:
            token = size / copies
            near = token * _reached(n, copies) * (inner - 1) / inner / self.link_rate
            crossing, lost = token * _reached(outer, copies) * (outer - 1) / outer, np.zeros_like(n)
        # Of what crosses, what goes to other racks.
        leaving = (n - self.in_rack(n, stride)) / np.maximum(1.0, n - inner)
        crossing = crossing * np.maximum(1.0, leaving * self.thinner)
        far = crossing / (self.nic_rate * (1 - lost))
        alpha = self.link_alpha_s + np.where(outer > 1, self.nic_alpha_s * np.sqrt(outer), 0.0)
        travel = far + near if copies is None else np.maximum(far, near)
        return np.where(n > 1, alpha + travel, 0.0)

    def send_s(self, size: Any, stride: Any) -> Array:
        """Return the seconds to send `size` bytes to the rank `stride` further on."""
        near = np.asarray(stride) < self.domain
        leaves = (np.asarray(stride) >= self.rack) if self.rack else False
        rate = np.where(near, self.link_rate, self.nic_rate / np.where(leaves, self.thinner, 1.0))
        return np.where(near, self.link_alpha_s, self.nic_alpha_s) + np.asarray(size, dtype=np.float64) / rate


def _reached(places: Array, copies: int) -> Array:
    """Count the places of `places` that at least one of a token's copies goes to, where each may go anywhere."""
    return places * (1 - (1 - 1 / places) ** copies)
