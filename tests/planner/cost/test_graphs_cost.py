"""Effect of `graphs=on` on estimates: no launch waits, exposed communication, memory of graphs."""

from __future__ import annotations

import pytest

from tests.planner.measured.synthetic import profile
from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory_terms import passes_in_flight
from weft.planner.estimator import Estimates, estimate
from weft.planner.measured.profile_tables import cluster_of
from weft.planner.report.explanation import explain
from weft.planner.report.scenario import what_if
from weft.planner.report.verdict import compare
from weft.planner.search.best_plans import answer
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.train.step.graphed_passes import WARM_UPS

#: The decoder of the table in docs/reference/gpu.md.
SPEC = DecoderSpec(
    vocab_size=50304, dim=768, num_layers=12, num_heads=12, num_kv_heads=6, ffn_dim=1536, max_seq_len=1024
)
SHAPE = Shape.of_decoder(SPEC)
#: Times of the simulated GPU without and with graphs, in ms (the same table).
SIMULATED = {
    "precision=bf16": (9.94, 7.49),
    "accumulation=4 precision=bf16": (39.19, 27.15),
    "dp_shard=8 zero=1 precision=bf16": (9.72, 8.30),
}


def estimates(*texts: str) -> list[Estimates]:
    found = []
    for plan in map(Plan.parse, texts):
        cluster = ClusterSpec.parse(f"{plan.world_size}xh100")
        job = Job(shape=SHAPE, seq_len=1024, global_batch=plan.dp_size * plan.microbatches_per_step)
        found.append(estimate(job, cluster, Columns.of([plan], job), Tables.of(cluster.device)))
    return found


@pytest.mark.parametrize("text", SIMULATED)
def test_time_saved_by_graphs_is_near_the_simulated_gpu(text):
    eager, recorded = estimates(text, f"{text} graphs=on")
    before, after = SIMULATED[text]
    assert recorded.terms["host"][0] == 0.0 < eager.terms["host"][0]
    assert recorded.step_s[0] / eager.step_s[0] == pytest.approx(after / before, abs=0.06)


@pytest.mark.parametrize("text", ["dp_shard=8 zero=1", "dp_shard=8 zero=2", "dp_replicate=8"])
def test_graphs_over_ranks_expose_all_communication(text):
    eager, recorded = estimates(f"{text} precision=bf16", f"{text} precision=bf16 graphs=on")
    assert recorded.terms["contention"][0] == 0.0 < eager.terms["contention"][0]
    bus = ClusterSpec.parse("8xh100").device.scale_up_bytes_per_s
    # Gradients of blocks are sent in bf16 within a node, embedding and head gradients in fp32; then weights in bf16.
    ends = 2 * SPEC.vocab_size * SPEC.dim
    to_ranks = 4 * SHAPE.num_params if text == "dp_replicate=8" else 2 * (SHAPE.num_params - ends) + 4 * ends
    bytes_sent = (to_ranks + (4 if text == "dp_replicate=8" else 2) * SHAPE.num_params) * 7 / 8
    assert recorded.terms["dp_exposed"][0] > bytes_sent / bus > eager.terms["dp_exposed"][0]


def test_graphs_over_ranks_keep_gradients_and_buckets_until_the_pass_ends():
    eager, recorded = estimates("dp_shard=8 zero=1 precision=bf16", "dp_shard=8 zero=1 precision=bf16 graphs=on")
    for name in ("parameters", "optimizer"):
        assert recorded.memory[name][0] == eager.memory[name][0]
    # All gradients in bf16 (or memory that the allocator caches for them), and buckets in fp32.
    kept = sum(recorded.memory[name][0] - eager.memory[name][0] for name in ("gradients", "buffers", "reserve"))
    assert kept > 4 * SHAPE.num_params


def test_graph_on_one_rank_keeps_the_memory_of_a_pass():
    eager, recorded = estimates("precision=bf16", "precision=bf16 graphs=on")
    assert {name: array[0] for name, array in recorded.memory.items()} == {
        name: array[0] for name, array in eager.memory.items()
    }


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("accumulation=3", 1),
        ("accumulation=4", 2),
        ("dp_shard=8 zero=1 accumulation=4", 2),
        ("dp_shard=8 zero=2", 1),
        ("dp_shard=8 zero=2 accumulation=2", 2),
        ("dp_shard=8 zero=2 accumulation=8", 3),
        ("dp_replicate=8 accumulation=2", 1),
    ],
)
def test_passes_in_memory_under_graphs(text, times):
    eager, recorded = estimates(f"{text} precision=bf16", f"{text} precision=bf16 graphs=on")
    assert recorded.memory["activations"][0] == times * eager.memory["activations"][0]


def test_eager_and_recorded_passes_coexist_if_warm_up_is_complete():
    for count in range(1, 12):
        # In step WARM_UPS + 1 the last pass is recorded. Earlier steps warmed up the passes between.
        beside = (count - 2) * WARM_UPS >= WARM_UPS + 1
        assert passes_in_flight(Columns.make(1, num_micro=count, graphs=True))[0] == (2 if beside else 1)


def question(text: str = "", **options) -> Question:
    return Question.of(SPEC, "8xh100", seq_len=1024, global_batch=8, fixed=text, **options)


def test_search_tries_graphs_only_on_request_and_within_the_rules():
    found = answer(question("precision=bf16"))
    assert not any(one.plan.graphs for one in (*found, *found.pareto))
    asked = answer(question("precision=bf16 graphs=on"))
    assert asked.best is not None
    for one in asked:
        assert one.plan.graphs
        assert not check(one.plan, asked.question.facts)
    assert {one.plan.tp * one.plan.pp * one.plan.cp for one in asked} == {1}
    assert "graphs-on-one-rank" in {each.name for each in asked.refused}
    scenario = what_if("graphs=on", question("precision=bf16"))
    assert scenario.answer.best is not None
    assert scenario.answer.best.plan == asked.best.plan


def test_measured_cpu_host_records_no_graphs():
    """Estimates for a CPU must not make graphs look free."""
    facts = Facts(device=cluster_of(profile(), "2xhere").device)
    assert facts.device.is_cpu
    assert not question().cluster.device.is_cpu
    assert [each.rule for each in check(Plan.parse("graphs=on"), facts)] == ["graphs-on-device"]


def test_effect_of_graphs_is_reported_if_launches_limit_the_step():
    asked = question("precision=bf16 compile=off")
    best = answer(asked).best
    assert best is not None
    assert "graphs  with graphs=on about" in explain(best)
    rows = compare(str(best.plan), f"{best.plan} graphs=on", asked)
    assert "no run with CUDA graphs was ever measured" in explain(rows.right)
    assert {name: after for name, _, after in rows.time_rows}["host"] == 0.0
    large = answer(Question.of("llama3-8b", "8xh100", global_batch=64, fixed="precision=bf16 zero=1 tp=1 cp=1 pp=1"))
    assert large.best is None or "graphs  with" not in explain(large.best)
