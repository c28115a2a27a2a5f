"""Interpretation of published tables: devices, networks, software, shapes, and missing settings."""

from __future__ import annotations

import pytest

from tools.planner.cells import cluster_of, device_named, network_bytes_per_s, shape_of, step_flops
from tools.planner.published_runs import read_runs
from tools.planner.scores import candidates, predict
from tools.planner.stacks import counts_causal_half, facts_of, stack_of, unread, value_in, vocabulary, year_of
from weft.errors import ConfigError
from weft.planner.cost.layer import attention_gain
from weft.planner.cost.machine import Fabric, Tables
from weft.planner.space.columns import Job


@pytest.mark.parametrize(
    ("name", "device", "gib"),
    [
        ("a100-80gb-sxm", "a100", 80),
        ("a100-40gb-sxm", "a100-40", 40),
        ("A100-80GB-PCIe", "a100-pcie", 80),
        ("a800-80gb", "a800", 80),
        ("h100-80gb-sxm", "h100", 80),
        ("h200-141gb", "h200", 141),
        ("v100-16gb-sxm2", "v100*", 16),
        ("nvidia-h20", "h20", 96),
        ("gb200-nvl72", "gb200", 186),
        ("rtx-4090-24gb", "rtx4090", 24),
        ("mi300x-192gb", "mi300x", 192),
        ("a10g-24gb", "a10g", 24),
        ("a10g", "a10g", 24),
    ],
)
def test_devices_are_found_by_table_names(name, device, gib):
    found = device_named(name)
    assert (found.name, found.memory_bytes) == (device, gib * 2**30)


def test_device_name_may_change_its_specs():
    capped = device_named("h100-96gb-hbm2e-500w")
    plain = device_named("h100-80gb-sxm")
    assert (capped.memory_bytes, capped.memory_bytes_per_s, capped.watts) == (96 * 2**30, 2.4e12, 500)
    assert capped.measured_flops < 0.8 * plain.measured_flops
    switched = device_named("v100-32gb-sxm3")
    assert (switched.scale_up_domain, switched.scale_up_topology) == (16, "switch")
    with pytest.raises(ConfigError, match="device=abacus"):
        device_named("abacus")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("selene, 8x200gb hdr ib per node", 25e9),
        ("4x200gb hdr ib per node (800 gb/s)", 12.5e9),
        ("1600 gbps node-node interconnect (roce)", 25e9),
        ("network 400gb/s per node as printed", 6.25e9),
        ("500w cap, 400gb/s per gpu", 50e9),
        ("nothing is said", None),
    ],
)
def test_network_notations(text, rate):
    assert network_bytes_per_s(text, 8) == rate


def test_small_cluster_has_no_larger_nodes():
    cluster = cluster_of("h100-80gb-sxm", 4, 8, "")
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert cluster_of("h100-80gb-sxm", 20, 8, "").nodes == 3


def stack(source: str, gpu: str, **cells: str):
    return stack_of({"source": source, "gpu": gpu, **cells})


def test_software_is_recognized_by_name():
    old = stack("Megatron-LM SC21 (2021)", "a100-80gb-sxm")
    assert (old.flash, old.overlap_data, old.overlap_tp) == (False, False, False)
    new = stack("NVIDIA dgxc-benchmarking; NeMo", "h100-80gb-sxm")
    assert (new.flash, new.overlap_data, new.overlap_tp) == (True, True, True)
    assert not stack("MLPerf", "h100-80gb-sxm", notes="no TP comm overlap (v3.0)").overlap_tp
    eager = stack("torchtitan", "h100-80gb-sxm", notes="FSDP2")
    assert (eager.fused, eager.reduce_bytes, eager.selective_half) == (False, 4.0, True)
    assert not stack("anything", "v100-32gb-sxm2").flash
    assert stack("Aleph Alpha", "a100", notes="kernel=flash_attention2 + RMS kernel").fused
    assert not stack("Aleph Alpha", "a100", notes="kernel=fused").flash


