"""The compiled step: its collectives, and the bytes of its arguments."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

import jax
import numpy as np
import torch

from tests.jax_engine.forms import FORMS
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.jax_engine.capture import capture, to_array
from weft.jax_engine.compiled import bytes_per_device, traffic
from weft.jax_engine.program import Program, Sharding
from weft.jax_engine.update import read_optimizer


def compiled(plan: str) -> tuple:
    """Return the collectives of a plan's step, the bytes of its states on a device, and of all states."""
    model, batch, function = FORMS["weft_gpt2"]()
    captured = capture(model, function, batch)
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    params = {name: to_array(param) for name, param in model.named_parameters()}
    shapes = {name: one.shape for name, one in params.items()}
    program = Program(captured, optimizer, Sharding.of(Plan.parse(plan)), max_grad_norm=1.0, shapes=shapes)
    buffers = {name: to_array(one) for name, one in model.named_buffers()}
    placed, states = program.place(params)
    inputs = program.place_batch([captured.inputs(batch, dict(model.named_buffers()))])
    step = program.step.lower(placed, buffers, states, inputs, np.int64(0), np.float64(1.0)).compile()
    every = sum(one.nbytes for one in params.values())
    return traffic(step.as_text()), bytes_per_device((placed, states)), every, step.memory_analysis()


@pytest.mark.full
def test_data_parallel_reduces_gradients() -> None:
    found, held, every, _ = compiled("dp_replicate=2 precision=fp64")
    assert set(found) == {"all-reduce"}
    assert held == 3 * every


def test_zero_2_gathers_updated_weights() -> None:
    """XLA's CPU backend reduces and slices where others have a reduce-scatter; both are sums over the data ranks."""
    found, held, every, memory = compiled("dp_shard=2 zero=2 precision=fp64")
    assert "all-gather" in found
    assert found.keys() & {"reduce-scatter", "all-reduce"}
    assert set(found) <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert held == pytest.approx(every + 2 * every / 2, rel=0.01)
    assert memory.argument_size_in_bytes == pytest.approx(held, rel=0.05)  # with the batch


def test_recompute_replays_blocks() -> None:
    model, batch, function = FORMS["weft_gpt2"]()
    captured = capture(model, function, batch)
    params = {name: to_array(param) for name, param in model.named_parameters()}
    buffers = {name: to_array(one) for name, one in model.named_buffers()}
    inputs = captured.inputs(batch, {})
    counts = []
    for captured.blocks in ((), ("blocks.0", "blocks.1")):
        traced = jax.make_jaxpr(lambda params: captured(params, buffers, inputs)[0][0])(params)
        counts.append(str(traced).count("remat"))
    assert counts == [0, 2]


@pytest.mark.full
def test_zero_3_shards_parameters() -> None:
    found, held, every, _ = compiled("dp_shard=2 zero=3 precision=fp64")
    assert "all-gather" in found
    assert held == pytest.approx(3 * every / 2, rel=0.01)


def test_other_optimizers_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"optimizer.name=adagrad: the JAX engine computes adamw and sgd in full"):
        read_optimizer(torch.optim.Adagrad(model.parameters()), model)
