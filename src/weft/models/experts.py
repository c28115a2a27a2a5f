"""Mixture-of-experts layers and load balancing, by a loss per sequence or by a bias that is updated after each step.

Both kinds of balancing give the same result under every plan. The loss is the sequence-wise loss of DeepSeek-V3 (arXiv
2412.19437, eq. 17-20). It is a sum over sequences, so it does not depend on how a batch is divided into microbatches
and ranks. If several ranks share the tokens of one sequence, `Span` sums their counts. The bias (Wang et al. 2024,
arXiv 2408.15664) depends on integer token counts of a full step.

The loss is not part of the model's output. Its gradient is added to the router's gradient in backward, so any loss
function, pipeline stage or custom training loop includes it without further code. Tokens are also counted in backward,
once for each backward, even if recompute runs forward several times.

B sequences, T tokens per sequence on this rank, S tokens per sequence in total, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.devices import access
from weft.private_torch import uncompiled

#: A selection bias is stored in integer millionths, so that small updates are never rounded away and sums are exact.
BIAS_UNIT = 1e-6


class Span:
    """Distribution of sequences over ranks.

    In this class, each rank has full sequences. `weft.parallel` has a subclass for sharded sequences.
    """

    @property
    def num_parts(self) -> int:
        """Number of ranks that each sequence is sharded over, in equal parts."""
        return 1

    def sum(self, x_BE: Tensor) -> Tensor:
        """Sum over the ranks that share the sequences; differentiable."""
        return x_BE

    def gather_ids(self, ids_BTK: Tensor) -> Tensor:
        """Gather the ids of all tokens in sequence order; (B, S, K)."""
        return ids_BTK

    def part(self, x_BSK: Tensor) -> Tensor:
        """Return this rank's tokens; (B, T, K)."""
        return x_BSK


