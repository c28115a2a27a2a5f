"""Estimates for a measured machine: constants from a synthetic machine's rates."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.measured.synthetic import BYTES, CALL, FLOPS, VALUES, profile
from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.cost.machine import Tables
from weft.planner.cost.step import ADAM_BYTES
from weft.planner.estimator import estimate
from weft.planner.measured.links import fit_transfer
from weft.planner.measured.machine_profile import Lesson, Measurement, Profile
from weft.planner.measured.profile_tables import cluster_of, measured_tables
from weft.planner.report.explanation import time_by_rung
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape

SHAPE = Shape(vocab=2048, hidden=256, layers=8, heads=8, kv_heads=4, head_dim=32, ffn=768)
JOB = Job(shape=SHAPE, seq_len=128, global_batch=8)


def tables_of(count: int, known: Profile | None = None) -> Tables:
    known = known or profile()
    return measured_tables(known, cluster_of(known, f"{count}xhere"), "tables")


def step(text: str, known: Profile | None = None, job: Job = JOB) -> dict[str, float]:
    """Return the seconds by term, and `step` and `bytes`, of one plan."""
    known = known or profile()
    plan = Plan.parse(text)
    cluster = cluster_of(known, f"{max(1, plan.world_size)}xhere")
    found = estimate(job, cluster, Columns.of([plan], job), measured_tables(known, cluster, "tables"))
    terms = {name: float(values[0]) for name, values in found.terms.items()}
    classes = {name: float(values[0]) for name, values in found.memory.items()}
    return classes | terms | {"step": float(found.step_s[0]), "bytes": float(found.total_bytes[0])}


def test_rates_of_a_host_are_its_measurements() -> None:
    tables = tables_of(2)
    assert tables.flops["fp32"] * tables.gemm_ceiling == pytest.approx(FLOPS, rel=0.01)
    assert tables.link_rate * tables.link_eff == pytest.approx(BYTES / np.cbrt(2 * 2 * 1), rel=0.01)
    assert tables.link_alpha_s == pytest.approx(CALL)
    assert tables.launch_s == pytest.approx(CALL, rel=0.05)
    assert {tables.rungs[name] for name in ("gemm_ceiling", "attn_bwd", "memory_eff", "adam_eff")} == {"here"}


def test_small_messages_and_updates_take_the_measured_time() -> None:
    """A collective's rate rises with its size, and an update moves the bytes that its formula counts."""
    half, known = 1e5, profile()
    samples = [
        replace(one, seconds=one.seconds + (half * one.size[0]) ** 0.5 / BYTES) if one.group > 1 else one
        for one in known.samples
    ]
    tables = tables_of(2, replace(known, samples=tuple(samples)))
    assert tables.half_bytes == pytest.approx(half, rel=0.01)
    params = 1 << 20
    assert params * ADAM_BYTES / (tables.memory_rate * tables.adam_eff) == pytest.approx(
        CALL + params / VALUES, rel=0.01
    )


def test_two_cores_take_half_and_four_ranks_no_less() -> None:
    one, two, four, eight = (tables_of(count) for count in (1, 2, 4, 8))
    rates = [each.flops["fp32"] * each.gemm_ceiling for each in (one, two, four, eight)]
    assert rates == pytest.approx([rates[0], rates[0], rates[0] / 2, rates[0] / 4], rel=0.01)  # eight were not measured
    assert eight.launch_s == pytest.approx(2 * four.launch_s)


def test_fp32_sends_twice_the_bytes_and_products_take_their_own_rate() -> None:
    fp32, bf16 = (step(f"tp=2 precision={name}", job=replace(JOB, seq_len=4096)) for name in ("fp32", "bf16"))
    assert fp32["tp"] / bf16["tp"] == pytest.approx(2, rel=0.05)
    assert fp32["gemm"] == pytest.approx(bf16["gemm"], rel=0.05)  # this machine has one rate


def test_a_host_overlaps_nothing_and_reserves_nothing() -> None:
    found = step("dp_shard=2 zero=1")
    assert found["dp_exposed"] + found["contention"] > 0
    assert found["host"] == found["context"] == found["communicators"] == found["reserve"] == 0.0


