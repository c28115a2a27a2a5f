"""A feed-forward layer of experts, in plain PyTorch: every token visits the K experts that its router chooses.

Routing: Shazeer et al. 2017, arXiv 1701.06538; shared experts: Dai et al. 2024, arXiv 2401.06066; sigmoid scores and
selection bias: DeepSeek-AI 2024, arXiv 2412.19437. Module paths: router, experts (stacked weights), shared.

B sequences, T tokens, M tokens of all sequences, D model width, F hidden width of an expert, E experts, K experts of a
token, R rows, one for each token and expert of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.experts.balance import BIAS_UNIT, Load, Span, attach, count_tokens, keep_within, sequence_loss
from weft.models.experts.grouped import combine_rows, grouped_linear, sort_by_expert, spread_rows, told_ends
from weft.private_torch import uncompiled
from weft.spec import DecoderSpec


class Routing(NamedTuple):
    """Where tokens go: ids of experts (E: nowhere), and what each expert's output is multiplied with."""

    ids_BTK: Tensor
    weights_BTK: Tensor


class Router(nn.Module):
    """Chooses the experts of each token. Its products are made in float32 at least.

    bias_ppm: with balance="bias", added to the scores for choosing alone, in millionths (int64).
    span: how sequences lie on ranks. aux_scale: gradient of the auxiliary loss, summed over tokens; None: one over the
    tokens of the call, as suits a loss that is their mean. `TrainStep` sets it, to a 0-d tensor where only the device
    knows it.
    """

    bias_ppm: Tensor | None

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.dim))
        has_bias = spec.balance == "bias"
        # Never on the meta device, with whose models it would be lost: it is small, and nothing says what it holds.
        bias_ppm = torch.zeros(spec.num_experts, dtype=torch.int64, device="cpu") if has_bias else None
        self.register_buffer("bias_ppm", bias_ppm)
        self.load = Load(spec.num_experts)
        self.span = Span()
        self.aux_scale: float | Tensor | None = None

    def reset_buffers(self) -> None:
        """Set the buffers as they are before training."""
        if self.bias_ppm is not None:
            self.bias_ppm.zero_()

    def forward(self, x_BTD: Tensor) -> Routing:
        """Choose, balance and drop."""
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
        """Return the weighted sum of what each token's experts give; (M, D).

        Args:
            x_MD: tokens.
            ids_MK: the experts of each; E for none.
            weights_MK: of each expert's output.
        """
        order = sort_by_expert(ids_MK, self.gate_up.shape[0], self.drops)
        return combine_rows(self.run(spread_rows(x_MD, order), order.ends_E), weights_MK, order)

    def run(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Run the experts on rows in their order; (R, D). ends_E: number of rows up to each expert."""
        ends = told_ends(ends_E, self.gate_up, self.down)
        gate_RF, up_RF = grouped_linear(x_RD, self.gate_up, ends).chunk(2, -1)
        return grouped_linear(F.silu(gate_RF) * up_RF, self.down, ends)


class MoE(nn.Module):
    """Router, experts, and where the model has them shared experts, as one layer beside them."""

    def __init__(self, spec: DecoderSpec, shared: nn.Module | None = None):
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = shared

    # How many rows an expert has is known only when the router has chosen, and the host must know it.
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
