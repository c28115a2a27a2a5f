"""Bytes that a layer saves for backward match the planner within 2 %: eager, recomputed and compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.choice import gate_runs
from tests.lean import compiled_by
from tools.live_memory import saved_bytes
from weft.comm.mesh import build_mesh
from weft.config.decoder_shape import DecoderSpec
from weft.config.plan import Plan
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape

SEQ = 256
LLAMA = DecoderSpec(vocab_size=64, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=352, max_seq_len=SEQ)
SPECS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(LLAMA, family="gpt2", num_kv_heads=4),
    "experts": dataclasses.replace(LLAMA, num_experts=4, expert_ffn_dim=176, num_shared_experts=1),
}
PLANS = ("dp_shard=2 zero=3", "tp=2", "tp=2 sp=on", "tp=2 sp=on recompute=selective", "dp_replicate=2 compile=on",
         "tp=2 sp=on compile=on", "tp=2 sp=on tp_chunks=3",
         "tp=2 sp=on tp_chunks=3 recompute=selective")  # fmt: skip
OF_DENSE = ("tp=2 sp=on tp_chunks=3 compile=on",)
OF_EXPERTS = ("dp_shard=2 ep=2 zero=1", "dp_replicate=2 recompute=selective compile=on")


def saved_by_a_layer(plan: str, spec: DecoderSpec) -> int:
    """Return the bytes that one more layer saves for backward on this rank."""
    torch._dynamo.reset()
    with compiled_by("lean"):
        counts = [_saved(plan, dataclasses.replace(spec, num_layers=layers)) for layers in (2, 3)]
    return counts[1] - counts[0]


def _saved(plan: str, spec: DecoderSpec) -> int:
    model = parallelize(build_decoder(spec, seed=0), build_mesh(Plan.parse(plan)))
    ids = torch.zeros(1, SEQ, dtype=torch.int64)
    model(ids)  # the first call inspects the blocks
    return saved_bytes(lambda: model(ids), model.parameters())


@pytest.mark.parametrize("family", gate_runs(SPECS, 2))
def test_saved_bytes_of_a_layer_match_the_planner(family, ranks2):
    spec = SPECS[family]
    texts = [f"{plan} precision=bf16" for plan in (*PLANS, *(OF_EXPERTS if spec.num_experts else OF_DENSE))]
    job = Job(shape=Shape.of_decoder(spec), seq_len=SEQ, global_batch=2)
    columns = Columns.of([Plan.parse(text) for text in texts], job)
    planned = layer_bytes(job, columns).kept / columns.microbatch
    for found in ranks2.run(saved_by_layers, texts, spec):
        for text, measured, expected in zip(texts, found, planned, strict=True):
            assert measured == pytest.approx(expected, rel=0.02), text


def saved_by_layers(plans: list[str], spec: DecoderSpec) -> list[int]:
    return [saved_by_a_layer(plan, spec) for plan in plans]
