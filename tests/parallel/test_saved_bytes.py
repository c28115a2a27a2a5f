"""Bytes that a layer saves for backward match the planner within 2 %: eager, recomputed and compiled."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn

from tests.choice import gate_runs
from tests.lean import compiled_by
from tools.live_memory import saved_bytes
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import WeftWarning
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape

SEQ = 256
DIM, TOKENS = 16, 6  # of models with own code
LLAMA = DecoderSpec(vocab_size=64, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=352, max_seq_len=SEQ)
SPECS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(LLAMA, family="gpt2", num_kv_heads=4),
    "experts": dataclasses.replace(LLAMA, num_experts=4, expert_ffn_dim=176, num_shared_experts=1),
}
PLANS = ("dp_shard=2 zero=3", "tp=2", "tp=2 sp=on", "tp=2 sp=on recompute=selective", "dp_replicate=2 compile=on",
         "tp=2 sp=on compile=on", "tp=2 sp=on tp_chunks=3",
         "tp=2 sp=on tp_chunks=3 recompute=selective", "tp=2 mlp_tiles=4",
         "dp_shard=2 zero=3 mlp_tiles=3 recompute=full")  # fmt: skip
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


#: Plans of the gate: each way to save less, and the layouts of experts.
FEW = ("tp=2 sp=on compile=on", "tp=2 sp=on tp_chunks=3 recompute=selective",
       "dp_shard=2 zero=3 mlp_tiles=3 recompute=full", *OF_EXPERTS)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "plans"),
    gate_runs([("experts", FEW), ("experts", (*PLANS, *OF_EXPERTS)), ("llama", (*PLANS, *OF_DENSE)),
               ("gpt2", (*PLANS, *OF_DENSE))], 0),
    ids=["experts, few", "experts", "llama", "gpt2"],
)  # fmt: skip
def test_saved_bytes_of_a_layer_match_the_planner(family, plans, ranks2):
    spec = SPECS[family]
    texts = [f"{plan} precision=bf16" for plan in plans]
    job = Job(shape=Shape.of_decoder(spec), seq_len=SEQ, global_batch=2)
    columns = Columns.of([Plan.parse(text) for text in texts], job)
    planned = layer_bytes(job, columns).kept / columns.microbatch
    for found in ranks2.run(saved_by_layers, texts, spec):
        for text, measured, expected in zip(texts, found, planned, strict=True):
            assert measured == pytest.approx(expected, rel=0.02), text


def saved_by_layers(plans: list[str], spec: DecoderSpec) -> list[int]:
    return [saved_by_a_layer(plan, spec) for plan in plans]


class Inline(nn.Module):
    """Attention in the block's own code, so that its tokens cannot be divided."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x):
        q, k, v = (one.view(*x.shape[:2], -1, 8).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out((q @ k.mT @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norms[1](x)))


class InlineNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(8, DIM), nn.ModuleList(Inline() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def saved_by_own_blocks(plans: list[str], tokens: int) -> list[int]:
    found: list[int] = []
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    for plan in plans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeftWarning)
            model = parallelize(InlineNet(), build_mesh(Plan.parse(plan)))
        model(ids)
        found.append(saved_bytes(lambda model=model: model(ids), model.parameters()))
    return found


def test_a_rank_saves_its_share_of_inputs_where_tokens_cannot_be_divided(ranks2):
    inputs_of_columns = 2 * 2 * 2 * TOKENS * DIM * 4  # blocks, layers, sequences
    for full, divided in ranks2.run(saved_by_own_blocks, ["tp=2", "tp=2 sp=on"], TOKENS):
        assert full - divided == inputs_of_columns // 2
    for full, divided in ranks2.run(saved_by_own_blocks, ["tp=2", "tp=2 sp=on"], 1):
        assert full - divided == inputs_of_columns // 2 // TOKENS  # rows of both sequences
