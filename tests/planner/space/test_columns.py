"""Plans as columns: lossless round trip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.rank_positions import strides
from weft.config.plan import AXES, PRECISIONS, RESHARDS, SCHEDULES, Plan
from weft.config.shapes.model_spec import ModelSpec, decoder_spec, model_names
from weft.planner.space.columns import CP_MODES, Columns, Job
from weft.planner.space.shape import Shape

JOB = Job(shape=Shape.of_decoder(decoder_spec("llama3-8b")), seq_len=8192, global_batch=64)

SIZES = st.integers(1, 8)
PLANS = st.builds(
    Plan,
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), SIZES),
    zero=st.integers(0, 3),
    reshard=st.sampled_from(RESHARDS),
    sp=st.booleans(),
    schedule=st.sampled_from(SCHEDULES),
    virtual_stages=SIZES,
    precision=st.sampled_from(PRECISIONS),
    recompute=st.sampled_from(["none", "full", "attention", "selective", "50%", "0.25", "12GiB"]),
    offload=st.sampled_from([(), ("optimizer",), ("optimizer:0.5", "activations")]),
    compile=st.booleans(),
    cp_mode=st.sampled_from(CP_MODES),
    shares=st.sampled_from([(), (3, 1), (0,)]),
    split=st.sampled_from([(), (15, 17)]),
)


@settings(deadline=None, max_examples=60)
@given(PLANS, SIZES)
def test_plan_round_trip(plan, passes):
    plan = plan.replace(**{"microbatches" if plan.pp > 1 else "accumulation": passes})
    columns = Columns.of([plan, Plan()], JOB)
    again = columns.plan(0)
    assert again.replace(recompute="none") == JOB.settled(plan).replace(recompute="none")
    assert Columns.of([again], JOB).activation_budget[0] == pytest.approx(columns.activation_budget[0])
    assert columns.world_size[0] == plan.world_size
    assert columns.dp[0] == plan.dp_size


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("cp=2 cp_mode=ring", "ring"),
        ("cp=2 cp_mode=gather", "gather"),
        ("cp=2 cp_mode=ulysses", "ulysses"),
        ("cp=2", "ring"),  # 4096 tokens on a rank
        ("cp=4", "gather"),  # 2048
        ("cp=8", "ulysses"),  # one rank per key-value head: queries and outputs are smaller than all keys and values
    ],
)
def test_context_parallel_mode_matches_the_runtime(text, mode):
    columns = Columns.of([Plan.parse(text)], JOB)
    assert CP_MODES[columns.cp_mode[0]] == mode
    assert columns.plan(0).cp_mode == mode


def test_batch_is_divided_by_ranks_and_passes():
    columns = Columns.of([Plan(dp_shard=4, dp_replicate=2, accumulation=4)], JOB)
    assert (columns.microbatch[0], columns.num_micro[0]) == (2, 4)


def test_rows_are_selected_by_mask_and_joined():
    columns = Columns.of([Plan(tp=2), Plan(pp=2, microbatches=4), Plan(tp=4)], JOB)
    assert len(columns[columns.tp > 1]) == 2
    assert [str(columns[np.array([1])].plan(0))] == ["pp=2 microbatches=4"]
    joined = Columns.concatenate([columns, columns[:1]])
    assert [str(joined.plan(row)) for row in range(4)] == ["tp=2", "pp=2 microbatches=4", "tp=4", "tp=2"]


def test_no_plans_give_empty_columns():
    assert len(Columns.of([], JOB)) == 0


def test_unknown_columns_are_rejected():
    with pytest.raises(TypeError, match="no such columns: dp"):
        Columns.make(1, dp=2)


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_matches_the_formula(name):
    assert Shape.of_decoder(decoder_spec(name)).num_params == ModelSpec.named(name).num_params


def mixture(**changes) -> Shape:
    base = {
        "vocab": 32_000, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 0,
        "num_experts": 8, "top_k": 2, "expert_ffn": 14_336,
    }  # fmt: skip
    return Shape(**(base | changes))


def test_parameter_counts_of_mixtures():
    """From the model cards: Mixtral 8x7B 46.7 G, DeepSeek-V3 671 G, Qwen3-235B."""
    assert mixture().num_params == pytest.approx(46.7e9, rel=1e-3)
    deepseek = mixture(
        vocab=129_280, hidden=7168, layers=61, heads=128, kv_heads=128, ffn=18_432, num_experts=256, top_k=8,
        expert_ffn=2048, shared_ffn=2048, dense_layers=3, q_rank=1536, kv_rank=512, rope_dim=64,
    )  # fmt: skip
    assert deepseek.num_params == pytest.approx(671e9, rel=1e-3)
    qwen = mixture(
        vocab=151_936, hidden=4096, layers=94, heads=64, kv_heads=4, num_experts=128, top_k=8, expert_ffn=1536
    )
    assert qwen.num_params == pytest.approx(235.1e9, rel=1e-3)


@settings(deadline=None, max_examples=60)
@given(st.tuples(*[st.integers(1, 3)] * len(AXES)), st.permutations(AXES))
def test_strides_match_the_mesh(sizes, order):
    named = dict(zip(AXES, sizes, strict=True))
    plan = Plan(**named, order=tuple(name for name in order if named[name] > 1))
    columns = Columns.of([Plan(), plan, plan.replace(order=())], JOB)
    places = strides(plan, ())
    for name in AXES:
        if named[name] > 1:
            assert columns.stride(name)[1] == places[name][0]
            assert columns.stride(name)[2] == strides(plan.replace(order=()), ())[name][0]
    usual = [name for name in AXES if named[name] > 1]
    assert columns.plan(1).order == (() if list(plan.order) == usual else plan.order)
