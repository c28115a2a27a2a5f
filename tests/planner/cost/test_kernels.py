"""Kernels and collectives: physical limits and monotonic behaviour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.cluster import ClusterSpec, device, devices
from weft.config.plan import Plan
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost.layer import kernels, share_of
from weft.planner.cost.machine import Fabric, Tables, bytes_s, core_s, flash_s, gemm_s
from weft.planner.estimator import estimate
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape, Stack

H100 = Tables.of(device("h100"))
PEAK = H100.flops["bf16"]
WIDTHS = st.integers(1, 2**17)


@settings(deadline=None, max_examples=100)
@given(WIDTHS, WIDTHS, WIDTHS, st.integers(1, 64), st.sampled_from(sorted(devices())))
def test_matmul_is_slower_than_its_limits(m, n, k, batch, name):
    tables = Tables.of(device(name))
    peak = tables.flops["bf16"]
    seconds = gemm_s(tables, m, n, k, batch, peak)
    assert seconds >= 2.0 * m * n * k * batch / (peak * tables.gemm_ceiling)
    assert seconds >= 2.0 * batch * (m * k + k * n + m * n) / tables.memory_rate


def test_only_large_matmuls_reach_the_ceiling():
    def share(m, n, k):
        return 2.0 * m * n * k / gemm_s(H100, m, n, k, 1, PEAK) / PEAK

    top = H100.gemm_ceiling * H100.gemm_sustained
    assert 0.95 * top < share(16384, 16384, 16384) < top
    assert share(2048, 2048, 2048) < 0.9 * top
    assert share(128, 128, 16384) < 0.2 * top
    # One tile too many adds a full wave.
    assert share(128 * 12, 256 * 11, 8192) > 1.1 * share(128 * 12 + 1, 256 * 11, 8192)


def test_widths_not_divisible_by_8_do_not_use_tensor_cores():
    fast, slow = (gemm_s(H100, 4096, 4096, k, 1, PEAK) for k in (1024, 1025))
    assert slow > 4 * fast
    narrow, odd = (core_s(H100, 1e12, 1e9, width, PEAK) for width in (144, 150))
    assert odd > 4 * narrow


def test_attention_speeds_up_with_length_and_width():
    rates = [1e13 / flash_s(H100, 1e13, length, False, PEAK) for length in (512, 2048, 8192, 65536)]
    assert rates == sorted(rates)
    assert rates[-1] < H100.attn_fwd * H100.gemm_ceiling * PEAK
    assert flash_s(H100, 1e13, 8192, True, PEAK) > flash_s(H100, 1e13, 8192, False, PEAK)
    assert bytes_s(H100, 3.35e12) == pytest.approx(1 / H100.memory_eff)


FABRIC = Fabric.of(H100, 8)
KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])


@settings(deadline=None, max_examples=100)
@given(KINDS, st.floats(1, 1e12), st.integers(2, 4096), st.sampled_from([1, 2, 4, 8]))
def test_collectives_are_not_faster_than_the_links(kind, size, ranks, stride):
    seconds = FABRIC.ring_s(kind, size, ranks, stride)
    passes = 2 if kind == "all_reduce" else 1
    assert seconds >= passes * (ranks - 1) / ranks * size / H100.link_rate
    assert FABRIC.ring_s(kind, 2 * size, ranks, stride) > seconds
    assert FABRIC.ring_s(kind, size, 1, stride) == 0


def test_placement_determines_bandwidth():
    size = 1e9
    inside, across = (float(FABRIC.ring_s("all_gather", size, 8, stride)) for stride in (1, 8))
    assert across > 5 * inside
    # Two ranks per node use two of its adapters.
    spread, paired = (float(FABRIC.ring_s("all_gather", size, 16, stride)) for stride in (8, 4))
    assert 1.5 < spread / paired < 2.5
    halves = FABRIC.ring_s("reduce_scatter", size, 8, 1) + FABRIC.ring_s("all_gather", size, 8, 1)
    assert FABRIC.ring_s("all_reduce", size, 8, 1) == pytest.approx(halves, rel=0.02)
    assert FABRIC.all_to_all_s(size, 8, 1) < FABRIC.all_to_all_s(size, 16, 1)
    assert FABRIC.all_to_all_s(size, 1, 1) == 0
    assert FABRIC.send_s(size, 1) < FABRIC.send_s(size, 8)


def test_small_group_in_a_mesh_has_few_links():
    mesh = Fabric.of(Tables.of(device("mi300x")), 8)
    pair, all_of_them = (1e9 * (n - 1) / n / float(mesh.ring_s("all_gather", 1e9, n, 1)) for n in (2, 8))
    assert all_of_them > 6 * pair


def test_rack_domain_is_wider_than_its_nodes():
    rack = Fabric.of(Tables.of(device("gb200")), 4)
    assert np.isclose(rack.inside(64, 1), 64)
    assert Fabric.of(H100, 4).inside(64, 1) == 4


def test_oversubscribed_links_between_racks() -> None:
    """Racks of 4 nodes of 8; links between them have a quarter or an eighth of the adapters' bandwidth."""
    flat, fourth, eighth = (Fabric.of(H100, 8, 4, thin) for thin in (1.0, 4.0, 8.0))
    size = 1e10
    for n, stride in ((8, 1), (32, 1), (4, 8)):  # within a rack
        assert fourth.ring_s("all_gather", size, n, stride) == flat.ring_s("all_gather", size, n, stride)
        assert fourth.all_to_all_s(size, n, stride) == flat.all_to_all_s(size, n, stride)
    # A ring of 64 in order leaves each rack through one of four nodes' adapters, so a quarter is enough.
    assert fourth.ring_s("all_reduce", size, 64, 1) == flat.ring_s("all_reduce", size, 64, 1)
    assert eighth.ring_s("all_reduce", size, 64, 1) > 1.5 * flat.ring_s("all_reduce", size, 64, 1)
    # One rank per rack: every step leaves the rack.
    assert fourth.ring_s("all_reduce", size, 8, 32) == pytest.approx(
        4 * flat.ring_s("all_reduce", size, 8, 32), rel=0.01
    )
    assert fourth.send_s(size, 32) == pytest.approx(4 * flat.send_s(size, 32), rel=0.01)
    assert fourth.send_s(size, 8) == flat.send_s(size, 8)
    assert fourth.all_to_all_s(size, 128, 1) > 2 * flat.all_to_all_s(size, 128, 1)


