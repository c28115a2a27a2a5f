"""Frozen parts: packed bases, second models, forward passes without gradients, samples of several texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.planner.space.trained_part import AdapterSize, FrozenWork

SHAPE = Shape.of_decoder(decoder_spec("llama3-8b"))
CLUSTER = ClusterSpec.parse("8xh100")
TABLES = Tables.of(CLUSTER.device)
LINEARS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def one(text: str, **job):
    """Return the estimate of one plan."""
    asked = Job(**{"shape": SHAPE, "seq_len": 1024, "global_batch": 8, **job})
    found = estimate(asked, CLUSTER, Columns.of([Plan.parse(f"{text} precision=bf16")], asked), TABLES)
    terms = {name: float(values[0]) for name, values in found.terms.items()}
    return terms, {name: float(values[0]) for name, values in found.memory.items()}


def passes_s(terms: dict[str, float]) -> float:
    """Return the seconds of forward and backward."""
    return sum(terms[name] for name in ("gemm", "attention", "memory_bound", "host", "tp"))


def adapter(base: str) -> AdapterSize:
    return AdapterSize.of_shape(SHAPE, 16, base)


@pytest.mark.parametrize("text, ranks", [("dp_replicate=1", 1), ("tp=2", 2), ("dp_shard=4 zero=3", 4), ("pp=2", 2)])
@pytest.mark.parametrize("base, each", [("int8", 1.0625), ("nf4", 0.5625)])
def test_packed_base_uses_its_packed_bytes(text, ranks, base, each):
    stored, packed = (one(text, adapter=adapter(kind))[1]["parameters"] for kind in ("stored", base))
    assert stored - packed == pytest.approx((2 - each) * LINEARS / ranks, rel=0.001)


@pytest.mark.parametrize("text, ranks", [("dp_replicate=1", 1), ("dp_shard=4 ep=4", 4), ("dp_shard=4 zero=3", 4)])
def test_stacked_experts_use_their_packed_bytes(text, ranks):
    shape = replace(SHAPE, num_experts=8, top_k=2, expert_ffn=SHAPE.ffn // 2, dense_layers=0)
    sizes = [AdapterSize.of_shape(shape, 16, base) for base in ("stored", "nf4")]
    (stored, plain), (packed, kept) = (one(text, shape=shape, adapter=size) for size in sizes)
    experts = shape.moe_layers * shape.num_experts * shape.expert_params
    others = sizes[1].packed * shape.layers  # ep alone does not shard them
    freed = (experts / ranks + others / (1 if "ep" in text else ranks)) * (2 - 0.5625)
    assert plain["parameters"] - kept["parameters"] == pytest.approx(freed, rel=0.001)
    assert packed["memory_bound"] > stored["memory_bound"]


def test_rows_are_packed_in_full_blocks():
    size = AdapterSize.of_widths(4, 1, [(65, 10)], "nf4", [(65, 10), (64, 8)])
    assert size.packed_bytes == 10 * 2 * 36 + 8 * 36
    assert (size.packed, size.largest, size.packed_products) == (65 * 10 + 64 * 8, 650, 2)


def test_unpacking_takes_time_and_packed_bytes_are_sent():
    text = "dp_shard=8 zero=3 recompute=full"
    (stored, _), (packed, _) = (one(text, adapter=adapter(base)) for base in ("stored", "nf4"))
    assert packed["memory_bound"] > stored["memory_bound"]
    assert packed["recompute"] > stored["recompute"]
    nic = replace(CLUSTER, nodes=8, devices_per_node=1, device=replace(CLUSTER.device, scale_up_domain=1))
    times = []
    for base in ("stored", "nf4"):
        asked = Job(shape=SHAPE, seq_len=128, global_batch=8, adapter=adapter(base))
        columns = Columns.of([Plan.parse(f"{text} precision=bf16")], asked)
        times.append(float(estimate(asked, nic, columns, TABLES).terms["dp_exposed"][0]))
    assert times[1] < 0.6 * times[0]


def test_formats_match_the_runtime():
    pytest.importorskip("torch")
    from weft.models import quantized_linear as base_format
    from weft.models.quantized_linear import BASE_FORMATS
    from weft.planner.space import trained_part as adapter_size

    assert {name: each.block_bytes for name, each in BASE_FORMATS.items()} == adapter_size.BLOCK_BYTES
    assert (base_format.BLOCK, base_format._AT_ONCE) == (adapter_size.BLOCK, adapter_size.UNPACKED_AT_ONCE)


def test_two_texts_count_as_two_sequences():
    pairs, singles = one("dp_shard=4 zero=2", texts=2), one("dp_shard=4 zero=2", global_batch=16)
    assert pairs == singles
    assert Job(shape=SHAPE, seq_len=1024, global_batch=8, texts=2).tokens == 16 * 1024


@pytest.mark.parametrize("text, held", [("dp_shard=4 zero=1", 1), ("dp_shard=4 zero=3", 4), ("tp=4 sp=on", 4)])
def test_frozen_copy_is_sharded_as_the_plan_defines(text, held):
    (_, alone), (terms, both) = one(text), one(text, frozen=FrozenWork(shape=SHAPE, other=1))
    assert both["parameters"] - alone["parameters"] == pytest.approx(2 * SHAPE.num_params / held, rel=0.01)
    assert both["optimizer"] == alone["optimizer"]
    # A forward pass is a third of forward and backward.
    assert terms["frozen"] == pytest.approx(passes_s(terms) / 3, rel=0.2)


def test_extra_passes_of_the_model_cost_only_time():
    plain, plain_memory = one("dp_shard=4 zero=3", adapter=adapter("stored"))
    terms, memory = one("dp_shard=4 zero=3", adapter=adapter("stored"), frozen=FrozenWork(own=1))
    assert memory == plain_memory
    assert {**terms, "frozen": 0.0, "straggler": 0.0} == {**plain, "straggler": 0.0}
    # With frozen weights a forward pass is half of a step's products.
    assert terms["frozen"] == pytest.approx(passes_s(terms) / 2, rel=0.2)


def test_teacher_costs_its_own_time_and_full_logits():
    teacher = Shape.of_decoder(decoder_spec("llama3-8b"))
    student = Shape.of_decoder(decoder_spec("llama3.2-1b"))
    work = FrozenWork(shape=teacher, other=1, whole_logits=True)
    terms, memory = one("dp_replicate=1", shape=student, frozen=work)
    assert terms["frozen"] > terms["gemm"]
    assert memory["parameters"] == pytest.approx(2 * (teacher.num_params + student.num_params), rel=0.01)
    assert memory["logits"] == pytest.approx(8 * 1024 * (36 * 128256 + 4 * 2048), rel=0.01)


def test_pipeline_bubble_applies_to_forward_passes():
    both = [one(f"pp=4 microbatches={passes}", frozen=FrozenWork(own=1))[0] for passes in (1, 8)]
    assert both[0]["frozen"] > 2 * both[1]["frozen"]


def test_teacher_logits_match_live_bytes():
    torch = pytest.importorskip("torch")
    from tools.live_memory import LiveTensors
    from weft.planner.cost.memory_terms import TWO_LOGITS
    from weft.train.tasks.distill import distilled_losses

    hidden, head = torch.randn(64, 8).bfloat16().requires_grad_(), torch.randn(8, 2048).bfloat16()
    labels = torch.zeros(64, dtype=torch.int64)
    with LiveTensors([hidden, head]) as live:
        student, taught = hidden @ head, hidden.detach() @ head
        kept = labels >= 0
        settings = {"temperature": 2.0, "mix": 0.5}  # as the task calls it; a call by ** keeps its arguments alive
        distilled_losses(student[kept][:, :2048], taught[kept][:, :2048], labels, **settings).sum().backward()
    assert live.peak / student.numel() == pytest.approx(TWO_LOGITS, rel=0.01)


@pytest.mark.parametrize(
    "text, base",
    [
        ("precision=fp32", "nf4"),
        ("precision=fp32 recompute=full", "stored"),
        pytest.param("precision=fp32", "stored", marks=pytest.mark.full),
        pytest.param("precision=fp32", "int8", marks=pytest.mark.full),
        pytest.param("precision=bf16", "nf4", marks=pytest.mark.full),
        pytest.param("precision=bf16", "int8", marks=pytest.mark.full),
        pytest.param("precision=bf16", "stored", marks=pytest.mark.full),
    ],
)
def test_peak_memory_with_frozen_base_matches_live_tensors(text, base):
    pytest.importorskip("torch")
    from tools.live_memory import adapter_peaks

    live, planned = adapter_peaks(text, base)
    assert planned == pytest.approx(live, rel=0.06)
