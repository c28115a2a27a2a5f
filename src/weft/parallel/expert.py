"""Expert parallelism, balancing of experts over ranks, and an auxiliary loss for Hugging Face routers.

Transformers adds its loss (`output_router_logits`) to the model's own loss, computed over one rank's microbatch and
over all layers together. Here the loss is computed per sequence, as in Weft's own models, so it does not depend on the
plan. Its gradient is added in backward at each router's weights (docs/adr/0010), with every loss function. For one
layer and one sequence the two losses are equal.

B sequences, T tokens, M = B T, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.comm.autograd import exchange, gather_slice, slice_to, sum_over
from weft.comm.collectives import all_gather, start_all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.comm.pending import Pending
from weft.config.fields.layout import Layout
from weft.errors import ModelError
from weft.models.experts import (
    Experts,
    Load,
    Router,
    Span,
    attach,
    combine_rows,
    count_tokens,
    move_bias,
    permute_rows,
    routers,
    run_gated,
    scatter_rows,
    sequence_loss,
    sort_by_expert,
)
from weft.models.inspect import hugging_face, layers
from weft.models.inspect.blocks import replace_class
from weft.parallel.layers.index_check import StandIn
from weft.parallel.state.placement import Placement
from weft.private_torch import uncompiled, without_modes


class ForeignRouter(nn.Module):
    """A router that returns (logits, weights of the chosen experts, their ids), each with M rows.

    span, aux_scale, load: as in `weft.models.experts.Router`. rows: number of samples in the layer's input, set before
    each forward.
    """

    load: Load
    span: Span
    aux_scale: float | Tensor | None
    rows: int
    _weft_rate: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward.

        In training, this also counts the tokens per expert, and the backward of the weights adds the gradient of the
        balance loss.
        """
        logits_ME, weights_MK, ids_MK = super().forward(*args, **kwargs)
        if not self.training or not torch.is_grad_enabled():
            return logits_ME, weights_MK, ids_MK
        probs_BTE = logits_ME.to(torch.promote_types(logits_ME.dtype, torch.float32)).softmax(-1)
        probs_BTE, ids_BTK = (x.unflatten(0, (self.rows, -1)) for x in (probs_BTE, ids_MK))
        tokens_BE = count_tokens(ids_BTK, probs_BTE.shape[-1])
        aux_sum = sequence_loss(tokens_BE, probs_BTE, ids_MK.shape[-1], self.span)
        scale = self._weft_rate * (1 / ids_MK.shape[0] if self.aux_scale is None else self.aux_scale)
        return logits_ME, attach(weights_MK, aux_sum, scale, tokens_BE.sum(0), self.load), ids_MK


