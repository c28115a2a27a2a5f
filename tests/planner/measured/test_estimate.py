"""Estimates for a measured host: consequences of a synthetic machine's laws."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.measured.synthetic import profile
from weft.config.partitioning import divide_layers
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.cost.step import TERMS
from weft.planner.estimator import estimate
from weft.planner.measured.host_layer import contention_of, ranks_of
from weft.planner.measured.machine_profile import Lesson, Profile
from weft.planner.measured.profile_tables import cluster_of, measured_tables
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.planner.space.trained_part import AdapterSize

SHAPE = Shape(vocab=2048, hidden=256, layers=8, heads=8, kv_heads=4, head_dim=32, ffn=768)
JOB = Job(shape=SHAPE, seq_len=128, global_batch=8)


def step(text: str, known: Profile | None = None, job: Job = JOB) -> dict[str, float]:
    """Return the seconds by term, and `step` and `bytes`, of one plan."""
    known = known or profile()
    plan = Plan.parse(text)
    cluster = cluster_of(known, f"{max(1, plan.world_size)}xhere")
    found = estimate(job, cluster, Columns.of([plan], job), measured_tables(known, cluster, "tables"))
    terms = {name: float(values[0]) for name, values in found.terms.items()}
    classes = {name: float(values[0]) for name, values in found.memory.items()}
    return classes | terms | {"step": float(found.step_s[0]), "bytes": float(found.total_bytes[0])}


def test_terms_are_complete_and_sum_to_the_step() -> None:
    found = step("dp_shard=2 tp=2 zero=1")
    assert set(TERMS) <= set(found)
    assert sum(found[name] for name in TERMS) == pytest.approx(found["step"])
    assert found["contention"] == found["offload"] == found["host"] == 0.0  # a host has none of these


def test_two_cores_take_half_and_four_ranks_no_less() -> None:
    compute = [step(text)["gemm"] for text in ("", "dp_replicate=2", "dp_replicate=4")]
    assert compute[1] == pytest.approx(compute[0] / 2, rel=0.02)
    assert compute[2] == pytest.approx(compute[1], rel=0.02)


def test_optimizers_differ_in_update_time_and_memory() -> None:
    adamw, sgd, muon = (
        step("dp_shard=2 zero=1", job=replace(JOB, optimizer=name)) for name in ("adamw", "sgd", "muon")
    )
    assert sgd["optimizer"] < adamw["optimizer"] < muon["optimizer"]
    for other in (sgd, muon):
        assert {name for name in TERMS if other[name] != adamw[name]} == {"optimizer"}
    params = SHAPE.num_params
    assert adamw["bytes"] - sgd["bytes"] == pytest.approx(4 * params / 2, rel=0.01)  # fp32, over two ranks


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3"])
def test_gradient_traffic_depends_on_the_wire_format(layout: str) -> None:
    exact, half = step(layout)["dp_exposed"], step(f"{layout} reduce=bf16")["dp_exposed"]
    assert half != exact  # half of the bytes, and two more copies
    assert step("reduce=bf16") == step("")


def test_weight_traffic_depends_on_gather() -> None:
    exact, coded = step("dp_shard=2 zero=3"), step("dp_shard=2 zero=3 gather=int8")
    assert {name for name in TERMS if coded[name] != exact[name]} == {"dp_exposed"}
    once = step("dp_shard=2 zero=3 reshard=after_step")["dp_exposed"]
    coded_once = step("dp_shard=2 zero=3 reshard=after_step gather=int8")["dp_exposed"]
    assert exact["dp_exposed"] - coded["dp_exposed"] == pytest.approx(2 * (once - coded_once))  # of two gathers, of one


def test_powersgd_costs_its_products() -> None:
    exact, low = step("dp_replicate=2"), step("dp_replicate=2 compress=powersgd:1")
    one, many = (step(f"dp_replicate=2 compress=powersgd:{rank}")["dp_exposed"] for rank in (1, 64))
    assert {name for name in TERMS if low[name] != exact[name]} == {"dp_exposed"}
    assert one < many


def test_local_sgd_sync_is_amortized_over_its_steps() -> None:
    every = step("dp_replicate=2 dp_shard=2 zero=1")
    ten, hundred = (step(f"dp_replicate=2 dp_shard=2 zero=1 sync=diloco:{every}") for every in (10, 100))
    assert every["dp_exposed"] > ten["dp_exposed"] > hundred["dp_exposed"]


def test_fragments_cost_one_exposed_call_each() -> None:
    def over_dp(fragments: str, extra: str = "") -> float:
        return step(f"dp_replicate=2 dp_shard=2 zero=1 sync=diloco:100{fragments}{extra}")["dp_exposed"]

    # Equal bytes: more fragments only cost the start of their calls, a hundredth of it per step.
    assert over_dp("/1") == pytest.approx(over_dp(""), rel=1e-9)
    assert over_dp("") < over_dp("/50") < 1.5 * over_dp("")
    # Each rank encodes its shard of the synchronized values once per hundred steps, also with several microbatches.
    assert 0 < over_dp("/50", " compress=int8") - over_dp("/50", "") < 0.01 * over_dp("")


def test_local_sgd_replicas_rarely_wait_for_each_other() -> None:
    def waited(plan: str) -> float:
        return step(plan, profile(waiting=0.03))["step"] - step(plan)["step"]

    assert waited("dp_replicate=2 sync=diloco:50") < waited("dp_replicate=2")


def test_communication_is_added_never_overlapped() -> None:
    whole, cut = step("dp_replicate=2"), step("tp=2")
    assert whole["tp"] == 0.0
    assert cut["tp"] > 0.0
    assert step("cp=2")["cp"] > 0.0
    assert step("dp_shard=2 zero=3")["dp_exposed"] > step("dp_shard=2 zero=1")["dp_exposed"]


@pytest.mark.parametrize(
    ("plan", "term"),
    [("dp_replicate=4", {"dp_exposed"}), ("dp_shard=4 zero=3", {"dp_exposed"}), ("tp=4", {"tp"}), ("pp=4", set()),
     ("dp_shard=2 tp=2 zero=1", {"tp", "dp_exposed"}), ("cp=4 zero=1", {"cp", "dp_exposed"}),
     ("cp=4 zero=3", {"cp", "dp_exposed"})],
)  # fmt: skip
def test_synchronizing_ranks_wait_for_each_other(plan: str, term: set[str]) -> None:
    plain, known = step(plan), step(plan, profile(waiting=0.03))
    assert {name for name in TERMS if known[name] > plain[name]} == term
    assert {name for name in TERMS if known[name] < plain[name]} == set()


def test_waiting_time_grows_with_synchronizations() -> None:
    def waited(plan: str) -> float:
        return step(plan, profile(waiting=0.03))["step"] - step(plan)["step"]

    rising = ("dp_shard=4 zero=1", "dp_shard=4 zero=3 reshard=after_backward", "dp_shard=4 zero=3", "tp=4",
              "tp=4 recompute=full")  # fmt: skip
    found = [waited(plan) for plan in rising]
    assert found == sorted(found)
    assert len({*found}) == len(found)
    kept, let_go = (waited(f"dp_shard=4 zero=3 accumulation=2 reshard=after_{when}") for when in ("step", "forward"))
    assert kept < let_go
    assert waited("tp=4 recompute=attention") == pytest.approx(waited("tp=4"), rel=0.1)


def test_recompute_costs_time_and_saves_bytes() -> None:
    plain, full = step("dp_replicate=2"), step("dp_replicate=2 recompute=full")
    assert full["recompute"] > 0.2 * plain["gemm"]
    assert full["bytes"] < plain["bytes"]


def test_waiting_ranks_free_their_cores() -> None:
    # Four stages on two cores: filling and draining run with fewer ranks, each of them faster.
    crowded = step("pp=4 microbatches=4")
    roomy = step("pp=2 microbatches=4")
    assert crowded["bubble"] < 3 * roomy["bubble"]
    assert crowded["bubble"] > 0.0


def test_stages_are_split_as_in_the_runtime() -> None:
    columns = Columns.of([Plan.parse("pp=4 microbatches=4")], JOB)
    layers = [float(values[0]) for _, values, _, _ in ranks_of(JOB, columns)]
    layer, head = float(SHAPE.dense_layer_params), float(SHAPE.vocab * SHAPE.hidden)
    assert layers == list(divide_layers([layer] * 8, 4, after=head))
    assert contention_of(JOB, columns).layers[0] in layers


def test_run_corrections_scale_their_part() -> None:
    lesson = Lesson(run="a", plan="", model="m", steps=9, ratios=(("compute", 1.21),))
    plain, taught = step("dp_replicate=2"), step("dp_replicate=2", profile(learned=(lesson,)))
    assert taught["gemm"] == pytest.approx(1.1 * plain["gemm"])  # half of the correction, in logarithms
    assert taught["optimizer"] == plain["optimizer"]


def test_every_estimate_reports_its_sources() -> None:
    from weft.planner.report.explanation import time_by_rung

    known = profile()
    for count, rungs in ((4, {"here"}), (8, {"here", "common"})):
        cluster = cluster_of(known, f"{count}xhere")
        tables = measured_tables(known, cluster, "tables")
        found = estimate(JOB, cluster, Columns.of([Plan.parse(f"tp={count}")], JOB), tables)
        shares = time_by_rung({name: float(values[0]) for name, values in found.terms.items()}, tables)
        assert set(shares) == rungs
        assert sum(shares.values()) == pytest.approx(1.0)


def test_vectorized_estimate_equals_single_estimates() -> None:
    texts = ["dp_shard=4 zero=3", "tp=4 sp=on", "pp=2 dp_shard=2 zero=1 microbatches=4", "cp=4"]
    plans = [Plan.parse(text) for text in texts]
    cluster = cluster_of(profile(), "4xhere")
    found = estimate(JOB, cluster, Columns.of(plans, JOB), measured_tables(profile(), cluster, "tables"))
    assert found.step_s == pytest.approx([step(text)["step"] for text in texts])
    assert np.isfinite(found.total_bytes).all()


def test_unmeasured_multi_host_is_rejected() -> None:
    cluster = replace(cluster_of(profile(), "2xhere"), nodes=2)
    with pytest.raises(
        ConfigError, match="nodes=2: the profile has measurements of one host only, not of the network between 2 hosts"
    ):
        measured_tables(profile(), cluster, "tables")


def test_gpu_profile_gives_constants() -> None:
    from weft.config.cluster import ClusterSpec
    from weft.planner.measured.machine_profile import Measurement

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


@pytest.mark.parametrize("layout", ["", "tp=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "pp=2 microbatches=2"])
def test_frozen_weights_have_no_gradients_states_or_weight_gradient_products(layout: str) -> None:
    adapter = AdapterSize.of_shape(SHAPE, 4)
    whole, lora = step(layout), step(layout, job=replace(JOB, adapter=adapter))
    assert lora["parameters"] > 0.9 * whole["parameters"] * (1.0 if "zero=3" not in layout else 0.9)
    assert lora["gradients"] <= 0.1 * whole["gradients"]
    assert lora["dp_exposed"] <= whole["dp_exposed"]
    assert 0.6 * whole["gemm"] < lora["gemm"] < 0.85 * whole["gemm"]  # two of three products, and thin ones
    assert lora["step"] < whole["step"]


def test_packed_base_takes_less_memory_and_more_time() -> None:
    stored, packed = (
        step("", job=replace(JOB, adapter=AdapterSize.of_shape(SHAPE, 4, base))) for base in ("stored", "nf4")
    )
    layers = SHAPE.layers * (SHAPE.attention_params + SHAPE.mlp_params(SHAPE.ffn))
    assert stored["parameters"] - packed["parameters"] == pytest.approx(layers * (4 - 36 / 64), rel=1e-3)
    assert packed["memory_bound"] > stored["memory_bound"]
