"""Optimizer states and parameters on the host.

Optimizer offload: of the parameters chosen, this rank's unrounded weights and their gradient lie in pooled host
memory, and so the optimizer makes its states, and takes its step, there. In a step gradients travel down as soon as
they are sums, while backward goes on; new weights travel up in the compute format.

    device            host (pinned)             host (ordinary)
    weights           masters, gradients        states that the optimizer makes
    gradients

Method: Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload); shares as in its later "twin flow".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.errors import LaunchError
from weft.memory.host_link import Copy, HostLink, Waitable, link_to
from weft.memory.pool import MOST_OF_HOST, HostPool, pool_for
from weft.spec.plan import Plan

#: torch's optimizers whose fused kernels run on a CPU too: one pass over memory where others take several.
FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """The host as one rank's device sees it: its memory, and the way there."""

    link: HostLink
    pool: HostPool


def open_host(plan: Plan, device: torch.device, pinned_limit: str = MOST_OF_HOST) -> Host | None:
    """Return the host, where the plan puts something there; None where it does not.

    Args:
        plan: its `offload`.
        device: of this rank.
        pinned_limit: of all ranks of the machine: "64GiB" or "60%".
    """
    return Host(link_to(device), pool_for(device, pinned_limit)) if plan.offload else None


def offload_lines(plan: Plan, device: torch.device) -> list[str]:
    """Return what the plan puts on the host, one line each, for the start of a run; says where it saves nothing."""
    what = {
        "optimizer": "unrounded weights, optimizer states and the optimizer's step",
        "params": "parameters, with their gradients, states and the optimizer's step",
        "activations": "what blocks keep for backward",
    }
    lines = [
        f"{plan.offload_share(name):.0%} of {name} on the host: {text}"
        for name, text in what.items()
        if plan.offload_share(name)
    ]
    if lines and device.type != "cuda":
        lines.append(f"this rank's device is the host itself ({device.type}): copies are made, and no memory is saved")
    return lines


def choose(sizes: Sequence[tuple[str, int]], share: float) -> frozenset[str]:
    """Return the names that together have about this share of all sizes, the first ones by preference.

    What is chosen misses the share by no more than half of the largest size.
    """
    wanted = share * sum(size for _, size in sizes)
    chosen: set[str] = set()
    taken = 0
    for name, size in sizes:
        if taken + size / 2 <= wanted:
            chosen.add(name)
            taken += size
    return frozenset(chosen)


class HostPart:
    """One flat part of weights whose masters are on the host.

    master: unrounded weights; grad: their gradient, after `arrive`. Both (length,) of `dtype`.

    Args:
        host: the pool, and the way to the device.
        length: elements.
        dtype: of the masters.
        field: the plan's field, for errors.
    """

    def __init__(self, host: Host, length: int, dtype: torch.dtype, field: str = "offload=optimizer"):
        self._host = host
        self._buffers = [host.pool.take(length * dtype.itemsize, field) for _ in range(2)]
        self.master, self.grad = (one[: length * dtype.itemsize].view(dtype) for one in self._buffers)
        self._sent: Copy | None = None
        self._brought: Copy | None = None

    @property
    def is_early(self) -> bool:
        """Whether it pays to send gradients while the device works."""
        return self._host.link.overlaps

    @property
    def is_sent(self) -> bool:
        """Whether gradients were sent since `forget`."""
        return self._sent is not None

    def send(self, grad: torch.Tensor, after: Waitable | None = None) -> Waitable:
        """Let a gradient travel to the host.

        after: what it must wait for; the caller waits for what this returns in its place.
        """
        sent = self._sent = self._host.link.down(grad, self.grad, after)
        return _Started(sent)

    def arrive(self) -> None:
        """Wait until the host may read `grad` and write to `master`."""
        if self._sent is not None:
            self._sent.wait_host()
        if self._brought is not None:
            self._brought.wait_host()
        self._brought = None

    def scale(self, factor: float) -> None:
        """Multiply the gradient here."""
        self.arrive()
        self.grad.mul_(factor)

    def forget(self) -> None:
        """Begin a new step: the device may overwrite what was sent."""
        if self._sent is not None:
            self._sent.wait()
        self._sent = None

    @torch.no_grad()
    def bring(self, weights: torch.Tensor) -> Copy:
        """Let the masters travel to the device, rounded to the format of `weights`.

        Uses `grad` up where it rounds. The device must wait for what this returns before it sends the next gradient.
        """
        self.arrive()
        source = self.master
        if weights.dtype != source.dtype:
            source = self._buffers[1][: weights.nbytes].view(weights.dtype)
            source.copy_(self.master)
        self._brought = self._host.link.up(source, weights)
        return self._brought

    def release(self) -> None:
        """Give the memory back to the pool; `master` and `grad` are not to be used any more."""
        self.arrive()
        for buffer in self._buffers:
            self._host.pool.give_back(buffer)


@dataclass(frozen=True, slots=True)
class _Started:
    """Waits for what a copy waited for, not for the copy."""

    copy: Copy

    def wait(self) -> object:
        return self.copy.wait_start()


def step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer with parameters on the host use torch's fused kernels, where nobody said otherwise.

    Left alone, torch takes its slowest path as soon as one parameter is not on a GPU.
    """
    if type(optimizer) not in FUSED_ON_CPU:
        return
    for group in optimizer.param_groups:
        unsaid = group.get("fused") is None and group.get("foreach") is None
        plain = not group.get("differentiable") and not group.get("capturable")
        if unsaid and plain and all(param.is_floating_point() for param in group["params"]):
            group["fused"] = True


def shard_offload(plan: Plan, device: torch.device, is_chosen: bool = True) -> dict[str, object]:
    """Return the keyword arguments for fully_shard, for a unit whose parameters are among those on the host or not.

    The unit's shards, their gradients and so the optimizer's states and step are then on the host; each gather brings
    the shards to the device.

    Args:
        plan: its `offload`.
        device: of this rank.
        is_chosen: whether the unit is among those on the host.

    Raises:
        LaunchError: where torch lacks it.
    """
    if not plan.offload_share("params") or not is_chosen:
        return {}
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy
    except ImportError as error:
        raise LaunchError(
            f"offload=params: torch {torch.__version__} lacks CPUOffloadPolicy. Install torch 2.11 or later."
        ) from error
    return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