class _Rows:
    """Forward pre-hook of the layer around a router. Sets the router's `rows`: the layer flattens its samples."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden_BTD = args[0] if args else next(iter(kwargs.values()))
        getattr(layer, self._name).rows = hidden_BTD.shape[0]


def balance_routers(model: nn.Module, rate: float) -> int:
    """Add the auxiliary loss to the routers of a Hugging Face model, before `parallelize`. Modifies the model.

    The loss is the mean over layers of K times the sequence-wise loss. rate: the value of router_aux_loss_coef in the
    model's config. Returns the number of routers. Raises ModelError for a model without such routers.
    """
    paths = [path.rpartition(".")[0] for path, _ in layers.find_experts(model)]
    around = [model.get_submodule(path) for path in paths]
    found = [
        (layer, name)
        for layer in around
        for name in ("gate", "router")
        if hugging_face.is_router(getattr(layer, name, None))
    ]
    if not found:
        raise ModelError(
            f"balance_rate={rate}: {type(model).__name__} has no routers with its experts that return (logits, "
            "weights, ids). Leave balance_rate out; Weft's own models have model.balance."
        )
    for layer, name in found:
        router: Any = getattr(layer, name)
        replace_class(router, ForeignRouter, rate=rate * router.top_k / len(found))
        router.load, router.span, router.aux_scale = Load(router.weight.shape[0]), Span(), None
        layer.register_forward_pre_hook(_Rows(name), with_kwargs=True)
    return len(found)


# Balancing of experts over all ranks: sequences that are sharded over ranks, and the update of the selection bias.


class TokenOrder(Protocol):
    """Assignment of the tokens of full sequences to ranks."""

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's tokens, (B, S, ...), of full sequences (B, T, ...)."""
        ...

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return full sequences, (B, T, ...), from the (B, S, ...) of each rank."""
        ...


class ShardedSequences(Protocol):
    """Sequences that are sharded over the ranks of `axis`, while `in_use`."""

    axis: Axis
    in_use: bool

    def order(self, seq_len: int) -> TokenOrder: ...


class DividedSpan(Span):
    """`Span` for sequences that are sharded over cp or, with sequence parallelism, over tp, or over both."""

    def __init__(self, context: ShardedSequences | None, tp: Axis):
        self._context, self._tp = context, tp

    def __deepcopy__(self, memo: dict[int, object]) -> Span:
        return Span()  # a copy of the model is a plain one

    @property
    def num_parts(self) -> int:
        return self._tp.size * (self._sharding.axis.size if self._sharding else 1)

    def sum(self, x_BE: Tensor) -> Tensor:
        x_BE = sum_over(x_BE, self._tp)
        return sum_over(x_BE, self._sharding.axis) if self._sharding else x_BE

    def gather_ids(self, ids_BTK: Tensor) -> Tensor:
        part = torch.cat(_gathered(ids_BTK, self._tp), 1)
        if not self._sharding:
            return part
        axis = self._sharding.axis
        return self._sharding.order(part.shape[1] * axis.size).join(_gathered(part, axis))

    def part(self, x_BSK: Tensor) -> Tensor:
        if self._sharding:
            x_BSK = self._sharding.order(x_BSK.shape[1]).shard(x_BSK)
        share = x_BSK.shape[1] // self._tp.size
        return x_BSK.narrow(1, self._tp.rank * share, share)

    @property
    def _sharding(self) -> ShardedSequences | None:
        return self._context if self._context is not None and self._context.in_use else None


def divide_sequences(model: nn.Module, mesh: Mesh, context: ShardedSequences | None) -> None:
    """Set in the model's routers how cp or sp shards sequences. Call it after both were applied.

    context: None without cp.
    """
    tp = mesh["tp"] if mesh.plan.sp else Axis("tp", 1, 0, (mesh.rank,))
    if context is not None or tp.size > 1:
        for router in balanced_routers(model):
            router.span = DividedSpan(context, tp)


def _gathered(x: Tensor, axis: Axis) -> list[Tensor]:
    return [x] if axis.size == 1 else list(all_gather(x.contiguous(), axis).view(axis.size, *x.shape))


def balanced_routers(model: nn.Module) -> Iterator[Router | ForeignRouter]:
    """Yield the routers that count tokens per expert: Weft's own, and those that `balance_routers` changed."""
    return (module for module in model.modules() if isinstance(module, Router | ForeignRouter))


def refuse_balance(model: nn.Module, cp: int) -> None:
    """Raise ModelError if routers balance their experts: under `cp` with full samples, each rank counts all tokens."""
    if any(True for _ in balanced_routers(model)):
        raise ModelError(
            f"cp={cp}: routers that balance their experts count tokens of all ranks, and every rank of cp gets full "
            "samples of this model. Use cp=1, or no balancing."
        )


class ExpertBalance:
    """Balance of a model's experts in a training step. Does nothing for a model without routers."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        self._routers = list(balanced_routers(model))
        self._biased = [router for router in routers(model) if router.bias_ppm is not None]
        names = ("dp_replicate", "dp_shard", "cp", *(("tp",) if mesh.plan.sp else ()))
        self._axis = mesh[names] if self._biased else None
        self._pending: Pending | None = None

    @property
    def has_routers(self) -> bool:
        """True if the model has routers."""
        return bool(self._routers)

    def begin(self, scale: float | Tensor) -> None:
        """Begin a step, and reset the token counts. scale: gradient of the balance loss, which is a sum over tokens."""
        self._pending = None
        for router in self._routers:
            router.aux_scale = scale
            router.load.clear()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Make forwards in the context add nothing to the balance loss or to the token counts."""
        before = [(router, router.aux_scale, router.load) for router in self._routers]
        for router, _, load in before:
            router.aux_scale, router.load = 0.0, Load(load.num_experts)
        try:
            yield
        finally:
            for router, scale, load in before:
                router.aux_scale, router.load = scale, load

    def start(self) -> None:
        """Start the all_reduce of the token counts of routers with a selection bias, after the last backward.

        All ranks call it.
        """
        if self._axis is not None:
            self._pending = start_all_reduce(torch.stack([_tokens(router) for router in self._biased]), self._axis)

    def finish(self, *, moved: bool | Tensor) -> None:
        """Update the selection biases at the end of a step, unless the step was skipped.

        moved: True if the weights changed. It is a 0-d bool tensor if only the device has the value.
        """
        if self._pending is None:
            return
        counted = self._pending.wait()
        self._pending = None
        for router, tokens_E in zip(self._biased, counted.unbind(), strict=True):
            assert router.bias_ppm is not None
            if isinstance(moved, Tensor):
                tokens_E = tokens_E * moved  # zero counts on a skipped step: all experts are balanced
            if not isinstance(moved, bool) or moved:
                move_bias(router.bias_ppm, tokens_E, router.spec.balance_rate)


