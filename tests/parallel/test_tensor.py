"""Tensor and sequence parallelism against one process: losses and every gradient, on models nobody rewrote."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.tensor_cases import FAMILIES, worst
from weft.comm.mesh import build_mesh
from weft.config.layout import Layout
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
    """Every family with and without sequence parallelism; whole logits where the other case has none."""
    found = [(f"tp={ranks}", name, {"fused": False}) for name in TEXT]
    found += [(f"tp={ranks} sp=on", name, {"fused": True}) for name in TEXT]
    return [*found, (f"tp={ranks}", "vit", {"fused": False})]


def test_every_family_on_two_ranks(ranks2):
    check(ranks2, cases(2))


@pytest.mark.full
def test_every_family_on_four_ranks(ranks4):
    check(ranks4, cases(4))


@pytest.mark.parametrize("sp", ["", " sp=on"])
def test_heads_vocabulary_and_widths_of_every_kind(ranks4, sp):
    """One key-value head for all, as many as ranks, a vocabulary smaller than the padding, three heads a rank."""
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


def cut_computed_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    parallelize(model, build_mesh(Plan(tp=2)), layout=Layout.parse("0=colwise 2=rowwise"))


def test_a_weight_that_is_computed_from_others_is_refused(ranks2):
    with pytest.raises(RankError) as caught:
        ranks2.run(cut_computed_weight)
    assert caught.value.refusal == (
        "layout: 0.weight is computed from other parameters (a weight norm?), and it cannot be sharded. Set "
        "0=replicate in a layout, or use tp=1."
    )
