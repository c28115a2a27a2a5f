"""Memory in closed form: saved bytes as traced, ZeRO stages, and one published peak."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.cluster import ClusterSpec
from weft.config.plan import RECOMPUTES, Plan
from weft.config.sections import AdapterSection
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost import memory_terms as loss_memory
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory import CLASSES
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.estimator import estimate
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import Shape, Stack
from weft.planner.space.trained_part import AdapterSize

SHAPE = Shape.of_decoder(decoder_spec("llama3-8b"))
FUSED = Stack(fused_norm=True)
CLUSTER = ClusterSpec.parse("16x8xh100")
TABLES = Tables.of(CLUSTER.device)


def job(**stack) -> Job:
    return Job(shape=SHAPE, seq_len=8192, global_batch=128, stack=replace(FUSED, **stack))


def per_value(columns: Columns, task: Job | None = None) -> float:
    """Return the bytes that one layer saves, per token and unit of width."""
    return float(layer_bytes(task or job(), columns).kept[0]) / (8192 * SHAPE.hidden)


def test_saved_bytes_match_the_trace():
    """A trace of torch's modules gives 41.033 bytes, and 8.629 with tp=8 and sequence parallelism."""
    assert per_value(Columns.make(1)) == pytest.approx(41.03, abs=0.01)
    # That trace keeps gathered inputs. Weft gathers again: two values of 2 bytes less, of which it keeps an eighth.
    assert per_value(Columns.make(1, tp=8, sp=True)) == pytest.approx(8.629 - 2 * 2 * 7 / 8, abs=0.005)


def states(text: str, passes: int, **stack) -> dict[str, float]:
    """Return the bytes per parameter of some classes on 8 ranks."""
    task = Job(shape=SHAPE, seq_len=1024, global_batch=8 * passes, stack=replace(FUSED, **stack))
    columns = Columns.of([Plan.parse(f"{text} dp_shard=8 precision=bf16 accumulation={passes}")], task)
    memory = estimate(task, CLUSTER, columns, TABLES).memory
    return {name: float(memory[name][0]) / SHAPE.num_params for name in ("gradients", "buffers")}


@pytest.mark.parametrize(
    ("text", "passes", "gradients"),
    [
        ("zero=1", 1, 0.5),
        ("zero=1", 4, 4.0),
        ("zero=2", 1, 0.5),
        ("zero=2", 4, 4.5),
        ("zero=3", 4, 0.5),
        ("zero=3 reshard=after_backward", 4, 0.5),
        ("zero=3 reshard=after_step", 4, 4.0),
    ],
)
def test_accumulated_gradients_are_unsharded_if_reduced_once(text, passes, gradients):
    assert states(text, passes)["gradients"] == pytest.approx(gradients)


@pytest.mark.parametrize(("text", "shards"), [("zero=0", (1, 1)), ("zero=1", (8, 1)), ("zero=3", (8, 8))])
def test_frozen_base_costs_only_its_weights(text, shards):
    """2 bytes per frozen weight; 12 of masters and states per adapter parameter, plus its gradient."""
    section = AdapterSection(rank=16, targets=("attn.q", "mlp.down"))
    adapter = AdapterSize.of(decoder_spec("llama3-8b"), section)
    assert adapter is not None
    assert adapter.params == 16 * (2 * 4096 + 4096 + 14336)
    task = replace(job(), seq_len=1024, global_batch=16, adapter=adapter)
    columns = Columns.of([Plan.parse(f"{text} dp_shard=8 precision=bf16 accumulation=2")], task)
    memory = estimate(task, CLUSTER, columns, TABLES).memory
    trained, (states_cut, weights_cut) = 32 * adapter.params, shards
    everything = sum(float(memory[name][0]) for name in ("parameters", "optimizer"))
    weights = 2 * (SHAPE.num_params + trained) / weights_cut
    assert everything == pytest.approx(weights + 12 * trained / states_cut, rel=0.02)
    assert float(memory["gradients"][0]) <= 4 * trained
    whole = replace(task, adapter=None)
    assert float(estimate(whole, CLUSTER, columns, TABLES).memory["optimizer"][0]) > 50 * float(memory["optimizer"][0])


def test_frozen_base_takes_less_time_and_traffic():
    task = replace(job(), adapter=AdapterSize(rank=16, width=100_000.0, products=7))
    columns = Columns.of([Plan.parse("dp_shard=8 zero=1 precision=bf16 accumulation=2")], task)
    mine, every = (estimate(each, CLUSTER, columns, TABLES).terms for each in (task, replace(task, adapter=None)))
    assert 0.6 < float(mine["gemm"][0] / every["gemm"][0]) < 0.72
    assert float(mine["optimizer"][0]) < 0.2 * float(every["optimizer"][0])
    assert float(mine["dp_exposed"][0]) < 0.2 * float(every["dp_exposed"][0])