def _tokens(router: Router) -> Tensor:
    counted = router.load.tokens_E
    assert router.bias_ppm is not None
    return torch.zeros_like(router.bias_ppm) if counted is None else counted


# Expert parallelism: a layer's experts are distributed over the ranks of ep, and tokens are exchanged between them.

#: Runs this rank's experts on rows sorted by expert: (rows (N, D), number of rows up to each expert's end).
Run = Callable[[Tensor, Tensor], Tensor]
_COUNT = "num_experts"  # attribute of expert modules


def distribute_experts(model: nn.Module, mesh: Mesh, layout: Layout | None = None) -> dict[str, Placement]:
    """Distribute the model's experts over ep. Returns the placements of the experts' parameters.

    Modifies the model. Does nothing if ep and tp are 1. Without sp, the tp ranks have the same tokens, and each
    computes a part of them.

    layout: its modules with style `expert` are distributed in addition to detected experts.

    Raises ModelError if the plan uses ep and the model has no experts, or if they do not divide evenly or are already
    distributed.
    """
    ep, tp = mesh["ep"], mesh["tp"]
    if ep.size > 1:
        _refuse_unsupported(model, ep.size)
    found = dict(layers.find_experts(model, layout))
    if not found:
        if not any(isinstance(module, StandIn) for module in model.modules()):
            expect_experts(model, layout, ep.size)
        return {}
    if divided := next((one for one in found.values() if isinstance(one, DistributedExperts)), None):
        kind = type(divided).__name__
        raise ModelError(f"module of type {kind}: its experts are already divided over ep. Build a new model.")
    if ep.size == 1 and tp.size == 1:
        return {}
    whole_tokens = tp if not mesh.plan.sp else Axis("tp", 1, 0, (mesh.rank,))
    placements: dict[str, Placement] = {}
    for path, experts in found.items():
        placements.update(_keep_own(path, experts, ep))
        spread = TokenDispatch(ep, whole_tokens, layers.num_experts(path, experts) * ep.size, hides=mesh.plan.zero == 3)
        replace_class(experts, DistributedExperts, _members, spread=spread)
    return placements


#: Experts of transformers that are not called as experts(tokens, ids, weights) on stacks of one number of experts.
_UNSUPPORTED = {
    "Llama4TextExperts": "its router multiplies the inputs of experts, and ep dispatches tokens that outputs weight",
    "DbrxExpertGLU": "its experts are rows of one matrix, and ep divides stacks with one matrix per expert",
    "JetMoeParallelExperts": "it gets tokens that its model sorted by expert, without their experts' ids",
    "LongcatFlashExperts": "some of its experts are the identity, so its stacks have different numbers of experts",
}


def _refuse_unsupported(model: nn.Module, ep: int) -> None:
    for path, module in model.named_modules():
        if (why := _UNSUPPORTED.get(name := type(module).__name__)) is not None:
            raise ModelError(f"ep={ep}: {path} is {name}: {why}. Use ep=1, and zero=3 to shard these experts.")


def expect_experts(model: nn.Module, layout: Layout | None, ep: int) -> None:
    """Raise ModelError if ep > 1 and the model has no experts, including modules with style `expert` in `layout`."""
    if ep > 1:
        _refuse_unsupported(model, ep)
    if ep > 1 and next(layers.find_experts(model, layout), None) is None:
        raise ModelError(
            f"ep={ep}: the model {type(model).__name__} has no experts. Use ep=1, or name its modules of stacked "
            f"experts in a layout, such as blocks.*.mlp.experts=expert."
        )


def _keep_own(path: str, experts: nn.Module, ep: Axis) -> dict[str, Placement]:
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
    """Number of rows that the ranks of ep exchange.

    Attributes:
        send, receive: rows to and from each rank.
        most: maximum between any two ranks.
        by_source: device tensor of the rows from each rank for each local expert, (ep, L).
    """

    send: list[int]
    receive: list[int]
    most: int
    by_source: Tensor