def test_weight_gathers_overlap_with_recompute():
    """On a slow network, full recompute gives backward more compute to overlap with."""
    job = Job(shape=Shape.of_decoder(decoder_spec("llama3-8b")), seq_len=4096, global_batch=64)
    cluster = ClusterSpec.parse("8x8xh100")
    cluster = replace(cluster, device=replace(cluster.device, nic_bytes_per_s=8e9))
    plans = [Plan.parse(f"dp_shard=64 zero=3 precision=bf16 recompute={each}") for each in ("none", "full")]
    found = estimate(job, cluster, Columns.of(plans, job), Tables.of(cluster.device))
    kept, again = found.terms["dp_exposed"].tolist()
    assert again == pytest.approx(kept - found.terms["recompute"][1], rel=0.05)


def test_expert_layers_call_more_kernels():
    """Counted in Weft's models: 40 kernels of a dense layer, 75 of one with experts."""
    found = []
    for name in ("llama3-8b", "mixtral-8x7b"):
        job = Job(shape=Shape.of_decoder(decoder_spec(name)), seq_len=128, global_batch=1)
        columns = Columns.of([Plan.parse("precision=bf16")], job)
        tables = Tables.of(ClusterSpec.parse("h100").device)
        found.append(float(kernels(job, columns, tables, share_of(job, columns, tables)).calls[0]))
    assert found == [40, 75]


def test_only_feature_widths_are_aligned():
    """The number of tokens per expert is an average, not the width of a matrix in memory."""
    few, odd, more = (gemm_s(H100, 2048, 4096, tokens, 64, PEAK, widths=(2048, 4096)) for tokens in (85.333, 85, 88))
    assert few == pytest.approx(more, rel=0.05)
    assert odd == pytest.approx(more, rel=0.05)
    assert gemm_s(H100, 2048, 4096, 85.333, 64, PEAK) == pytest.approx(more, rel=0.1)