def test_attention_kernel_depends_on_kernel_or_year_not_framework():
    assert stack("an engineer, 2026", "b200", notes="DeepSpeed ZeRO-3, Liger, FA4").attention == "best"
    assert stack("a report", "h100", notes="DeepSpeed; FA2").attention == "flash2"
    assert stack("DeepSpeed blog 2025", "a100").attention == "best"
    assert stack("DeepSpeed paper (arXiv:2201.11990)", "a100").attention == "unfused"
    assert stack("torchtitan", "h100").attention == "flash2"  # torch's own kernel, before 2.11
    assert year_of({"source": "NeMo performance summary (24.07 container)"}) == 2024


def test_column_overrides_text_and_allows_known_values_only():
    assert stack("Megatron-LM 2021", "a100", attention="best").attention == "best"
    with pytest.raises(ConfigError, match="attention=magic: not one of best, flash2, flash1, unfused"):
        stack("Megatron-LM 2021", "a100", attention="magic")
    assert facts_of({"source": "NVIDIA Megatron-Bridge"})["publisher"] == "nvidia"
    assert unread({"notes": "q=A; DeepEP; on a rainy day"}) == ["on a rainy day"]


def test_longer_of_two_phrases_applies():
    assert value_in("tp_overlap", "TP comm overlap on") == "yes"
    assert value_in("tp_overlap", "no TP comm overlap") == "no"
    assert value_in("offload_optimizer", "no offload") is None


def test_phrase_belongs_to_one_value_of_a_column():
    for column, values in vocabulary().items():
        phrases = [phrase for each in values.values() for phrase in each]
        assert len(phrases) == len(set(phrases)), column


@pytest.mark.parametrize(
    "text", ["causal attention flops", "attention flops counted causally", "attention flops causal"]
)
def test_causal_flop_convention_is_recognized(text):
    assert counts_causal_half(text)
    assert not counts_causal_half(text.replace("causal", "non-causal"))
    assert not counts_causal_half("causal attention; model flops")


def row(**changes: object) -> dict[str, str]:
    base = {"layers": 32, "hidden": 4096, "heads": 32, "seq_len": 4096}
    return {name: str(value) for name, value in (base | changes).items()}


def test_shapes_of_rows_with_few_columns():
    gpt = shape_of(row())
    assert (gpt.gated, gpt.ffn, gpt.kv_heads, gpt.vocab, gpt.tied) == (False, 16_384, 32, 50_257, True)
    llama = shape_of(row(ffn_hidden=11_008))
    assert (llama.gated, llama.learned_positions, llama.tied) == (True, 0, False)
    assert not shape_of(row(notes="untied embeddings")).tied
    oss = shape_of(row(model_family="gpt-oss", hidden=2880, heads=64, experts=32, top_k=4))
    assert (oss.head_dim, oss.window, oss.windowed_layers, oss.moe_layers) == (64, 128, 16, 32)


def test_flops_match_the_papers_formula():
    """96 B s l h^2 (1 + s / 6 h + V / 16 l h): Narayanan et al. 2021 (arXiv 2104.04473), equation 3."""
    shape = shape_of(row(hidden=12_288, heads=96, layers=96, seq_len=2048, vocab=51_200))
    h, layers, s, vocab = 12_288, 96, 2048, 51_200
    expected = 96 * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert step_flops(shape, s, s, with_recompute=True) == pytest.approx(expected, rel=1e-3)


def test_missing_settings_are_chosen_to_fit(tmp_path):
    path = tmp_path / "open.csv"
    head = "id,layers,hidden,heads,seq_len,gpu,gpus,tp,dp,zero_stage,global_batch,precision"
    path.write_text(f"{head}\nx-1,48,8192,64,4096,a100-80gb-sxm,32,8,4,1,128,bf16\n")
    runs, skipped = read_runs(path)
    assert not skipped
    columns = candidates(runs[0])
    assert set(columns.microbatch) == {1, 2, 4, 8, 16}
    estimates, chosen = predict(runs[0], Tables.of(runs[0].cluster.device))
    fits = estimates.fits_probability > 0.5
    assert fits[chosen]
    assert not fits.all()
    assert estimates.step_s[chosen] == estimates.step_s[fits].min()


