"""The auxiliary loss for routers of Hugging Face: by sequence, as the project's own, so that no plan changes it.

Transformers adds its loss (`output_router_logits`) to what the model computes itself, over one rank's microbatch and
all layers together. Here it enters in backward at each router's weights (docs/adr/0010), with every loss function. For
one layer and one sequence the two are the same number.

B sequences, T tokens, M = B T, D model width, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.experts import Load, Span, attach, count_tokens, sequence_loss
from weft.structure import become, hugging_face, layers


class ForeignRouter(nn.Module):
    """A router that gives (logits, weights of the chosen experts, their ids), each of M rows.

    span, aux_scale, load: as of `weft.models.experts.Router`. rows: samples of the layer's input, set before each
    forward.
    """

    load: Load
    span: Span
    aux_scale: float | Tensor | None
    rows: int
    _weft_rate: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What its own class gives; in backward the weights send a gradient to the loss of balance."""
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
    """Hook of the layer around a router, which flattens its samples. An object, since copies copy hooks."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden_BTD = args[0] if args else next(iter(kwargs.values()))
        getattr(layer, self._name).rows = hidden_BTD.shape[0]


def balance_routers(model: nn.Module, rate: float) -> int:
    """Give the routers of a Hugging Face model the auxiliary loss, in place and before `parallelize`.

    rate: what their config calls router_aux_loss_coef; the loss is the mean over layers of K times the sequence-wise
    one. Returns the number of routers.

    Raises:
        ModelError: for a model without such routers.
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
            f"balance_rate={rate}: {type(model).__name__} has no routers beside its experts that give (logits, "
            f"weights, ids). Leave balance_rate out; Weft's own models have model.balance."
        )
    for layer, name in found:
        router: Any = getattr(layer, name)
        become(router, ForeignRouter, rate=rate * router.top_k / len(found))
        router.load, router.span, router.aux_scale = Load(router.weight.shape[0]), Span(), None
        layer.register_forward_pre_hook(_Rows(name), with_kwargs=True)
    return len(found)