def test_parameters_that_stay_gathered_are_counted_in_full():
    assert states("zero=3", 4)["buffers"] < 0.7
    for reshard in ("after_backward", "after_step"):
        assert states(f"zero=3 reshard={reshard}", 4)["buffers"] >= 2


@pytest.mark.parametrize("reshard", ["after_step", "after_backward"])
def test_pipeline_keeps_gathered_parameters_and_full_gradients(reshard):
    """4 stages of equal layers: the first stage has a quarter of them and the embedding."""
    task = Job(shape=SHAPE, seq_len=1024, global_batch=64, stack=FUSED)
    text = "pp=4 dp_shard=8 microbatches=8 precision=bf16"
    plans = [Plan.parse(f"{text} {zero}") for zero in ("zero=2", f"zero=3 reshard={reshard}")]
    found = estimate(task, CLUSTER, Columns.of(plans, task), TABLES).memory
    ends = SHAPE.vocab * SHAPE.hidden
    stage = (SHAPE.num_params - 2 * ends) / 4 + ends
    assert found["buffers"][1] > FUSED.gather_bytes * stage * 0.99
    # ZeRO-2 has a buffer for the rank's shard in addition to the full gradients of autograd.
    assert found["gradients"][1] * (1 + 1 / 8) == pytest.approx(found["gradients"][0])
    assert found["parameters"][1] == pytest.approx(4 / 8 * stage, rel=0.01)


def test_gpt_saves_34_bytes_and_its_scores():
    """Korthikanti et al. 2022 (arXiv 2205.05198): 34 + 5 a s / h with dropout, 34 without the scores, 2 recomputed."""
    gpt = Shape.of_decoder(decoder_spec("gpt3-175b"))
    task = Job(shape=gpt, seq_len=2048, global_batch=8, stack=replace(FUSED, attention="unfused"))

    def saved_bytes(policy: str) -> float:
        columns = Columns.make(1, recompute=RECOMPUTES.index(policy))
        return float(layer_bytes(task, columns).kept[0]) / (2048 * gpt.hidden)

    assert saved_bytes("none") == pytest.approx(34 + 5 * 96 * 2048 / 12_288)
    assert saved_bytes("attention") == pytest.approx(34)
    assert saved_bytes("full") == pytest.approx(2)


def test_loss_is_chunked_as_in_the_runtime():
    head = importlib.import_module("weft.parallel.tensor.language_head")
    assert loss_memory.LARGE_LOGITS_BYTES == head.LARGE_LOGITS_BYTES


def test_logits_of_a_large_vocabulary_do_not_set_the_peak():
    """8192 tokens of 128 thousand entries: 13 GiB in full; chunked, 1.5 GiB and the weight gradient (fp32, bf16)."""
    columns = Columns.make(1, dp_shard=8, num_micro=16)
    whole, cut = (estimate(job(cut_loss=cuts), CLUSTER, columns, TABLES).memory["logits"][0] for cuts in (False, True))
    assert whole == pytest.approx(8192 * 128_256 * 12, rel=0.02)
    # One chunk on an H100: its logits in fp32 and in bf16.
    assert cut == pytest.approx(6 * 128_256 * 4096 + 1.5 * 2**30, rel=0.1)


def test_each_zero_stage_uses_less_memory():
    columns = Columns.make(4, dp_shard=8, zero=[0, 1, 2, 3], num_micro=2)
    found = estimate(job(), CLUSTER, columns, TABLES)
    assert all(np.diff(found.memory["parameters"]) <= 0)
    # With several passes ZeRO-2 keeps full gradients until they are reduced, and the shard of the last step.
    shares = found.memory["gradients"] / found.memory["gradients"][0]
    assert shares == pytest.approx([1, 1, 1 + 1 / 8, 1 / 8], rel=1e-3)
    assert all(np.diff(found.memory["optimizer"]) <= 0)
    params = SHAPE.num_params
    assert found.memory["optimizer"][1] == pytest.approx(12 * params / 8, rel=1e-3)
    assert found.memory["parameters"][3] + found.memory["optimizer"][3] == pytest.approx(12 * params / 8, rel=1e-3)
    assert found.memory["gradients"][3] == pytest.approx(4 * params / 8, rel=1e-3)


@pytest.mark.parametrize(("ranks", "allocated", "reserved"), [(8, 68.35, 82.4), (128, 57.83, 67.0)])
def test_published_peak_is_reproduced(ranks, allocated, reserved):
    """Llama 3 8B, 2 x 8192 tokens, ZeRO 3, selective recompute: traced allocation, and torchtitan's printed peak."""
    titan = job(fused_norm=False, selective_half=True, cut_loss=False, loss_bytes=13.0)
    task = replace(titan, global_batch=2 * ranks)
    columns = Columns.make(1, dp_shard=ranks, zero=3, microbatch=2, recompute=RECOMPUTES.index("selective"))
    found = estimate(task, CLUSTER, columns, TABLES)
    assert found.allocated_bytes[0] / 2**30 == pytest.approx(allocated, rel=0.03)
    assert found.reserved_bytes[0] / 2**30 == pytest.approx(reserved, rel=0.03)


