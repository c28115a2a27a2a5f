"""FLOPs by both conventions, energy and price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import ClusterSpec, devices
from weft.planner.search.candidate import (
    flops_per_token,
    matmul_params,
    model_flops_utilisation,
    step_cost,
    usual_price,
)
from weft.planner.search.question import Question

QUESTION = Question.of("llama3-8b", "8xh100", seq_len=8192, global_batch=128)


def test_flops_of_a_dense_decoder():
    shape = QUESTION.job.shape
    # Each token is multiplied once with all weights except embedding and norms.
    assert matmul_params(shape) == pytest.approx(shape.num_params - shape.vocab * shape.hidden, rel=1e-4)
    whole = flops_per_token(shape, 8192, causal=False)
    half = flops_per_token(shape, 8192, causal=True)
    assert whole == 6 * matmul_params(shape) + 12 * 32 * 4096 * 8192
    assert whole - half == 6 * 32 * 4096 * 8192


def test_window_bounds_attention_and_only_chosen_experts_count():
    shape = replace(QUESTION.job.shape, window=1024, windowed_layers=32)
    assert flops_per_token(shape, 8192, causal=False) == flops_per_token(QUESTION.job.shape, 1024, causal=False)
    mixture = replace(QUESTION.job.shape, num_experts=8, top_k=2, expert_ffn=14336, ffn=0)
    assert matmul_params(mixture) < matmul_params(replace(mixture, top_k=4)) < mixture.num_params


def test_utilization_is_work_over_peak():
    job, cluster = QUESTION.job, QUESTION.cluster
    tokens = job.global_batch * job.seq_len
    ideal = flops_per_token(job.shape, job.seq_len, causal=False) * tokens / (8 * 989e12)
    assert model_flops_utilisation(job, cluster, ideal, "bf16", causal=False) == pytest.approx(1)
    assert model_flops_utilisation(job, cluster, 2 * ideal, "bf16", causal=False) == pytest.approx(0.5)


def test_price_and_energy():
    cluster = QUESTION.cluster
    cost = step_cost(cluster, 3600.0, 1.0, hour_price=2.5)
    assert cost.price == pytest.approx(20)
    assert cost.energy_kwh == pytest.approx(8 * (700 + 125) * 1.2 / 1000)
    assert step_cost(cluster, 3600.0, 0.0).energy_kwh < cost.energy_kwh
    unknown = ClusterSpec(nodes=1, devices_per_node=1, device=replace(cluster.device, name="custom", watts=None))
    assert step_cost(unknown, 1.0, 1.0).price is None
    assert step_cost(unknown, 1.0, 1.0).energy_kwh is None


def test_known_devices_have_prices():
    priced = [name for name in devices() if usual_price(ClusterSpec.parse(name)) is not None]
    assert {"h100", "a100", "rtx4090"} <= set(priced)
