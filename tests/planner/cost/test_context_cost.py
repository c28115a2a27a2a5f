"""Cost of context parallelism matches the runtime: its bytes and blocks, with no free operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.config.cluster import ClusterSpec
from weft.config.partitioning import sent_bytes
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost import context as context_cost
from weft.planner.cost.machine import Fabric, Tables, flash_s
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.estimator import estimate
from weft.planner.report.explanation import search
from weft.planner.space.columns import CP_MODES, Columns, Job
from weft.planner.space.shape import Shape, Stack

SHAPE = Shape.of_decoder(decoder_spec("llama3-8b"))
JOB = Job(shape=SHAPE, seq_len=8192, global_batch=64)
CLUSTER = ClusterSpec.parse("8xh100")
TABLES = Tables.of(CLUSTER.device)
#: One byte takes one second; everything else is free.
BYTES = Fabric(link_rate=1.0, link_alpha_s=0.0, nic_rate=1.0, nic_alpha_s=0.0, half_bytes=0.0, domain=8, mesh=False)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("mode", CP_MODES)
def test_bytes_match_the_communication_ledger(mode, cp):
    """The ledger counts the larger side of a collective; a rank's own share is not sent."""
    columns = Columns.make(1, cp=cp, cp_mode=CP_MODES.index(mode))
    tokens = np.array([8192.0 / cp])
    q, kv = (np.array([float(heads * SHAPE.head_dim)]) for heads in (SHAPE.heads, SHAPE.kv_heads))
    even = TABLES.changed(overlap_comm=1.0)
    nothing = np.zeros(1)
    found = context_cost.traffic_s(JOB, columns, even, BYTES, tokens, q, kv, nothing, nothing)
    travels = 1.0 if mode == "ring" else (cp - 1) / cp
    for backward, seconds in zip((False, True), found, strict=True):
        counted = sent_bytes(
            mode, cp=cp, tokens=8192 // cp, num_heads=SHAPE.heads, num_kv_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim, itemsize=2, sum_itemsize=4, backward=backward,
        )  # fmt: skip
        assert seconds[0] == pytest.approx(counted * travels)


def test_ring_with_long_attention_exposes_only_its_last_gradients():
    columns = Columns.make(1, cp=4, cp_mode=CP_MODES.index("ring"))
    tokens, width, long = np.array([2048.0]), np.array([1024.0]), np.array([1e12])
    even = TABLES.changed(overlap_comm=1.0, overlap_compute=1.0)
    forward, backward = context_cost.traffic_s(JOB, columns, even, BYTES, tokens, width, width, long, long)
    assert forward[0] == 0
    assert backward[0] == 2 * 2048 * 1024 * 4


def test_blocks_of_ring_attention_have_the_arithmetic_of_full_attention():
    """Own triangle and half of the others' blocks: equal time without ramps, gains and launches."""
    flat = TABLES.changed(attn_s0=0.0, flash2_gain=1.0, launch_s=0.0)
    columns = Columns.make(3, cp=[2, 4, 8], cp_mode=CP_MODES.index("ring"))
    width = np.full(3, 4096.0)
    found = context_cost.blocks_s(JOB, columns, flat, width, backward=False, peak=TABLES.flops["bf16"])
    flops = 4.0 * (8192 / columns.cp) * (8192 + 128) / 2 * 4096
    whole = flash_s(flat, flops, 8192, False, TABLES.flops["bf16"])
    assert found == pytest.approx(whole)


def test_ring_blocks_use_older_kernels_on_newer_devices():
    columns = Columns.make(2, cp=2, cp_mode=[CP_MODES.index("ring"), CP_MODES.index("ulysses")])
    ring, ulysses = estimate(JOB, CLUSTER, columns, TABLES).terms["attention"]
    assert ring > 1.3 * ulysses
    fused = replace(JOB, stack=Stack(eager_pieces=False))
    ring, ulysses = estimate(fused, CLUSTER, columns, TABLES).terms["attention"]
    assert ring < 1.1 * ulysses
    ampere = ClusterSpec.parse("8xa100")
    ring, ulysses = estimate(JOB, ampere, columns, Tables.of(ampere.device)).terms["attention"]
    assert ring < 1.1 * ulysses


def test_context_parallelism_is_slower_if_the_sequence_fits():
    """Equal tokens per rank and pass: cp ranks share one sequence, or each has its own half of the batch."""
    for mode in range(len(CP_MODES)):
        columns = Columns.make(2, dp_shard=[8, 4], cp=[1, 2], cp_mode=mode, microbatch=[1, 2], num_micro=8, zero=3)
        whole, cut = estimate(JOB, CLUSTER, columns, TABLES).step_s
        assert cut > 1.03 * whole


def test_backward_memory_includes_communication_buffers():
    columns = Columns.make(4, cp=[1, 4, 4, 4], cp_mode=[0, 0, 1, 2], dp_shard=2, zero=3)
    none, ring, gather, ulysses = layer_bytes(JOB, columns).beside
    assert none == 0
    assert gather > ring > 0
    assert ulysses > 0


def test_only_long_sequences_are_sharded():
    assert search("llama3-8b", "8xh100", seq_len=8192, global_batch=128)[0].plan.cp == 1
    longer = replace(decoder_spec("llama3-8b"), max_seq_len=131_072)
    long = search(longer, "8xh100", seq_len=131_072, global_batch=8, fixed="offload=none")
    assert long[0].plan.cp * long[0].plan.tp > 1