POWERS = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None, max_examples=60)
@given(POWERS, POWERS, POWERS, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_classes_sum_to_total_and_sharding_never_adds_memory(tp, pp, shard, zero, recompute, sp):
    columns = Columns.make(
        2, tp=tp, pp=pp, dp_shard=[2 * shard, 4 * shard], zero=zero, recompute=recompute, sp=sp, num_micro=8
    )
    found = estimate(job(), CLUSTER, columns, TABLES)
    assert set(found.memory) == set(CLASSES)
    assert all((found.memory[name] >= 0).all() for name in CLASSES)
    outside = found.memory["communicators"] + found.memory["context"]
    assert found.reserved_bytes + outside == pytest.approx(found.total_bytes)
    assert found.allocated_bytes[1] <= found.allocated_bytes[0] * (1 + 1e-9)


def test_more_recompute_and_offload_use_less_memory():
    policies = [RECOMPUTES.index(name) for name in ("none", "selective", "full")]
    columns = Columns.make(3, recompute=policies, num_micro=2)
    assert all(np.diff(estimate(job(), CLUSTER, columns, TABLES).allocated_bytes) < 0)
    shares = Columns.make(3, offload_optimizer=[0, 0.5, 1], num_micro=2)
    optimizer = estimate(job(), CLUSTER, shares, TABLES).memory["optimizer"]
    assert optimizer == pytest.approx(optimizer[0] * np.array([1, 0.5, 0]))
    budget = Columns.make(2, activation_budget=[np.inf, 0.25], num_micro=2)
    assert np.diff(estimate(job(), CLUSTER, budget, TABLES).memory["activations"])[0] < 0


def test_fit_verdict_is_a_probability():
    columns = Columns.make(3, dp_shard=64, zero=3, microbatch=[1, 2, 8])
    chances = estimate(job(), CLUSTER, columns, TABLES).fits_probability
    assert chances[0] > 0.95
    assert 1 > chances[1] > chances[2]
    roomy = replace(CLUSTER.device, memory_bytes=2 * CLUSTER.device.memory_bytes)
    assert (estimate(job(), CLUSTER, columns, Tables.of(roomy)).fits_probability >= chances).all()


def test_pure_bf16_keeps_eight_bytes_per_parameter_and_a_moment_copy():
    """Weights, gradients and two moments in bf16; torch's foreach update copies one moment."""
    pure = replace(FUSED, master=False, main_bytes=4.0, grad_bytes=2.0)
    for text in ("precision=bf16", "dp_shard=8 zero=3 precision=bf16"):
        found = [
            estimate(Job(shape=SHAPE, seq_len=128, global_batch=8, stack=stack), CLUSTER,
                     Columns.of([Plan.parse(text)], Job(shape=SHAPE, seq_len=128, global_batch=8)), TABLES).memory
            for stack in (pure, replace(pure, step_bytes=2.0))
        ]  # fmt: skip
        share = SHAPE.num_params / (8 if "dp_shard" in text else 1)
        lasting = found[0]["parameters"][0] + found[0]["optimizer"][0]
        assert lasting == pytest.approx(6 * share, rel=0.01)
        assert sum(found[1][name][0] for name in found[1]) >= sum(found[0][name][0] for name in found[0])
    alone = estimate(Job(shape=SHAPE, seq_len=128, global_batch=1, stack=replace(pure, step_bytes=2.0)), CLUSTER,
                     Columns.make(1, precision=PRECISIONS.index("bf16")), TABLES)  # fmt: skip
    assert alone.allocated_bytes[0] + alone.memory["reserve"][0] == pytest.approx(10 * SHAPE.num_params, rel=0.03)


def test_packed_base_keeps_wide_values_if_the_software_widens_them():
    adapter = AdapterSize.of_shape(SHAPE, 16, "nf4")
    narrow, wide = (
        Job(shape=SHAPE, seq_len=4096, global_batch=4, adapter=adapter, stack=replace(FUSED, residual_bytes=width))
        for width in (2.0, 4.0)
    )
    columns = Columns.make(1, microbatch=4, precision=PRECISIONS.index("bf16"), recompute=RECOMPUTES.index("full"))
    less, more = (estimate(job, CLUSTER, columns, TABLES).memory for job in (narrow, wide))
    assert more["activations"][0] - less["activations"][0] > 0.9 * 32 * 4 * 4096 * SHAPE.hidden * 2
    assert more["parameters"][0] - less["parameters"][0] == pytest.approx(2 * 2 * SHAPE.table_params, rel=0.01)
