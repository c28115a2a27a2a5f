"""Step time: terms sum, rows are independent, and better machines are never slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.cluster import ClusterSpec
from weft.config.fields.wire_formats import COMPRESSES, GATHERS
from weft.config.plan import RECOMPUTES, SCHEDULES, Plan
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost import row_dedupe as alike
from weft.planner.cost import step
from weft.planner.cost.machine import Tables
from weft.planner.cost.step import TERMS
from weft.planner.estimator import estimate
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import Shape, Stack
from weft.verify.matrix import legal, sample

SHAPE = Shape.of_decoder(decoder_spec("llama3-8b"))
JOB = Job(shape=SHAPE, seq_len=4096, global_batch=256)
MIXTURE = replace(SHAPE, ffn=0, num_experts=8, top_k=2, expert_ffn=14_336)
CLUSTER = ClusterSpec.parse("16x8xh100")
TABLES = Tables.of(CLUSTER.device)


def plans(seed: int, rows: int = 40) -> Columns:
    rng = np.random.default_rng(seed)

    def pick(*values):
        return rng.choice(values, rows)

    return Columns.make(
        rows,
        **{name: pick(1, 2, 4, 8) for name in ("pp", "dp_replicate", "dp_shard", "tp", "num_micro")},
        cp=pick(1, 1, 2, 4),
        cp_mode=pick(0, 1, 2),
        zero=pick(0, 1, 2, 3),
        sp=pick(False, True),
        schedule=rng.integers(0, len(SCHEDULES), rows),
        virtual_stages=pick(1, 2, 4),
        microbatch=pick(1, 2, 3),
        recompute=rng.integers(0, len(RECOMPUTES), rows),
        recompute_share=pick(0.5, 1.0),
        offload_optimizer=pick(0.0, 0.5),
        precision=pick(0, 1, 4, 5, 6),
        compile=pick(False, True),
        reshard=pick(0, 1, 2),
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.booleans())
def test_terms_are_never_negative_and_sum(seed, mixture):
    job = replace(JOB, shape=MIXTURE) if mixture else JOB
    found = estimate(job, CLUSTER, plans(seed), TABLES)
    assert set(found.terms) == set(TERMS)
    assert all((values >= 0).all() and np.isfinite(values).all() for values in found.terms.values())
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.tokens_per_s * found.step_s == pytest.approx(256.0 * 4096)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000))
def test_row_result_does_not_depend_on_its_position(seed):
    columns = plans(seed)
    order = np.random.default_rng(seed).permutation(len(columns))
    straight, mixed = (estimate(JOB, CLUSTER, each, TABLES) for each in (columns, columns[order]))
    assert mixed.step_s == pytest.approx(straight.step_s[order])
    assert mixed.total_bytes == pytest.approx(straight.total_bytes[order])
    alone = [estimate(JOB, CLUSTER, columns[np.array([row])], TABLES).step_s[0] for row in range(3)]
    assert alone == pytest.approx(straight.step_s[:3])


def test_long_columns_are_processed_in_chunks(monkeypatch):
    columns = plans(7)
    whole = estimate(JOB, CLUSTER, columns, TABLES)
    monkeypatch.setattr(alike, "_FEW", 1)
    monkeypatch.setattr(step, "_AT_ONCE", 50)
    monkeypatch.setattr(step, "_CHUNK", 7)
    pieces = estimate(JOB, CLUSTER, columns, TABLES)
    assert pieces.step_s == pytest.approx(whole.step_s)
    assert pieces.total_bytes == pytest.approx(whole.total_bytes)


def test_no_rows_give_no_estimates():
    assert len(estimate(JOB, CLUSTER, plans(1)[slice(0, 0)], TABLES).step_s) == 0


@pytest.mark.parametrize("name", ["memory_rate", "link_rate", "nic_rate", "gemm_ceiling", "memory_eff", "adam_eff"])
@pytest.mark.parametrize("seed", [1, 2])
def test_better_machines_are_never_slower(name, seed):
    better = TABLES.changed(**{name: 1.1 * getattr(TABLES, name)})
    before, after = (estimate(JOB, CLUSTER, plans(seed), tables).step_s for tables in (TABLES, better))
    assert (after <= before * (1 + 1e-9)).all()


def test_time_is_inverse_to_device_speed_if_all_else_is_free():
    free = {
        "memory_rate": 1e30, "link_rate": 1e30, "nic_rate": 1e30, "launch_s": 0.0, "host_op_s": 0.0, "step_s": 0.0,
        "barrier_s": 0.0,
        "link_alpha_s": 0.0, "nic_alpha_s": 0.0, "straggler": 0.0, "half_bytes": 0.0, "overlap_compute": 1.0,
    }  # fmt: skip
    once = TABLES.changed(**free)
    twice = replace(once, flops={name: 2 * peak for name, peak in once.flops.items()})
    columns = plans(3)
    columns = columns.with_arrays(offload_optimizer=np.zeros(len(columns)))
    slow, fast = (estimate(JOB, CLUSTER, columns, tables).step_s for tables in (once, twice))
    assert fast == pytest.approx(slow / 2)


def test_one_device_takes_at_least_its_arithmetic():
    found = estimate(JOB, CLUSTER, Columns.make(1, num_micro=256), TABLES)
    flops = 6 * (SHAPE.num_params - SHAPE.vocab * SHAPE.hidden) * 256 * 4096
    assert found.step_s[0] > flops / (TABLES.flops["bf16"] * TABLES.gemm_ceiling)
    for name in ("tp", "cp", "ep", "pp_p2p", "bubble", "dp_exposed", "offload", "recompute", "straggler"):
        assert found.terms[name][0] == 0


def test_more_passes_shrink_the_bubble_share():
    columns = Columns.make(3, pp=8, num_micro=[8, 16, 64])
    found = estimate(JOB, CLUSTER, columns, TABLES)
    assert all(np.diff(found.terms["bubble"] / found.step_s) < 0)


def test_compiled_blocks_do_not_defer_weight_gradients():
    schedules = [SCHEDULES.index(name) for name in ("1f1b", "zb_h1", "interleaved", "zb_interleaved")]
    for compiled in (False, True):
        columns = Columns.make(4, pp=8, num_micro=16, schedule=schedules, virtual_stages=2, compile=compiled)
        straight, zb_h1, looped, zb_looped = estimate(JOB, CLUSTER, columns, TABLES).terms["bubble"]
        if compiled:
            assert (zb_h1, zb_looped) == pytest.approx((straight, looped))
        else:
            assert zb_h1 < 0.8 * straight
            assert zb_looped < 0.8 * looped


def test_overlapped_communication_is_not_exposed():
    columns = Columns.make(1, dp_shard=64, zero=3, num_micro=2)
    hidden, bare = (
        estimate(replace(JOB, stack=Stack(overlap_data=on)), CLUSTER, columns, TABLES) for on in (True, False)
    )
    assert hidden.terms["dp_exposed"][0] < bare.terms["dp_exposed"][0]
    assert hidden.terms["contention"][0] > bare.terms["contention"][0] == 0


def test_tp_chunks_overlap_traffic_up_to_an_optimum():
    """One chunk changes nothing; of two, half overlaps if products take longer; a thousand add as many launches."""
    job = replace(JOB, seq_len=8192)
    columns = Columns.make(5, tp=8, sp=[True, True, True, True, False], tp_chunks=[1, 2, 4, 1000, 1])
    exposed = estimate(job, CLUSTER, columns, TABLES).terms["tp"]
    assert exposed[0] > exposed[1] > exposed[2]
    assert exposed[3] > exposed[0]
    plain = estimate(job, CLUSTER, Columns.make(1, tp=8, sp=True), TABLES).terms["tp"]
    assert exposed[0] == plain[0]
    assert exposed[4] == estimate(job, CLUSTER, Columns.make(1, tp=8), TABLES).terms["tp"][0]


def test_gathering_once_per_step_costs_less_with_many_passes():
    columns = Columns.make(3, dp_shard=64, zero=3, num_micro=8, reshard=[0, 1, 2])
    slow = replace(JOB, stack=Stack(overlap_data=False))
    exposed = estimate(slow, CLUSTER, columns, TABLES).terms["dp_exposed"]
    assert all(np.diff(exposed) < 0)


def test_expert_traffic_is_counted():
    job = replace(JOB, shape=MIXTURE)
    columns = Columns.make(3, ep=[1, 8, 64], dp_shard=64, num_micro=4)
    found = estimate(job, CLUSTER, columns, TABLES)
    assert found.terms["ep"][0] == 0
    assert all(np.diff(found.terms["ep"]) > 0)
    assert all(np.diff(found.memory["parameters"]) < 0)


def test_bf16_gradients_take_the_time_of_half_the_bytes():
    """Only on the data axes, and with a rounded copy of the gradients in transfer."""
    columns = plans(5).with_arrays(precision=np.zeros(40, np.uint8))
    wide = estimate(JOB, CLUSTER, columns, TABLES)
    narrow = estimate(JOB, CLUSTER, columns.with_arrays(reduce=np.ones(40, np.uint8)), TABLES)
    halved = estimate(replace(JOB, stack=Stack(reduce_bytes=2.0)), CLUSTER, columns, TABLES)
    for name, seconds in narrow.terms.items():
        assert seconds == pytest.approx(halved.terms[name]), name
    changed = {name for name in wide.terms if (narrow.terms[name] != wide.terms[name]).any()}
    assert "dp_exposed" in changed
    assert (narrow.step_s <= wide.step_s).all()
    assert (narrow.total_bytes >= wide.total_bytes).all()
    assert (narrow.total_bytes > wide.total_bytes).any()


@pytest.mark.parametrize("name", ["1x8xa100", "16x8xh100"])
def test_tf32_is_fp32_with_faster_products(name):
    """Memory, traffic and fused attention equal fp32; only products are faster, and slower than in bf16."""
    cluster = ClusterSpec.parse(name)
    tables = Tables.of(cluster.device)
    columns = plans(6)
    found = {
        name: estimate(JOB, cluster, columns.with_arrays(precision=np.full(40, PRECISIONS.index(name))), tables)
        for name in ("fp32", "tf32", "bf16")
    }
    for part, num_bytes in found["fp32"].memory.items():
        assert (found["tf32"].memory[part] == num_bytes).all(), part
    assert (found["bf16"].terms["gemm"] < found["tf32"].terms["gemm"]).all()
    assert (found["tf32"].terms["gemm"] < found["fp32"].terms["gemm"]).all()
    assert found["tf32"].terms["attention"] == pytest.approx(found["fp32"].terms["attention"])
    assert (found["tf32"].step_s < found["fp32"].step_s).all()


def test_local_sgd_sync_is_amortized_over_its_steps():
    """Replicas keep an anchor, and under diloco a momentum, sharded like masters."""
    columns = Columns.make(
        4, dp_replicate=8, dp_shard=8, zero=3, num_micro=4, sync=[0, 2, 2, 1], sync_every=[1, 10, 40, 40]
    )
    apart = Columns.make(1, dp_shard=8, zero=3, num_micro=4)
    found, alone = estimate(JOB, CLUSTER, columns, TABLES), estimate(JOB, CLUSTER, apart, TABLES)
    every, ten, forty, average = found.terms["dp_exposed"] - alone.terms["dp_exposed"][0]
    assert ten == pytest.approx(4 * forty)
    assert average == pytest.approx(forty)
    assert ten < every / 4
    kept = found.memory["optimizer"] - found.memory["optimizer"][0]
    assert kept == pytest.approx([0.0, 2 * kept[3], 2 * kept[3], kept[3]])


def test_fragment_sync_overlaps_with_the_step():
    """Only the time beyond a step is exposed. Memory has a fragment and its transfer buffer."""
    columns = Columns.make(
        4, dp_replicate=8, dp_shard=8, zero=3, num_micro=1, sync=2, sync_every=100, sync_fragments=[0, 1, 2, 100]
    )
    alone = estimate(JOB, CLUSTER, Columns.make(1, dp_shard=8, zero=3, num_micro=1), TABLES)
    found = estimate(JOB, CLUSTER, columns, TABLES)
    at_once, one, two, many = found.terms["dp_exposed"] - alone.terms["dp_exposed"][0]
    assert at_once >= one >= two >= many == pytest.approx(0.0, abs=1e-12)
    assert at_once > one
    kept = found.memory["optimizer"] - alone.memory["optimizer"][0]
    assert kept == pytest.approx([kept[0], 2 * kept[0], 1.5 * kept[0], 1.01 * kept[0]])


def test_int8_sync_sends_a_quarter():
    columns = Columns.make(2, dp_replicate=8, dp_shard=8, zero=1, sync=2, sync_every=10)
    plain, coded = (
        estimate(JOB, CLUSTER, columns.with_arrays(compress=np.full(2, COMPRESSES.index(name), np.uint8)), TABLES)
        for name in ("none", "int8")
    )
    alone = estimate(JOB, CLUSTER, Columns.make(2, dp_shard=8, zero=1), TABLES).terms["dp_exposed"]
    ratio = (coded.terms["dp_exposed"] - alone) / (plain.terms["dp_exposed"] - alone)
    assert ratio == pytest.approx(0.252, rel=0.05)


def test_coded_weight_differences_send_an_eighth_and_keep_own_masters():
    columns = Columns.make(2, dp_shard=8, zero=1, precision=0)
    slow = replace(JOB, stack=Stack(overlap_data=False))
    coded = columns.with_arrays(gather=np.full(2, GATHERS.index("diff4"), np.uint8))
    plain, found = estimate(slow, CLUSTER, columns, TABLES), estimate(slow, CLUSTER, coded, TABLES)
    assert (found.terms["dp_exposed"] < 0.8 * plain.terms["dp_exposed"]).all()
    masters = found.memory["optimizer"] - plain.memory["optimizer"]
    assert masters == pytest.approx(found.memory["parameters"] / 8)
    assert (found.memory["gradients"] == plain.memory["gradients"]).all()


def test_second_shards_cost_memory_and_save_gathers_between_hosts():
    columns = Columns.make(3, dp_shard=64, zero=3, num_micro=4, reshard_within=[0, 8, 16])
    slow = replace(JOB, stack=Stack(overlap_data=False))
    found = estimate(slow, CLUSTER, columns, TABLES)
    exposed, kept = found.terms["dp_exposed"], found.total_bytes
    assert exposed[1] < exposed[2] <= exposed[0]
    assert kept[1] > kept[2] > kept[0]


def test_every_legal_plan_gets_an_estimate():
    """Estimate a sample of the plans that runtime tests may try on 4 ranks."""
    spec = decoder_spec("small")
    tried = sample(legal(4, model=spec, global_batch=64, seq_len=1024, precision=("bf16",), compile=(False,)), 2000)
    job = Job(shape=Shape.of_decoder(spec), seq_len=1024, global_batch=64)
    found = estimate(job, CLUSTER, Columns.of(tried, job), TABLES)
    assert len(found.step_s) == len(tried) > 1000
    for values in (found.step_s, found.total_bytes, found.fits_probability):
        assert np.isfinite(values).all()
    assert (found.step_s > 0).all()
    assert (found.total_bytes > 0).all()


@pytest.mark.parametrize("axis", ["dp_replicate=2", "dp_shard=2 zero=2"])
def test_rank_with_the_most_samples_decides_memory_and_time(axis):
    """Shares 3+1 of 64 samples cost what 48 samples cost on each rank."""
    texts = [f"{axis} shares=3+1 accumulation=4 precision=bf16", f"{axis} accumulation=4 precision=bf16"]
    unequal, larger = (
        estimate(job, CLUSTER, Columns.of([Plan.parse(text)], job), TABLES)
        for job, text in zip((replace(JOB, global_batch=64), replace(JOB, global_batch=96)), texts, strict=True)
    )
    for name in unequal.memory:
        assert unequal.memory[name] == pytest.approx(larger.memory[name]), name
    for name in unequal.terms:
        assert unequal.terms[name] == pytest.approx(larger.terms[name]), name


def test_rounded_microbatches_decide_memory_but_not_time():
    """Of 11 samples in 4 microbatches, memory is for the largest microbatch and time for all samples."""
    job = replace(JOB, global_batch=16)

    def of(text, job):
        return estimate(job, CLUSTER, Columns.of([Plan.parse(f"dp_replicate=2 precision=bf16 {text}")], job), TABLES)

    unequal, three = of("shares=11+5 accumulation=4", job), of("accumulation=4", replace(job, global_batch=24))
    assert unequal.memory["activations"] == pytest.approx(three.memory["activations"])
    assert unequal.terms["attention"] == pytest.approx(three.terms["attention"] * 11 / 12, rel=1e-3)


def test_largest_shard_decides_states_and_padded_traffic():
    """Shards 3+1 of two ranks are 1.5 times equal ones, in memory and on the links."""
    texts = ("shard_shares=3+1", "")
    unequal, equal = (
        estimate(JOB, CLUSTER, Columns.of([Plan.parse(f"dp_shard=2 zero=2 accumulation=8 {one}")], JOB), TABLES)
        for one in texts
    )
    assert unequal.memory["optimizer"] == pytest.approx(1.5 * equal.memory["optimizer"])
    assert unequal.memory["gradients"] > equal.memory["gradients"]
    assert unequal.memory["activations"] == equal.memory["activations"]
    assert unequal.terms["dp_exposed"] > equal.terms["dp_exposed"]
    assert unequal.terms["gemm"] == equal.terms["gemm"]
