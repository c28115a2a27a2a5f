"""What rows of published tables mean: devices, networks, software, shapes, and settings that are left out."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.planner.cost.machine.tables import Tables
from weft.planner.scoring.fill import candidates, predict
from weft.planner.scoring.rows.names import cluster_of, device_named, network_rate
from weft.planner.scoring.rows.runs import read_runs
from weft.planner.scoring.rows.shapes import shape_of, step_flops
from weft.planner.scoring.rows.stacks import stack_of, stack_rules


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
    ],
)
def test_devices_by_the_names_of_tables(name, device, gib):
    found = device_named(name)
    assert (found.name, found.memory_bytes) == (device, gib * 2**30)


def test_a_name_may_change_the_device():
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
        ("bigscience bloom", 6.25e9),
        ("nothing is said", None),
    ],
)
def test_networks(text, rate):
    assert network_rate(text, 8) == rate


def test_a_small_cluster_has_no_larger_nodes():
    cluster = cluster_of("h100-80gb-sxm", 4, 8, "")
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert cluster_of("h100-80gb-sxm", 20, 8, "").nodes == 3


def test_software_by_its_words():
    old, selective = stack_of("megatron-lm sc21 (2021)", "a100-80gb-sxm")
    assert (old.flash, old.dropout, old.overlap_grads, selective) == (False, True, False, "attention")
    new, _ = stack_of("nvidia dgxc-benchmarking; nemo", "h100-80gb-sxm")
    assert (new.flash, new.overlap_grads, new.overlap_tp) == (True, True, True)
    assert not stack_of("mlperf; no tp comm overlap", "h100-80gb-sxm")[0].overlap_tp
    eager, selective = stack_of("torchtitan; fsdp", "h100-80gb-sxm")
    assert (eager.fused_norm, eager.reduce_bytes, selective) == (False, 4.0, "selective")
    assert stack_of("fsdp; selective layer ac", "a100")[1] == "half"
    assert not stack_of("anything", "v100-32gb-sxm2")[0].flash
    assert stack_of("kernel=flash_attention2 + rms kernel", "a100")[0].fused_norm
    assert not stack_of("kernel=fused", "a100")[0].flash


def test_rules_name_features_and_give_reasons():
    assert len(stack_rules()) > 10
    for rule in stack_rules():
        assert rule.values


def row(**changes: object) -> dict[str, str]:
    base = {"layers": 32, "hidden": 4096, "heads": 32, "seq_len": 4096}
    return {name: str(value) for name, value in (base | changes).items()}


def test_shapes_of_rows_that_say_little():
    gpt = shape_of(row())
    assert (gpt.gated, gpt.ffn, gpt.kv_heads, gpt.vocab, gpt.tied) == (False, 16_384, 32, 50_257, True)
    llama = shape_of(row(ffn_hidden=11_008))
    assert (llama.gated, llama.learned_positions, llama.tied) == (True, 0, False)
    assert not shape_of(row(notes="untied embeddings")).tied
    oss = shape_of(row(model_family="gpt-oss", hidden=2880, heads=64, experts=32, top_k=4))
    assert (oss.head_dim, oss.window, oss.windowed_layers, oss.moe_layers) == (64, 128, 16, 32)


def test_flops_by_the_formula_of_the_paper():
    """96 B s l h^2 (1 + s / 6 h + V / 16 l h): Narayanan et al. 2021 (arXiv 2104.04473), equation 3."""
    shape = shape_of(row(hidden=12_288, heads=96, layers=96, seq_len=2048, vocab=51_200))
    h, layers, s, vocab = 12_288, 96, 2048, 51_200
    expected = 96 * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert step_flops(shape, s, s, with_recompute=True) == pytest.approx(expected, rel=1e-3)


def test_settings_that_are_left_out_are_chosen_so_that_they_fit(tmp_path):
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