def mixture(**stack):
    shape = Shape(vocab=32_000, hidden=2048, layers=24, heads=16, kv_heads=16, head_dim=128, ffn=0, gated=True,
                  num_experts=64, top_k=4, expert_ffn=1024)  # fmt: skip
    return Job(shape=shape, seq_len=1024, global_batch=8, stack=replace(Stack(), **stack))


def step(job, plan, cluster="8xh100"):
    found = ClusterSpec.parse(cluster)
    return estimate(job, found, Columns.of([Plan.parse(plan)], job), Tables.of(found.device))


def test_few_tokens_do_not_justify_expert_parallelism():
    job = replace(mixture(fused_sums=True), global_batch=128)
    job = replace(job, shape=replace(job.shape, expert_ffn=512))
    plan = "dp_shard=8 zero=1 precision=bf16 accumulation=16"
    whole, split = (step(job, f"{plan} ep={ep}") for ep in (1, 8))
    assert split.terms["ep"][0] > 16 * 24 * 2 * 50e-6  # two host waits per layer
    assert split.step_s[0] > whole.step_s[0]


def test_expert_traffic_depends_on_the_software():
    plan = "dp_shard=64 zero=1 precision=fp8 ep=64"
    plain, hidden, narrow, uneven = (
        step(replace(mixture(**stack), seq_len=8192, global_batch=64), plan, "8x8xh100").terms["ep"][0]
        for stack in ({}, {"overlap_ep": 0.5}, {"dispatch_bytes": 1.0}, {"balanced_experts": False})
    )
    assert hidden < plain
    assert plain * 0.75 < narrow < plain
    assert uneven > 1.1 * plain


def test_fp8_on_cdna_gains_as_measured():
    """Published pairs of bf16 and fp8 runs differ by a factor of 1.0 to 1.2."""
    shape = Shape(vocab=128_256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14_336, gated=True)
    job = Job(shape=shape, seq_len=8192, global_batch=8, stack=Stack(fused=True))
    half, narrow = (step(job, f"dp_shard=8 zero=3 precision={name}", "8xmi300x").step_s[0] for name in ("bf16", "fp8"))
    assert 1.0 < half / narrow < 1.25


def test_torch_has_no_fast_grouped_products_on_blackwell():
    decoder = replace(decoder_spec("llama3-8b"), num_experts=8, top_k=2, expert_ffn_dim=4096)
    job = Job(shape=Shape.of_decoder(decoder), seq_len=4096, global_batch=64)
    times = {}
    for name, torch_grouped in (("b200", True), ("b200", False), ("h100", True), ("h100", False)):
        cluster = ClusterSpec.parse(f"8x{name}")
        asked = replace(job, stack=replace(job.stack, torch_grouped=torch_grouped))
        columns = Columns.of([Plan.parse("dp_shard=8 zero=1 precision=bf16")], job)
        times[name, torch_grouped] = estimate(asked, cluster, columns, Tables.of(cluster.device)).terms["gemm"][0]
    assert times["h100", True] == times["h100", False]
    assert 1.2 < times["b200", True] / times["b200", False] < 1 / 0.6


def test_selective_recompute_of_kernels_repeats_no_communication():
    decoder = replace(decoder_spec("llama3-8b"), num_experts=8, top_k=2, expert_ffn_dim=4096)
    job = Job(shape=Shape.of_decoder(decoder), seq_len=4096, global_batch=64)
    cluster = ClusterSpec.parse("8xh100")
    columns = Columns.of([Plan.parse("dp_shard=4 tp=2 ep=4 zero=1 precision=bf16 recompute=selective")], job)
    whole, kernels = (
        estimate(replace(job, stack=replace(job.stack, selective_kernels=alone)), cluster, columns, H100).terms
        for alone in (False, True)
    )
    assert whole["recompute"][0] - kernels["recompute"][0] > 0.4 * whole["ep"][0]
    assert {name for name in whole if whole[name][0] != kernels[name][0]} <= {"recompute", "straggler"}