class Load:
    """Statistics of one router since `clear`: tokens per expert, and the sum of the auxiliary loss over tokens.

    Both are None until the first `add`.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.tokens_E: Tensor | None = None
        self.aux_sum: Tensor | None = None

    def add(self, tokens_E: Tensor, aux_sum: Tensor) -> None:
        """Add the token counts and the auxiliary loss of one microbatch."""
        if self.tokens_E is None or self.aux_sum is None:
            self.tokens_E, self.aux_sum = tokens_E.clone(), aux_sum.double().clone()
        else:
            self.tokens_E += tokens_E
            self.aux_sum += aux_sum

    def clear(self) -> None:
        """Reset the counts."""
        self.tokens_E = self.aux_sum = None


def count_tokens(ids_BTK: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens of each sequence that are routed to each expert; int64 (B, E)."""
    flat = ids_BTK.flatten(1)
    counts = torch.zeros(flat.shape[0], num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


def sequence_loss(tokens_BE: Tensor, probs_BTE: Tensor, top_k: int, span: Span) -> Tensor:
    """Return the load-balancing loss of DeepSeek-V3, S * sum over experts of f * P, summed over sequences.

    f: an expert's tokens divided by its even share. P: its average probability. Per sequence, it is S for a balanced
    load and at most S * E / K.

    Args:
        tokens_BE: number of tokens routed to each expert, in this rank's part of each sequence.
        probs_BTE: probabilities of all experts, float.
        top_k: experts per token.
        span: the ranks that hold other parts of the same sequences.
    """
    num_experts, num_tokens = tokens_BE.shape[1], probs_BTE.shape[1] * span.num_parts
    sums_BE = probs_BTE.sum(1)
    both_BE = span.sum(torch.cat((tokens_BE.to(sums_BE.dtype), sums_BE), 1))
    tokens, sums = both_BE.split(num_experts, 1)
    return (tokens.detach() * sums).sum() * (num_experts / (top_k * num_tokens))


def keep_within(ids_BTK: Tensor, num_experts: int, capacity_factor: float, span: Span) -> Tensor:
    """Return which (token, expert) pairs are kept if experts accept at most `capacity_factor` times their even share.

    The result is bool (B, T, K). Earlier tokens of the sequence have priority, so dropping depends on the sequence
    alone: not on the rest of the batch, the ranks, or later tokens. Each expert accepts at least one token.
    """
    ids_BSK = span.gather_ids(ids_BTK)
    batch, num_tokens, top_k = ids_BSK.shape
    # Round first: 1.1 * 10 tokens must give 11, and not 12 from 11.000000000000002.
    share = round(capacity_factor * num_tokens * top_k / num_experts, 6)
    capacity = max(1, int(-(-share // 1)))
    sorted_ids, source = ids_BSK.reshape(batch, -1).sort(dim=1, stable=True)
    experts = torch.arange(num_experts, device=ids_BTK.device, dtype=ids_BTK.dtype).expand(batch, -1).contiguous()
    starts = torch.searchsorted(sorted_ids, experts)
    queue = torch.arange(sorted_ids.shape[1], device=ids_BTK.device) - starts.gather(1, sorted_ids)
    keep = torch.empty_like(queue, dtype=torch.bool).scatter_(1, source, queue < capacity)
    return span.part(keep.view(batch, num_tokens, top_k))


def attach(weights: Tensor, aux_sum: Tensor, scale: float | Tensor, tokens_E: Tensor, load: Load) -> Tensor:
    """Return the same weights. In backward, `scale` is the gradient of the auxiliary loss, and tokens are counted.

    Args:
        weights: weights of the chosen experts.
        aux_sum: 0-d, the auxiliary loss.
        scale: gradient of the auxiliary loss, a number or 0-d.
        tokens_E: tokens that chose each expert.
        load: backward adds the counts and the auxiliary loss to it.
    """
    return _Attach.apply(weights, aux_sum, scale, tokens_E, load)


def move_bias(bias_ppm_E: Tensor, tokens_E: Tensor, rate: float) -> None:
    """Update the selection bias in place: up for experts below their even share, down for experts above it.

    Args:
        bias_ppm_E: int64, in units of BIAS_UNIT.
        tokens_E: tokens that chose each expert in this step, over all ranks.
        rate: update per step.
    """
    surplus = tokens_E * tokens_E.numel() - tokens_E.sum()
    bias_ppm_E -= round(rate / BIAS_UNIT) * surplus.sign()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, aux_sum: Tensor, scale: float | Tensor, tokens_E: Tensor, load: Load
    ) -> Tensor:
        ctx.scale, ctx.load = scale, load
        ctx.save_for_backward(aux_sum, tokens_E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        aux_sum, tokens_E = ctx.saved_tensors
        ctx.load.add(tokens_E, aux_sum)
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None, None
        is_known = not isinstance(ctx.scale, Tensor)
        aux_grad = torch.full_like(aux_sum, ctx.scale) if is_known else ctx.scale.to(aux_sum).expand_as(aux_sum)
        return grad, aux_grad, None, None, None


# Matmuls with one matrix per expert, and sorting of rows by expert.

#: Cumulative row counts by expert, on the device (int32) or on the host.
Ends = Tensor | Sequence[int]
#: Dtypes that torch's grouped matmul kernel supports, by device. Others are computed expert by expert. The kernel
#: rejects float64 everywhere. On a GPU it loops internally for all dtypes but bfloat16, and then also makes the host
#: wait.
_KERNEL_TYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
#: Minimum compute capability of a GPU for the kernel, and the row alignment that the kernel requires.
_LEAST_CAPABILITY, _ALIGNMENT_BYTES = (8, 0), 16


class ByExpert(NamedTuple):
    """Rows sorted by expert, and by token within an expert.

    Attributes:
        source_R: index of each row among the M*K (token, slot) pairs.
        place_MK: row of each pair, or R if it was dropped.
        ends_E: cumulative row counts by expert (int32).
        top_k: K.
    """

    source_R: Tensor
    place_MK: Tensor
    ends_E: Tensor
    top_k: int


def sort_by_expert(ids_MK: Tensor, num_experts: int, drops: bool) -> ByExpert:
    """Sort (token, expert) pairs by expert.

    Args:
        ids_MK: experts of each token.
        num_experts: E.
        drops: True if some ids may be `num_experts`, which means that the pair is dropped. Dropped pairs get no row,
            and the host waits for the number of rows.
    """
    flat = ids_MK.reshape(-1)
    sorted_ids, source = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    place = torch.empty_like(source)
    place[source] = torch.arange(source.numel(), device=flat.device)
    if drops:
        num_rows = int(ends[-1])
        source, place = source[:num_rows], place.clamp_(max=num_rows)
    return ByExpert(source, place.view(ids_MK.shape), ends, ids_MK.shape[1])


def scatter_rows(x_MD: Tensor, order: ByExpert) -> Tensor:
    """Return the features of each row's token, (R, D). Backward sums gradients of a token's rows in a fixed order."""
    return _ScatterRows.apply(x_MD, order)


def combine_rows(y_RD: Tensor, weights_MK: Tensor, order: ByExpert) -> Tensor:
    """Sum each token's rows times their weights, (M, D). Dropped pairs count as zero.

    Args:
        y_RD: rows, by expert.
        weights_MK: weight of each pair.
        order: from `sort_by_expert`.
    """
    return _Combine.apply(y_RD, weights_MK.to(y_RD.dtype), order)


def permute_rows(x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return x[index] for a permutation. Backward is a gather too, without a sum.

    Args:
        x_RD: rows.
        index_R: the permutation.
        inverse_R: its inverse, for backward.
    """
    return _Permute.apply(x_RD, index_R, inverse_R)


def grouped_kernel(dtype: torch.dtype, device: torch.device, *widths: int) -> str:
    """Return the method for the matmuls of all experts: "kernel" or "loop".

    "kernel" is torch's grouped matmul, and "loop" is one matmul for each expert.

    widths: dims of the matrices. For "kernel", each must be a multiple of 16 bytes.
    """
    if dtype not in _KERNEL_TYPES.get(device.type, ()):
        return "loop"
    if access.has_cuda_kernels(device) and access.capability(device) < _LEAST_CAPABILITY:
        return "loop"
    aligned = all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)
    return "kernel" if aligned and hasattr(torch.nn.functional, "grouped_mm") else "loop"


def host_group_ends(ends_E: Tensor, *stacks: Tensor) -> Ends:
    """Return `ends_E` as `grouped_linear` takes it for all these stacks.

    If all of them are computed expert by expert, return a list, so that the host waits only once.

    ends_E: cumulative row counts by expert. stacks: stacked matrices of the experts.
    """
    return ends_E.tolist() if all(_kernel_choice(weights) == "loop" for weights in stacks) else ends_E


def grouped_linear(x_RD: Tensor, weights_EFD: Tensor, ends_E: Ends) -> Tensor:
    """Compute x @ w[e].T for the rows of each expert e; (R, F).

    Args:
        x_RD: rows, by expert.
        weights_EFD: a matrix for each expert.
        ends_E: cumulative row counts by expert; the last is R.
    """
    if has_torch_function((x_RD, weights_EFD)):  # per-sample gradients replace this function
        return handle_torch_function(grouped_linear, (x_RD, weights_EFD), x_RD, weights_EFD, ends_E)
    way = _kernel_choice(weights_EFD)
    if torch.is_autocast_enabled(x_RD.device.type):
        dtype = torch.get_autocast_dtype(x_RD.device.type)
        x_RD, weights_EFD = x_RD.to(dtype), weights_EFD.to(dtype)
    if way == "loop":
        return _Loop.apply(x_RD, weights_EFD, ends_E.tolist() if isinstance(ends_E, Tensor) else ends_E)
    assert isinstance(ends_E, Tensor), "ends were passed for stacks that all compute expert by expert"
    return torch.nn.functional.grouped_mm(x_RD, weights_EFD.transpose(1, 2), offs=ends_E)


def times_stack(experts: nn.Module, name: str, x_RD: Tensor, ends_E: Ends) -> Tensor:
    """Compute the product of `grouped_linear` with a module's stack of weights, adapted or quantized or neither.

    Args:
        experts: the module of the experts.
        name: name of its parameter.
        x_RD: rows, by expert.
        ends_E: cumulative row counts by expert, as returned by `host_group_ends` for all stacks of the module.
    """
    own: Any = getattr(experts, "times_adapted", None)
    if own is not None:
        return own(name, x_RD, ends_E)
    weights: Tensor = getattr(experts, name)
    return grouped_linear(x_RD, weights.mT if getattr(experts, "is_transposed", False) else weights, ends_E)


def run_gated(experts: Any, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Run transformers' experts of the form down(gate(x)) on rows sorted by expert; (R, D).

    experts: a module for which `inspect.hugging_face.has_gated_experts` is True. ends_E: cumulative row counts.
    """
    ends = host_group_ends(ends_E, *stacks_of(experts))
    gate: Callable[[Tensor], Tensor] = getattr(experts, "_apply_gate")  # noqa: B009 (transformers' name)
    hidden_RF = gate(_with_bias(experts, "gate_up_proj", times_stack(experts, "gate_up_proj", x_RD, ends), ends_E))
    return _with_bias(experts, "down_proj", times_stack(experts, "down_proj", hidden_RF, ends), ends_E)


def _with_bias(experts: Any, name: str, product_RF: Tensor, ends_E: Tensor) -> Tensor:
    """Add the experts' biases, if any, to a product of their stack `name`."""
    if not experts.has_bias:
        return product_RF
    return product_RF + by_row(getattr(experts, f"{name}_bias"), ends_E, len(product_RF)).to(product_RF.dtype)


def by_row(values_EF: Tensor, ends_E: Ends, num_rows: int) -> Tensor:
    """Return the values of each row's expert, (R, F). ends_E: cumulative row counts by expert."""
    ends = ends_E if isinstance(ends_E, Tensor) else torch.tensor(ends_E, device=values_EF.device)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return values_EF.repeat_interleave(counts, dim=0, output_size=num_rows)


def stacks_of(experts: nn.Module) -> list[Tensor]:
    """Return the stacked matrices of a module and of its adapter."""
    return [param for param in experts.parameters(recurse=False) if param.ndim == 3]


def _kernel_choice(weights_EFD: Tensor) -> str:
    device, (_, dim_out, dim_in) = weights_EFD.device, weights_EFD.shape
    autocasts = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocasts else weights_EFD.dtype
    return grouped_kernel(dtype, device, dim_in, dim_out)


def _pairs(rows_RD: Tensor, order: ByExpert) -> Tensor:
    """Return the row of each pair of token and slot, (M, K, D), with zeros for dropped pairs."""
    num_rows, dim = rows_RD.shape
    if num_rows < order.place_MK.numel():
        rows_RD = torch.cat((rows_RD, rows_RD.new_zeros(1, dim)))
    return rows_RD.index_select(0, order.place_MK.view(-1)).view(*order.place_MK.shape, dim)


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order: ByExpert) -> Tensor:
        ctx.order = order
        return x_MD.index_select(0, order.source_R // order.top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _pairs(grad_RD, ctx.order).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_MK: Tensor, order: ByExpert) -> Tensor:
        ctx.save_for_backward(y_RD, weights_MK)
        ctx.order = order
        return torch.bmm(weights_MK[:, None], _pairs(y_RD, order))[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, weights_MK = ctx.saved_tensors
        order: ByExpert = ctx.order
        shares_R = weights_MK.reshape(-1).index_select(0, order.source_R)
        grad_y_RD = grad_MD.index_select(0, order.source_R // order.top_k) * shares_R[:, None]
        grad_w_MK = torch.bmm(_pairs(y_RD, order), grad_MD[:, :, None])[:, :, 0]
        return grad_y_RD, grad_w_MK, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse = inverse_R
        return x_RD.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return grad_RD.index_select(0, ctx.inverse), None, None


class _Loop(torch.autograd.Function):
    """Matmuls computed one expert at a time.

    Forward also runs matmuls for experts without rows, and each matmul allocates its result: selective recompute
    identifies stored matmul outputs by their order and requires that they are not modified.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_EFD: Tensor, ends: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_RD, weights_EFD)
        ctx.sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = x_RD.split(ctx.sizes)
        return torch.cat([torch.mm(part, weights.t()) for part, weights in zip(parts, weights_EFD, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RD, weights_EFD = ctx.saved_tensors
        grad_x = torch.empty_like(x_RD) if ctx.needs_input_grad[0] else None
        grad_w = torch.empty_like(weights_EFD) if ctx.needs_input_grad[1] else None
        start = 0
        for expert, size in enumerate(ctx.sizes):
            rows = slice(start, start := start + size)
            if grad_x is not None and size:
                torch.mm(grad_RF[rows], weights_EFD[expert], out=grad_x[rows])
            if grad_w is not None:
                torch.mm(grad_RF[rows].t(), x_RD[rows], out=grad_w[expert])
        return grad_x, grad_w, None


# A feed-forward layer of experts in plain PyTorch.


class Routing(NamedTuple):
    """Ids of the experts of each token (E for dropped pairs), and the weight of each expert's output."""

    ids_BTK: Tensor
    weights_BTK: Tensor


class Router(nn.Module):
    """Chooses the experts of each token. It computes logits in float32 at least.

    Attributes:
        bias_ppm: with balance="bias", bias that is added to the scores for the selection only, in millionths (int64).
        load: statistics of the router.
        span: distribution of sequences over ranks.
        aux_scale: gradient of the auxiliary loss, which is a sum over tokens. `TrainStep` sets it, as a 0-d tensor if
            only the device has the value. If None, it is 1 / (number of tokens of the call), for losses averaged over
            tokens.
    """

    bias_ppm: Tensor | None

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.dim))
        has_bias = spec.balance == "bias"
        # On the CPU even under a meta device, because initialization does not fill this buffer and its zeros would be
        # lost.
        bias_ppm = torch.zeros(spec.num_experts, dtype=torch.int64, device="cpu") if has_bias else None
        self.register_buffer("bias_ppm", bias_ppm)
        self.load = Load(spec.num_experts)
        self.span = Span()
        self.aux_scale: float | Tensor | None = None

    def reset_buffers(self) -> None:
        """Reset the buffers to their values before training."""
        if self.bias_ppm is not None:
            self.bias_ppm.zero_()

    def forward(self, x_BTD: Tensor) -> Routing:
        """Choose the experts of each token, and drop pairs above the capacity, if it is limited.

        In training with gradients enabled, backward counts the tokens and adds the gradient of the auxiliary loss.
        """
        spec = self.spec
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_BTE = F.linear(x_BTD.to(dtype), self.weight.to(dtype))
        scores_BTE = logits_BTE.softmax(-1) if spec.router == "softmax" else logits_BTE.sigmoid()
        with torch.no_grad():
            ranked_BTE = scores_BTE if self.bias_ppm is None else scores_BTE + self.bias_ppm.to(dtype) * BIAS_UNIT
            ids_BTK = ranked_BTE.topk(spec.top_k, dim=-1).indices
        weights_BTK = scores_BTE.gather(-1, ids_BTK)
        if spec.normalise_top_k:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        if self.training and torch.is_grad_enabled():
            weights_BTK = self._balance(ids_BTK, weights_BTK, scores_BTE)
        if spec.capacity_factor:
            with torch.no_grad():
                keep_BTK = keep_within(ids_BTK, spec.num_experts, spec.capacity_factor, self.span)
                ids_BTK = ids_BTK.masked_fill(~keep_BTK, spec.num_experts)
        return Routing(ids_BTK, weights_BTK * spec.route_scale)

    def _balance(self, ids_BTK: Tensor, weights_BTK: Tensor, scores_BTE: Tensor) -> Tensor:
        spec = self.spec
        tokens_BE = count_tokens(ids_BTK, spec.num_experts)
        if spec.balance == "aux_loss":
            probs_BTE = scores_BTE if spec.router == "softmax" else scores_BTE / scores_BTE.sum(-1, keepdim=True)
            aux_sum = sequence_loss(tokens_BE, probs_BTE, spec.top_k, self.span)
        else:
            aux_sum = scores_BTE.new_zeros(())
        num_tokens = math.prod(ids_BTK.shape[:2])
        scale = spec.balance_rate * (1 / num_tokens if self.aux_scale is None else self.aux_scale)
        return attach(weights_BTK, aux_sum, scale, tokens_BE.sum(0), self.load)


class Experts(nn.Module):
    """SwiGLU layers with stacked weights: gate_up (E, 2F, D) and down (E, D, F), as Hugging Face stacks them."""

    stacks_experts = True

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.drops = spec.capacity_factor > 0
        self.gate_up = nn.Parameter(torch.empty(spec.num_experts, 2 * spec.expert_width, spec.dim))
        self.down = nn.Parameter(torch.empty(spec.num_experts, spec.dim, spec.expert_width))

    def forward(self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts; (M, D).

        Args:
            x_MD: tokens.
            ids_MK: experts of each token; E for dropped pairs.
            weights_MK: weight of each expert's output.
        """
        order = sort_by_expert(ids_MK, self.gate_up.shape[0], self.drops)
        return combine_rows(self.run(scatter_rows(x_MD, order), order.ends_E), weights_MK, order)

    def run(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Run the experts on rows sorted by expert; (R, D). ends_E: cumulative row counts by expert."""
        ends = host_group_ends(ends_E, *stacks_of(self))
        gate_RF, up_RF = times_stack(self, "gate_up", x_RD, ends).chunk(2, -1)
        return times_stack(self, "down", F.silu(gate_RF) * up_RF, ends)


class MoE(nn.Module):
    """Router, experts and optional shared experts, which are one dense layer."""

    def __init__(self, spec: DecoderSpec, shared: nn.Module | None = None):
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = shared

    # The number of rows of each expert depends on the router's output, and the host must read it.
    @uncompiled
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the layer: (B, T, D) to (B, T, D)."""
        routing = self.router(x_BTD)
        ids_MK, weights_MK = (part.flatten(0, 1) for part in routing)
        y_BTD = self.experts(x_BTD.flatten(0, 1), ids_MK, weights_MK).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


def routers(model: nn.Module) -> Iterator[Router]:
    """Yield the routers of a model, in its order."""
    return (module for module in model.modules() if isinstance(module, Router))
