"""The auxiliary loss of Hugging Face routers equals transformers' loss if both definitions agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.parity.moe_cases import hugging_face_moe_cases
from weft.errors import ModelError
from weft.parallel.expert import ForeignRouter, balance_routers
from weft.verify.verifier import Float64Throughout


def one_layer(balance_rate: float) -> torch.nn.Module:
    """Return Mixtral with one layer."""
    model = dataclasses.replace(hugging_face_moe_cases()["mixtral"], balance_rate=0.0).model()
    model.model.layers = model.model.layers[:1]
    if balance_rate:
        assert balance_routers(model, balance_rate) == 1
    return model


def gradient(balance_rate: float, theirs: bool) -> torch.Tensor:
    """Return the gradient of the router's weight for the mean loss over one sequence."""
    model, ids = one_layer(balance_rate), torch.arange(1, 17)[None]
    with Float64Throughout():
        output = model(input_ids=ids, use_cache=False, output_router_logits=theirs)
        loss = F.cross_entropy(output.logits[0], ids[0].roll(-1))
        (loss + 0.5 * output.aux_loss if theirs else loss).backward()
    return model.model.layers[0].mlp.gate.weight.grad


def test_one_layer_one_sequence_gradient_matches_transformers():
    ours = gradient(0.5, theirs=False)
    torch.testing.assert_close(ours, gradient(0.0, theirs=True), rtol=1e-6, atol=1e-9)  # transformers counts in float32
    assert not torch.allclose(ours, gradient(0.0, theirs=False), rtol=1e-3)


def test_router_counts_the_tokens_of_each_backward():
    model = one_layer(0.5)
    model(input_ids=torch.arange(1, 17)[None], use_cache=False).logits.sum().backward()
    router = next(module for module in model.modules() if isinstance(module, ForeignRouter))
    assert int(router.load.tokens_E.sum()) == 16 * 2


def test_model_without_routers_is_rejected():
    with pytest.raises(ModelError, match=r"balance_rate=0.1: Linear has no routers"):
        balance_routers(torch.nn.Linear(2, 2), 0.1)
