"""Tensor and sequence parallelism of unmodified models match one process: losses and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.choice import todays
from tests.parallel.tensor_cases import FAMILIES, worst
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.verify.rank_pool import RankError

DECODERS = ("decoder", "decoder-gpt2")
TEXT = (*DECODERS, *(name for name in FAMILIES if name != "vit"))


def check(pool, cases):
    for rank in pool.run(worst, cases):
        for case, (where, difference) in rank.items():
            assert difference < 1e-10, f"{case}: {where} differs by {difference}"


def cases(ranks):
    """Return every family without sp and with full logits, and with sp and a fused loss."""
    found = [(f"tp={ranks}", name, {"fused": False}) for name in TEXT]
    found += [(f"tp={ranks} sp=on", name, {"fused": True}) for name in TEXT]
    return [*found, (f"tp={ranks}", "vit", {"fused": False})]


def test_every_family_matches_one_process_on_two_ranks(ranks2):
    check(ranks2, cases(2))


@pytest.mark.full
def test_every_family_matches_one_process_on_four_ranks(ranks4):
    check(ranks4, cases(4))


@pytest.mark.parametrize("sp", todays(["", " sp=on"], parts=2))
def test_head_counts_vocabularies_and_widths_match_one_process(ranks4, sp):
    """Use one key-value head, one per rank, a vocabulary that needs padding, and three heads per rank."""
    wide = {"dim": 48, "num_heads": 12, "ffn_dim": 12}
    check(
        ranks4,
        [
            (f"tp=4{sp}", "decoder", {"num_kv_heads": 1}),
            (f"tp=4{sp}", "decoder", {"num_kv_heads": 4, "vocab_size": 64}),
            (f"tp=4{sp}", "decoder", {**wide, "num_kv_heads": 2, "tied": False}),
            (f"tp=4{sp}", "decoder", {**wide, "num_kv_heads": 12, "vocab_size": 62}),
            (f"tp=2 dp_replicate=2{sp}", "llama", {"num_key_value_heads": 1, "attention_bias": True}),
        ],
    )


def shard_computed_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    parallelize(model, build_mesh(Plan(tp=2)), layout=Layout.parse("0=colwise 2=rowwise"))


def test_computed_weight_is_rejected(ranks2):
    with pytest.raises(RankError) as caught:
        ranks2.run(shard_computed_weight)
    assert caught.value.refusal == (
        "layout: 0.weight is computed from other parameters (a weight norm?), and it cannot be sharded. Set "
        "0=replicate in a layout, or use tp=1."
    )