def count_traffic(ends_E: Tensor, ep: Axis) -> Traffic:
    """Gather the numbers of rows that the ranks of ep send to each other. Waits for the device.

    ends_E: end of each expert in this rank's sorted rows.
    """
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    # Gathers the counts for all ranks, not only for this one: a few kilobytes save a collective for the maximum.
    table = all_gather(counts_E, ep).view(ep.size, ep.size, -1)  # source rank, target rank, local expert
    # The host needs the number of rows to send and receive. This is the only wait for the device in the layer.
    between = table.cpu().long().sum(2)
    send, receive = between[ep.rank].tolist(), between[:, ep.rank].tolist()
    return Traffic(send, receive, int(between.max()), table[:, ep.rank].long())


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Sends one module's tokens to their experts.

    Attributes:
        tp: ranks with the same tokens, or an axis of size 1.
        hides: True if selective recompute must ignore the module's operations, and so recompute all of them. Under
            zero=3, experts are FSDP units inside their block, and their all-gathers differ between forward and
            recomputation, for which torch raises an error.
    """

    ep: Axis
    tp: Axis
    num_experts: int
    hides: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatch:
        return self  # a copy of the module runs on the same ranks

    def __call__(self, run: Run, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, drops: bool) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, (M, D). Collective over ep and tp.

        run: computes this rank's experts. drops: True if some ids may be `num_experts`; these pairs are dropped.
        """
        if self.tp.size == 1:
            return self._dispatch(run, x_MD, ids_MK, weights_MK, drops)
        num_tokens = x_MD.shape[0]
        rest = -num_tokens % self.tp.size
        if rest:  # pad with tokens of weight 0 to equal parts
            x_MD, weights_MK = (torch.cat((part, part.new_zeros(rest, part.shape[1]))) for part in (x_MD, weights_MK))
            ids_MK = torch.cat((ids_MK, ids_MK[:1].expand(rest, -1)))
        share = ids_MK.shape[0] // self.tp.size
        own = ids_MK.narrow(0, self.tp.rank * share, share)
        x_MD, weights_MK = slice_to(x_MD, self.tp, 0), slice_to(weights_MK, self.tp, 0)
        return gather_slice(self._dispatch(run, x_MD, own, weights_MK, drops), self.tp, 0)[:num_tokens]

    def _dispatch(self, run: Run, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, drops: bool) -> Tensor:
        order = sort_by_expert(ids_MK, self.num_experts, drops)
        rows_RD = scatter_rows(x_MD, order)
        if self.ep.size == 1:
            return combine_rows(run(rows_RD, order.ends_E), weights_MK, order)
        traffic = count_traffic(order.ends_E, self.ep)
        arrived_ND = exchange(rows_RD, self.ep, traffic.send, traffic.receive, traffic.most)
        index_N, inverse_N, ends_L = _by_expert(traffic.by_source, sum(traffic.receive))
        out_ND = permute_rows(run(permute_rows(arrived_ND, index_N, inverse_N), ends_L), inverse_N, index_N)
        back_RD = exchange(out_ND, self.ep, traffic.receive, traffic.send, traffic.most)
        return combine_rows(back_RD, weights_MK, order)


def _by_expert(by_source: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index that sorts received rows (by rank, then expert) by expert, its inverse, and the experts' ends.

    by_source: rows from each rank for each local expert, (ep, L), whose sum is num_rows.
    """
    num_ranks, num_here = by_source.shape
    device = by_source.device
    experts_N = torch.arange(num_here, device=device).repeat(num_ranks)
    # With an explicit size, the device computes this without blocking the host.
    experts_N = experts_N.repeat_interleave(by_source.flatten(), output_size=num_rows)
    index_N = experts_N.argsort(stable=True)
    inverse_N = torch.empty_like(index_N).scatter_(0, index_N, torch.arange(num_rows, device=device))
    return index_N, inverse_N, by_source.sum(0).cumsum(0).to(torch.int32)


class DistributedExperts(nn.Module):
    """Base class of distributed experts. Their class also derives from the experts' original class."""

    _weft_spread: TokenDispatch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._weft_spread.hides:
            return super().__call__(*args, **kwargs)
        with without_modes():
            return super().__call__(*args, **kwargs)


def _members(kind: type) -> dict[str, Any]:
    return {"forward": _forward(kind.forward)}


def _forward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # The host gets the number of rows per rank only after the router has run.
    @uncompiled
    def forward(self: Any, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
        spread: TokenDispatch = self._weft_spread

        def run(rows_ND: Tensor, ends_L: Tensor) -> Tensor:
            if isinstance(self, Experts):
                return self.run(rows_ND, ends_L)
            if hugging_face.has_gated_experts(self):
                return run_gated(self, rows_ND, ends_L)
            count = rows_ND.shape[0]
            if not count:
                return rows_ND  # many forwards have no gradient for empty input, but exchange needs one
            # Use the class's original forward, with one expert of weight 1 for each row.
            rows = torch.arange(count, device=ends_L.device, dtype=torch.int32)
            ids_N = torch.searchsorted(ends_L, rows, right=True)
            return plain(self, rows_ND, ids_N[:, None], rows_ND.new_ones(count, 1))

        drops = isinstance(self, Experts) and self.drops
        return spread(run, x_MD, ids_MK, weights_MK, drops)

    return forward
