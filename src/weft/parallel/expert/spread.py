"""Expert parallelism: the experts of a layer are divided among the ranks of ep, and tokens travel to them and back.

Any module of stacked experts will do that is called as (tokens, ids of experts, weights): the project's own, those of
Hugging Face, and what a layout calls `expert`. It keeps its class's forward for the experts that stay; all around it,
router and shared experts too, sees nothing but the same output.

    rank's tokens -> sorted by expert -> all_to_all -> its experts -> all_to_all -> weighted sum for each token

Under tensor parallelism each rank takes its own part of the tokens, so that expert gradients are distinct partial
sums on all ranks of dp_shard x cp x tp.

M tokens of this rank, K experts of a token, E experts, L experts of this rank, R rows (one for each token and expert
of it), N rows that arrive, D model width. Exchange as in Lepikhin et al. 2020, arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.comm import all_gather
from weft.comm.autograd import exchange, gather_slice, slice_to
from weft.errors import ModelError
from weft.mesh import Axis, Mesh
from weft.models.experts import (
    Experts,
    combine_rows,
    grouped_linear,
    permute_rows,
    sort_by_expert,
    spread_rows,
    told_ends,
)
from weft.parallel.layers import StandIn
from weft.parallel.placement import Placement
from weft.private_torch import uncompiled, without_modes
from weft.spec import Layout
from weft.structure import become, hugging_face, layers

#: What an expert of this rank gives for rows in order of the experts: (rows (N, D), number of rows up to each).
Run = Callable[[Tensor, Tensor], Tensor]
_COUNT = "num_experts"  # as modules of experts call it


def spread_experts(model: nn.Module, mesh: Mesh, layout: Layout | None = None) -> dict[str, Placement]:
    """Let each rank keep its experts, in place. Returns how the parameters of experts are placed now.

    Args:
        model: whole, or a stage.
        mesh: its ep and tp.
        layout: modules whose style is `expert` are spread too, besides those that are known by themselves.

    Raises:
        ModelError: where the plan asks for experts and the model has none, or they cannot be divided.
    """
    ep, tp = mesh["ep"], mesh["tp"]
    found = dict(layers.find_experts(model, layout))
    if not found:
        if not any(isinstance(module, StandIn) for module in model.modules()):
            expect_experts(model, layout, ep.size)
        return {}
    if ep.size == 1 and tp.size == 1:
        return {}
    whole_tokens = tp if not mesh.plan.sp else Axis("tp", 1, 0, (mesh.rank,))
    placements: dict[str, Placement] = {}
    for path, experts in found.items():
        placements.update(_keep_own(path, experts, ep))
        spread = Spread(ep, whole_tokens, layers.num_experts(path, experts) * ep.size, hides=mesh.plan.zero == 3)
        _refuse_spread(experts)
        become(experts, SpreadExperts, _members, spread=spread)
    return placements


def expect_experts(model: nn.Module, layout: Layout | None, ep: int) -> None:
    """Refuse a plan that divides experts where the model has none.

    Args:
        model: the whole; a stage may well have none.
        layout: modules whose style is `expert` hold some too.
        ep: ranks that divide them.

    Raises:
        ModelError: where ep is above 1 and there are none.
    """
    if ep > 1 and next(layers.find_experts(model, layout), None) is None:
        raise ModelError(
            f"ep={ep}: the model {type(model).__name__} has no experts. Use ep=1, or name its modules of stacked "
            f"experts in a layout, such as blocks.*.mlp.experts=expert."
        )


def _keep_own(path: str, experts: nn.Module, ep: Axis) -> dict[str, Placement]:
    """Replace parameters by this rank's experts of them."""
    count = layers.num_experts(path, experts)
    if count % ep.size:
        legal = [str(size) for size in range(1, count + 1) if count % size == 0]
        raise ModelError(
            f"ep={ep.size}: {path!r} has {count} experts, and {count} is not a multiple of {ep.size}. "
            f"Use ep={', '.join(legal[:-1])} or {legal[-1]}."
        )
    placement = Placement(cut=("ep",))
    placements: dict[str, Placement] = {}
    for name, whole in list(experts.named_parameters()):
        owner, _, last = name.rpartition(".")
        part = placement.local(whole.detach(), ep.rank, ep.size).clone() if ep.size > 1 else whole.detach()
        setattr(experts.get_submodule(owner), last, nn.Parameter(part, requires_grad=whole.requires_grad))
        placements[f"{path}.{name}"] = placement
    if isinstance(getattr(experts, _COUNT, None), int):
        setattr(experts, _COUNT, count // ep.size)
    return placements


class Traffic(NamedTuple):
    """Rows between this rank and the others of ep.

    send, receive: rows to and from each. most: the most between any two. by_source: on the device, rows from each rank
    for each of this rank's experts, (ep, L).
    """

    send: list[int]
    receive: list[int]
    most: int
    by_source: Tensor


def count_traffic(ends_E: Tensor, ep: Axis) -> Traffic:
    """Tell all ranks of ep how many rows go where. ends_E: of this rank's rows in order of all experts."""
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    # All ranks' counts, and not only those for this one: a few kilobytes save the ranks asking for the largest.
    table = all_gather(counts_E, ep).view(ep.size, ep.size, -1)  # from, to, expert there
    # The host must know how much it sends and receives: the one wait for the device in this layer.
    between = table.cpu().long().sum(2)
    send, receive = between[ep.rank].tolist(), between[:, ep.rank].tolist()
    return Traffic(send, receive, int(between.max()), table[:, ep.rank].long())


@dataclass(frozen=True, slots=True)
class Spread:
    """How one module's tokens reach their experts.

    tp: ranks that come with the same tokens (size 1: none does). hides: selective recompute sees nothing of the module,
    and so makes all of it again. Under zero=3 experts are units of their own inside of their block, whose gathering
    makes other operations in a replay than it did before, and torch refuses that.
    """

    ep: Axis
    tp: Axis
    num_experts: int
    hides: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # a copy of the module runs on the same ranks

    def __call__(self, run: Run, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, drops: bool) -> Tensor:
        """Weighted sum of what each token's experts give; (M, D)."""
        if self.tp.size == 1:
            return self._travel(run, x_MD, ids_MK, weights_MK, drops)
        num_tokens = x_MD.shape[0]
        rest = -num_tokens % self.tp.size
        if rest:  # tokens that weigh nothing make the ranks' parts equal
            x_MD, weights_MK = (torch.cat((part, part.new_zeros(rest, part.shape[1]))) for part in (x_MD, weights_MK))
            ids_MK = torch.cat((ids_MK, ids_MK[:1].expand(rest, -1)))
        share = ids_MK.shape[0] // self.tp.size
        own = ids_MK.narrow(0, self.tp.rank * share, share)
        x_MD, weights_MK = slice_to(x_MD, self.tp, 0), slice_to(weights_MK, self.tp, 0)
        return gather_slice(self._travel(run, x_MD, own, weights_MK, drops), self.tp, 0)[:num_tokens]

    def _travel(self, run: Run, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, drops: bool) -> Tensor:
        order = sort_by_expert(ids_MK, self.num_experts, drops)
        rows_RD = spread_rows(x_MD, order)
        if self.ep.size == 1:
            return combine_rows(run(rows_RD, order.ends_E), weights_MK, order)
        traffic = count_traffic(order.ends_E, self.ep)
        arrived_ND = exchange(rows_RD, self.ep, traffic.send, traffic.receive, traffic.most)
        index_N, inverse_N, ends_L = _by_expert(traffic.by_source, sum(traffic.receive))
        out_ND = permute_rows(run(permute_rows(arrived_ND, index_N, inverse_N), ends_L), inverse_N, index_N)
        back_RD = exchange(out_ND, self.ep, traffic.receive, traffic.send, traffic.most)
        return combine_rows(back_RD, weights_MK, order)


def _by_expert(by_source: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows arrive by rank and then by expert: the index that orders them by expert, its inverse, and the ends.

    by_source: rows from each rank for each of this rank's experts, (ep, L), whose sum is num_rows.
    """
    num_ranks, num_here = by_source.shape
    device = by_source.device
    experts_N = torch.arange(num_here, device=device).repeat(num_ranks)
    # With its size told, the device computes all this while the host goes on.
    experts_N = experts_N.repeat_interleave(by_source.flatten(), output_size=num_rows)
    index_N = experts_N.argsort(stable=True)
    inverse_N = torch.empty_like(index_N).scatter_(0, index_N, torch.arange(num_rows, device=device))
    return index_N, inverse_N, by_source.sum(0).cumsum(0).to(torch.int32)


class StackedGated(Protocol):
    """Hugging Face's common form of stacked experts."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor: ...


def _run_gated(experts: StackedGated, rows_ND: Tensor, ends_L: Tensor) -> Tensor:
    ends = told_ends(ends_L, experts.gate_up_proj, experts.down_proj)
    hidden_NF = experts._apply_gate(grouped_linear(rows_ND, experts.gate_up_proj, ends))
    return grouped_linear(hidden_NF, experts.down_proj, ends)


def _run_plain(experts: nn.Module, plain: Callable[..., Tensor], rows_ND: Tensor, ends_L: Tensor) -> Tensor:
    """The class's own forward, with one expert for each row, of weight 1."""
    if not rows_ND.shape[0]:
        return rows_ND  # many have no gradient for nothing, and the exchange back needs one
    ids_N = torch.searchsorted(
        ends_L, torch.arange(rows_ND.shape[0], device=ends_L.device, dtype=torch.int32), right=True
    )
    return plain(experts, rows_ND, ids_N[:, None], rows_ND.new_ones(rows_ND.shape[0], 1))


class SpreadExperts(nn.Module):
    """Base of the classes that modules of experts are given; beside it stands their own."""

    _weft_spread: Spread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._weft_spread.hides:
            return super().__call__(*args, **kwargs)
        with without_modes():
            return super().__call__(*args, **kwargs)


def _refuse_spread(experts: nn.Module) -> None:
    if isinstance(experts, SpreadExperts):
        kind = type(experts).__name__
        raise ModelError(f"module of type {kind}: its experts are already divided over ep. Build a new model.")


def _members(kind: type) -> dict[str, Any]:
    return {"forward": _forward(kind.forward)}


def _forward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # How many rows go where is known only on the host, when the router has chosen.
    @uncompiled
    def forward(self: Any, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
        spread: Spread = self._weft_spread

        def run(rows_ND: Tensor, ends_L: Tensor) -> Tensor:
            if isinstance(self, Experts):
                return self.run(rows_ND, ends_L)
            if hugging_face.has_gated_experts(self):
                return _run_gated(self, rows_ND, ends_L)
            return _run_plain(self, plain, rows_ND, ends_L)

        drops = isinstance(self, Experts) and self.drops
        return spread(run, x_MD, ids_MK, weights_MK, drops)

    return forward
