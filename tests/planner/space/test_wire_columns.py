"""The planner uses the byte counts of the wire format that `reduce` names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.comm import block8  # noqa: F401 (registers the wire)
from weft.config.cluster import ClusterSpec
from weft.config.fields.wire_formats import COMPRESSES, GATHERS, WIRES, wire_spec
from weft.config.plan import Plan
from weft.config.shapes.model_spec import ModelSpec, decoder_spec
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.space.columns import Columns, Job, copy_bytes, state_bytes, weight_bytes, wire_bytes
from weft.planner.space.shape import Shape, Stack

CLUSTER = ClusterSpec.parse("16x8xh100")
JOB = Job(shape=Shape.of_decoder(decoder_spec("llama3-8b")), seq_len=4096, global_batch=256)
CODE = tuple(WIRES).index("block8")


def test_bytes_of_each_row_match_its_wire_format():
    columns = Columns.make(4, dp_shard=[8, 8, 8, 1], reduce=[0, 1, CODE, CODE])
    numel = np.array([1000.0] * 4)
    assert wire_bytes(columns, numel, 4.0).tolist() == [4000.0, 2000.0, 1064.0, 1064.0]
    assert wire_bytes(columns, numel, 2.0).tolist() == [2000.0, 2000.0, 1064.0, 1064.0]
    assert copy_bytes(columns, 4.0).tolist() == [0.0, 2.0, 1.0625, 1.0625]
    assert state_bytes(columns).tolist() == [0.0, 0.0, 8.0, 0.0], "one rank sends nothing and stores nothing"
    assert wire_spec("block8").num_bytes(1000) == 1064


def test_compress_counts_only_on_the_outermost_data_axis():
    int8 = tuple(COMPRESSES).index("int8")
    columns = Columns.make(3, dp_replicate=[1, 2, 2], dp_shard=4, zero=1, compress=[int8, int8, 0])
    numel = np.array([1024.0] * 3)
    assert wire_bytes(columns, numel, 4.0, "shard").tolist() == [1032.0, 4096.0, 4096.0]
    assert wire_bytes(columns, numel, 4.0, "replicas").tolist() == [4096.0, 1032.0, 4096.0]
    assert state_bytes(columns).tolist() == [0.0] * 3, "int8 has no residual"
    kept_code = np.full(3, tuple(COMPRESSES).index("block8"), np.uint8)
    kept = state_bytes(columns.with_arrays(compress=kept_code))
    assert kept.tolist() == [8.0, 2.0, 2.0], "only of its own shard, over replicas"


def test_gathered_weights_are_counted_under_zero3():
    columns = Columns.make(2, dp_shard=4, zero=3, gather=[0, GATHERS.index("int8")])
    assert weight_bytes(columns, np.array([1024.0] * 2), 2.0).tolist() == [2048.0, 1032.0]
    float8 = columns.with_arrays(gather=np.full(2, GATHERS.index("fp8"), np.uint8))
    numel = np.array([8192.0] * 2)
    assert weight_bytes(float8, numel, 2.0).tolist() == [8192.0 + 2 * 2] * 2
    assert weight_bytes(float8, numel, 2.0, in_layers=False).tolist() == [16384.0] * 2, "embedding, experts"
    plan = Columns.make(1, dp_shard=16, zero=3)
    coded = plan.with_arrays(gather=np.full(1, GATHERS.index("int8"), np.uint8))
    tables = Tables.of(ClusterSpec.parse("2x8xh100").device)
    one, two = (estimate(JOB, ClusterSpec.parse("2x8xh100"), each, tables) for each in (plan, coded))
    assert two.terms["dp_exposed"] < one.terms["dp_exposed"]
    assert two.step_s < one.step_s
    assert one.memory["buffers"] < two.memory["buffers"] < 1.5 * one.memory["buffers"], "codes add to weights"


def test_slow_link_between_replicas_is_priced():
    slow = ClusterSpec.parse("2x8xh100")
    plan = Columns.make(1, dp_replicate=2, dp_shard=8, zero=1)
    tables = Tables.of(slow.device)
    code = np.full(1, tuple(COMPRESSES).index("int8"), np.uint8)
    exact, coded = (estimate(JOB, slow, one, tables) for one in (plan, plan.with_arrays(compress=code)))
    assert coded.terms["dp_exposed"] <= exact.terms["dp_exposed"]
    assert coded.step_s <= exact.step_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_wire_format_adds_time_and_memory(zero):
    wide = Columns.make(1, dp_replicate=4, dp_shard=32, zero=zero, num_micro=2)
    tables = Tables.of(CLUSTER.device)
    exact = estimate(JOB, CLUSTER, wide, tables)
    found = estimate(JOB, CLUSTER, wide.with_arrays(reduce=np.full(1, CODE, np.uint8)), tables)
    as_many = estimate(replace(JOB, stack=Stack(reduce_bytes=1 + 4 / 64)), CLUSTER, wide, tables)
    assert found.terms["dp_exposed"] == pytest.approx(as_many.terms["dp_exposed"], rel=1e-4)
    params = ModelSpec.named("llama3-8b").num_params
    assert found.memory["gradients"] - exact.memory["gradients"] == pytest.approx(8.0 * params, rel=1e-3)
    assert found.step_s < exact.step_s


def test_columns_keep_the_wire_format():
    plan = Plan.parse("dp_shard=8 zero=2 reduce=block8")
    assert Columns.of([plan], JOB).plan(0).reduce == "block8"
