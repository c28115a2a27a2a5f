"""Tensor and sequence parallelism, with and without ZeRO, match one process: losses, norms, gradients, weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.choice import gate_runs
from tests.parity.cases import GPT2, LLAMA, HuggingFaceCase, cases
from weft.config.fields.layout import Layout
from weft.errors import CommError
from weft.verify.parity import DecoderCase, train_cases

DECODERS = {
    "decoder": cases()["decoder"],
    "documents": DecoderCase(LLAMA, global_batch=16, documents=True, num_steps=3),
    "gpt2": DecoderCase(replace(GPT2, num_heads=4, num_kv_heads=4, tied=True), global_batch=16, num_steps=3),
    "sgd": DecoderCase(LLAMA, global_batch=16, optimizer="sgd", num_steps=3),
    "hf-qwen2": cases()["hf-qwen2"],
    "hf-gpt2": HuggingFaceCase(replace(GPT2, num_heads=2), global_batch=16, kind="gpt2", num_steps=3),
}
TWO = ["tp=2", "tp=2 sp=on accumulation=2", "tp=2 sp=on recompute=full", "tp=2 recompute=selective accumulation=2"]
#: tests/parity/test_layouts.py covers every layout of many models.
FOUR = ["tp=4 sp=on", "dp_shard=2 tp=2 zero=1 accumulation=2", "dp_shard=2 tp=2 zero=3 sp=on recompute=full"]


@pytest.fixture(scope="module")
def expected():
    return train_cases("precision=fp64", DECODERS)


def check(pool, plan, chosen, expected):
    for rank in pool.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in rank.items():
            assert result.largest_difference(expected[name]) < 1e-10, f"{plan} {name}"


#: tests/parity/test_matrix.py covers the others.
@pytest.mark.parametrize("plan", gate_runs(TWO, 3))
def test_tensor_parallel_matches_one_process_on_two_ranks(plan, ranks2, expected):
    check(ranks2, plan, DECODERS, expected)


@pytest.mark.parametrize("plan", gate_runs(FOUR, 0))
def test_tensor_parallel_matches_one_process_on_four_ranks(plan, ranks4, expected):
    chosen = {name: case for name, case in DECODERS.items() if "tp=4" not in plan or name != "hf-gpt2"}
    check(ranks4, plan, chosen, expected)


@dataclass(frozen=True)
class LaidOutCase(DecoderCase):
    """A decoder with a user-defined layout, as from a config."""

    layout: Layout | None = None


def test_user_layout_matches_one_process_and_unknown_modules_raise(ranks2, expected):
    """Shard only feed-forward layers, and reject a layout that matches no module."""
    layout_text = "blocks.*.mlp.{gate,up}=colwise blocks.*.mlp.down=rowwise"
    case = LaidOutCase(LLAMA, global_batch=16, layout=Layout.parse(layout_text))
    check(ranks2, "tp=2", {"decoder": case}, expected)
    with pytest.raises(CommError, match=r"'blocks.*.mlp.upper': the model has no such module"):
        ranks2.run(train_cases, "tp=2", {"decoder": replace(case, layout=Layout.parse("blocks.*.mlp.upper=colwise"))})
