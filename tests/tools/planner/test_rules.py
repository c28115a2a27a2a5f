"""What rows of published tables mean: devices, networks, software, shapes, and settings that are left out."""

from __future__ import annotations

import pytest

from tools.planner.cells import cluster_of, device_named, network_rate, shape_of, step_flops
from tools.planner.published_runs import read_runs
from tools.planner.scores import candidates, predict
from tools.planner.stacks import stack_of, stack_rules
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


def test_rules_do_not_overwrite_each_other_unawares():
    """Two rules that set one feature differently: the later one names the earlier."""
    rules = stack_rules()
    for place, later in enumerate(rules):
        assert later.cite, later.name
        assert later.over <= {each.name for each in rules[:place]}, later.name
        for earlier in rules[:place]:
            own, known = dict(later.values), dict(earlier.values)
            clash = [name for name in own if name in known and own[name] != known[name] and name != "name"]
            apart = earlier.name in later.over or _never_together(earlier, later)
            assert not clash or apart, (earlier.name, later.name, clash)


def _never_together(one, other) -> bool:
    """Whether a sample of what sources write meets both rules nowhere."""
    texts = [
        "megatron-lm sc21 (2021)", "megatron-lm readme (sep 2020)", "megatron-deepspeed bloom", "korthikanti",
        "mosaicml",
        "mosaicml; mp mode default; alibi+flash attn", "mosaicml; mp mode pure; alibi", "torchtitan; fsdp2",
        "hf nanotron", "internevo", "aleph alpha; kernel=flash_attentionv1", "aleph alpha; kernel=torch",
        "aleph alpha; kernel=fused", "aleph alpha; kernel=flash_attention2 + rms kernel", "nvidia jax-toolbox pax; xla",
        "pax; te on xla", "nemo automodel; fsdp2; deepep", "nvidia megatron-bridge; container 24.09", "mlperf; nemo",
        "megatron-moe-modelzoo; deepep; recompute norm+act", "moe parallel folding; mcore 5d",
        "moe parallel folding; mcore folding; etp=1", "torchtitan; selective layer ac", "stas00; liger",
        "primus; megatron",
        "megatron-moe-modelzoo; selective recompute of layernorm+moe", "zero bubble pipeline", "open beta nemo",
    ]  # fmt: skip
    gpus = ("a100-80gb-sxm", "h100-80gb-sxm", "v100-32gb-sxm3", "b200", "mi355x")
    return not any(one.holds(text, gpu) and other.holds(text, gpu) for text in texts for gpu in gpus)


def test_speeds_of_kernels_multiply():
    """The first FlashAttention on Hopper is both: half of the second's speed, which was made for Ampere."""
    first, _ = stack_of("mosaicml; fsdp; alibi+flash attn", "h100-80gb-sxm")
    second, _ = stack_of("torchtitan; fsdp", "h100-80gb-sxm")
    tables = Tables.of(device_named("h100-80gb-sxm"))
    shape = shape_of(row())
    speeds = [
        attention_gain(Job(shape=shape, seq_len=4096, global_batch=1, stack=each), tables) for each in (first, second)
    ]
    assert speeds[1] == pytest.approx(0.62)
    assert speeds[0] == pytest.approx(0.62 * 0.55)
    assert stack_of("megatron-deepspeed; bloom", "a100")[0].host_gain == pytest.approx(0.2)


def test_a_token_that_goes_to_a_node_once_crosses_the_network_less():
    fabric = Fabric.of(Tables.of(device_named("h100-80gb-sxm")), 8)
    each, once = (float(fabric.all_to_all_s(1e9, 32, 1, copies)) for copies in (None, 8))
    assert once < 0.6 * each
    inside = [float(fabric.all_to_all_s(1e9, 8, 1, copies)) for copies in (None, 8)]
    assert inside[1] / inside[0] == pytest.approx(1 - (7 / 8) ** 8, rel=0.02)
    assert stack_of("megatron-moe-modelzoo; deepep", "h100-80gb-sxm")[0].once_per_node
    assert not stack_of("megatron-moe-modelzoo; a2a dispatcher", "h100-80gb-sxm")[0].once_per_node


@pytest.mark.parametrize(("nodes", "line"), [(4, 58e9), (8, 51e9)])
def test_a_dispatch_takes_as_long_as_deepep_measured(nodes, line):
    """4,096 tokens of 7,168 values in fp8 to 4 nodes at most, H800 with 50 GB/s: DeepEP's docs/legacy.md, which counts
    the rank's own node in its rates. Over 2 nodes it measured half of the formula's speed, its
    second version did not."""
    fabric = Fabric.of(Tables.of(device_named("h800-80gb")), 8)
    token = 4096 * 7168.0
    measured = token * 4 / line
    copies = 8 if nodes == 4 else 5  # over 8 nodes routing is limited to 4: as many as 5 free choices reach
    reached = nodes * (1 - (1 - 1 / nodes) ** copies)
    found = float(fabric.all_to_all_s(token * copies, 8 * nodes, 1, copies))
    assert found * 4 / reached == pytest.approx(measured, rel=0.12)


def test_weights_travel_in_fp8_where_the_software_does_so():
    assert stack_of("mlperf training v5.1", "b200")[0].fp8_gather
    assert not stack_of("nemo 24.07", "h100-80gb-sxm")[0].fp8_gather


def test_what_a_row_leaves_out_is_inferred(tmp_path):
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


def test_shapes_that_notes_tell():
    found = shape_of(row(notes="head_dim=128; local/global attention 5:1 with 1024 window", layers=48))
    assert (found.head_dim, found.window, found.windowed_layers) == (128, 1024, 40)
    half = shape_of(row(experts=128, top_k=1, ffn_hidden=8192, notes="MoE every other layer", layers=48))
    assert (half.moe_layers, half.ffn) == (24, 16_384)