def test_run_corrections_scale_their_part() -> None:
    lesson = Lesson(run="a", plan="", model="m", steps=9, ratios=(("compute", 1.21),))
    plain, taught = step("dp_replicate=2"), step("dp_replicate=2", profile(learned=(lesson,)))
    assert taught["gemm"] == pytest.approx(1.1 * plain["gemm"])  # half of the correction, in logarithms
    assert taught["optimizer"] == plain["optimizer"]


def test_measured_estimates_report_their_sources() -> None:
    measured = ("gemm", "attention", "memory_bound", "tp", "dp_exposed")
    for text in ("tp=4", "dp_shard=4 zero=3"):  # one node: its links carry all traffic
        found, known = step(text), profile()
        shares = time_by_rung({name: found[name] for name in measured}, tables_of(4), cluster_of(known, "4xhere"))
        assert shares == {"here": pytest.approx(1.0)}


def test_unusable_profiles_are_rejected() -> None:
    rule = "nodes=2: the profile has measurements of one host only, not of the network between 2 hosts"
    with pytest.raises(ConfigError, match=rule):
        measured_tables(profile(), replace(cluster_of(profile(), "2xhere"), nodes=2), "tables")
    bare = replace(profile(), samples=(), path="p.json")
    with pytest.raises(ConfigError, match="it has no measured matrix products"):
        measured_tables(bare, cluster_of(profile(), "2xhere"), "tables")


def test_transfers_are_fitted_without_negative_coefficients() -> None:
    sizes = [1 << 8, 1 << 14, 1 << 20]
    assert fit_transfer(sizes, [CALL + n / BYTES for n in sizes]) == pytest.approx((CALL, 0.0, 1 / BYTES), rel=1e-6)
    assert min(fit_transfer([1, 2, 4, 8], [1.0, 0.5, 0.25, 0.125])) >= 0


def test_gpu_profile_gives_constants() -> None:
    cluster = ClusterSpec.parse("2xh100")
    known = profile()
    machine = replace(known.machine, kind="cuda", device="NVIDIA H100 80GB HBM3", count=2)
    samples = (
        Measurement(op="linear_f", size=(8192, 8192, 8192), seconds=2 * 8192**3 / 7e14, dtype="bf16"),
        Measurement(op="copy", size=(8192, 8192), seconds=4 * 8192**2 / 3e12, dtype="bf16"),
        *(
            Measurement(op="all_gather", size=(n,), seconds=1e-5 + n / 2 / 3e11, ranks=2, group=2)
            for n in (1 << 12, 1 << 18, 1 << 24, 1 << 28)
        ),
        # A single device gets more of the host than one of two; the slower direction and the larger size are used.
        Measurement(op="to_host", size=(1 << 28,), seconds=2**28 / 50e9, ranks=1),
        Measurement(op="to_host", size=(1 << 28,), seconds=2**28 / 24e9, ranks=2),
        Measurement(op="to_device", size=(1 << 28,), seconds=2**28 / 30e9, ranks=2),
        Measurement(op="to_device", size=(1 << 20,), seconds=2**20 / 3e9, ranks=2),
        Measurement(op="host_adamw", size=(1 << 25,), seconds=28 * 2**25 / 40e9, ranks=2),
    )
    tables = measured_tables(replace(known, machine=machine, samples=samples), cluster, "tables")
    assert tables.gemm_ceiling == pytest.approx(7e14 / 989e12)
    assert tables.memory_eff == pytest.approx(3e12 / 3.35e12)
    assert tables.link_eff == pytest.approx(3e11 / 450e9, rel=0.01)
    assert tables.host_rate == pytest.approx(24e9)
    assert tables.host_step_rate == pytest.approx(2 * 40e9)  # of both ranks
    assert {tables.rungs[name] for name in ("gemm_ceiling", "host_rate", "host_step_rate")} == {"here"}
    assert tables.rungs["attn_fwd"] != "here"
