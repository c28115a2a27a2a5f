"""Loss and every gradient of a captured model equal torch's in float64, for 20 forms of models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")

import jax

from tests.jax_engine.forms import FORMS
from weft.jax_engine.capture import capture, to_array
from weft.verify.verifier import Float64Throughout

jax.config.update("jax_enable_x64", True)


#: Forms in the gate. Each other form takes seconds.
_GATE = ("weft_llama", "hf_mixtral", "convolutions", "mixer")


@pytest.mark.parametrize("name", [one if one in _GATE else pytest.param(one, marks=pytest.mark.full) for one in FORMS])
def test_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model, batch, function = FORMS[name]()
    model.train()
    params = dict(model.named_parameters())
    arrays = {name: to_array(param) for name, param in params.items()}
    buffers = {name: to_array(buffer) for name, buffer in model.named_buffers()}
    with Float64Throughout():
        captured = capture(model, function, batch)
        loss, count = function(model, batch)
        loss.backward()
    loss = loss.detach()

    inputs = captured.inputs(batch, dict(model.named_buffers()))

    def total(params: dict) -> tuple:
        (loss, count), _ = captured(params, buffers, inputs)
        return loss, count

    (found, number), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
    assert abs(float(found) - float(loss)) <= 1e-10 * abs(float(loss))
    assert float(number) == float(count)
    largest = max(float(param.grad.abs().max()) for param in params.values() if param.grad is not None)
    for name, param in params.items():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        apart = abs(grads[name] - to_array(expected)).max()
        assert apart <= 1e-10 * max(float(expected.abs().max()), 1e-6 * largest), (name, apart)