def test_kernel_speed_factors_multiply():
    """FlashAttention 1 on Hopper has both factors: half the speed of version 2, which was written for Ampere."""
    first, second = (stack("torch", "h100-80gb-sxm", attention=kernel) for kernel in ("flash1", "flash2"))
    tables = Tables.of(device_named("h100-80gb-sxm"))
    shape = shape_of(row())
    speeds = [
        attention_gain(Job(shape=shape, seq_len=4096, global_batch=1, stack=each), tables) for each in (first, second)
    ]
    assert speeds[1] == pytest.approx(0.62)
    assert speeds[0] == pytest.approx(0.62 * 0.55)


def test_deduplicated_tokens_reduce_network_traffic():
    fabric = Fabric.of(Tables.of(device_named("h100-80gb-sxm")), 8)
    each, once = (float(fabric.all_to_all_s(1e9, 32, 1, copies)) for copies in (None, 8))
    assert once < 0.6 * each
    inside = [float(fabric.all_to_all_s(1e9, 8, 1, copies)) for copies in (None, 8)]
    assert inside[1] / inside[0] == pytest.approx(1 - (7 / 8) ** 8, rel=0.02)
    assert stack("Megatron-MoE-ModelZoo", "h100", notes="DeepEP").dispatch == "deepep"
    assert stack("Megatron-MoE-ModelZoo", "h100", notes="A2A dispatcher").dispatch == "each"


@pytest.mark.parametrize(("nodes", "line"), [(4, 58e9), (8, 51e9)])
def test_dispatch_time_matches_deepep(nodes, line):
    """4,096 tokens of 7,168 values in fp8 to 4 nodes at most, H800 with 50 GB/s: DeepEP's docs/legacy.md, which counts
    the rank's own node in its rates. Over 2 nodes it measured half of the formula's speed, its
    second version did not."""
    fabric = Fabric.of(Tables.of(device_named("h800-80gb")), 8)
    token = 4096 * 7168.0
    measured = token * 4 / line
    copies = 8 if nodes == 4 else 5  # over 8 nodes routing is limited to 4, as many as 5 free choices reach
    reached = nodes * (1 - (1 - 1 / nodes) ** copies)
    found = float(fabric.all_to_all_s(token * copies, 8 * nodes, 1, copies))
    assert found * 4 / reached == pytest.approx(measured, rel=0.12)


def test_missing_columns_are_inferred(tmp_path):
    path = tmp_path / "open.csv"
    head = (
        "id,source,layers,hidden,heads,seq_len,gpu,gpus,tp,pp,dp,zero_stage,global_batch,precision,experts,top_k,ep,"
        "notes"
    )
    path.write_text(
        f"{head}\n"
        "x-1,Megatron-LM,126,16384,128,8k,h100-80gb-sxm,2048,8,16,16,,256,bf16,,,,d_iter=9\n"
        "x-2,Megatron-LM,24,2048,16,4096,h100-80gb-sxm,8,1,1,8,1,64,bf16,64,8,,optimizer step on CPU (ZeRO offload)\n"
    )
    (dense, mixture), skipped = read_runs(path)
    assert not skipped
    assert (dense.job.seq_len, dense.zero, mixture.ep, mixture.host_optimizer) == (8192, None, None, True)
    plans = candidates(dense)
    assert set(plans.zero) == {0, 1, 2}
    assert {2, 4, 8} <= set(plans.virtual_stages)  # 126 layers and two ends fill 16 stages evenly
    assert (plans.activation_budget < 1).any()
    assert set(candidates(mixture).ep) == {1, 2, 4, 8}
    assert (candidates(mixture).offload_optimizer == 1).all()


def test_shapes_are_read_from_notes():
    found = shape_of(row(notes="head_dim=128; local/global attention 5:1 with 1024 window", layers=48))
    assert (found.head_dim, found.window, found.windowed_layers) == (128, 1024, 40)
    half = shape_of(row(experts=128, top_k=1, ffn_hidden=8192, notes="MoE every other layer", layers=48))
    assert (half.moe_layers, half.ffn) == (24, 16_384)
