"""Layers that stay in bf16 under precision=fp8, counted by the planner without a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import decoder_spec
from weft.models.registry import build_decoder
from weft.parallel.layers.float8 import choose_float8
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.trained_part import half_share

LLAMA = DecoderSpec(vocab_size=64, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=160, max_seq_len=64)
SPECS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(LLAMA, family="gpt2", num_kv_heads=4),
    "experts": dataclasses.replace(LLAMA, num_experts=4, num_shared_experts=1, first_moe_layer=1, expert_ffn_dim=96),
}


@pytest.mark.parametrize("words", [("first:1", "last:2"), ("*.down",), ("blocks.1.attn.*", "*.up")])
@pytest.mark.parametrize("name", SPECS)
def test_share_matches_the_layers_that_the_runtime_skips(name, words):
    model = build_decoder(SPECS[name], seed=0)
    choose_float8(model, torch.device("cpu"), speaks=False)
    could = [path for path, module in model.named_modules() if hasattr(module, "_weft_float8")]
    sizes = {path: model.get_submodule(path).weight.numel() for path in could}
    left = build_decoder(SPECS[name], seed=0)
    choose_float8(left, torch.device("cpu"), words, speaks=False)
    kept = [path for path in could if not hasattr(left.get_submodule(path), "_weft_float8")]
    share = sum(sizes[path] for path in kept) / sum(sizes.values())
    assert 0 < share < 1
    assert half_share(SPECS[name], words) == pytest.approx(share)


def test_names_of_transformers_count_and_unknown_names_are_ignored():
    assert half_share(LLAMA, ["*.down_proj"]) == half_share(LLAMA, ["*.down"])
    assert half_share(LLAMA, ["*.nothing"]) == half_share(LLAMA, []) == 0


def test_fp8_gain_shrinks_with_bf16_layers_and_is_zero_for_experts():
    def gemm_s(question: Question, precision: str) -> float:
        plan = Plan.parse(f"dp_shard=8 zero=3 accumulation=16 compile=on precision={precision}")
        return estimated([plan], question)[0].terms["gemm"]

    question = Question.of("llama3-8b", "8xh100")
    half = dataclasses.replace(question, job=dataclasses.replace(question.job, half=0.5))
    assert gemm_s(question, "fp8") < gemm_s(half, "fp8") < gemm_s(question, "bf16") == gemm_s(half, "bf16")
    dense = Question.of(decoder_spec("llama3-8b"), "8xh100")
    experts = Question.of(dataclasses.replace(decoder_spec("mixtral-8x7b"), num_layers=8), "8xh100")
    gain, none = (gemm_s(one, "bf16") / gemm_s(one, "fp8") for one in map(_with_one_scale, (dense, experts)))
    assert gain > 1.2 > 1.1 > none


def _with_one_scale(question: Question) -> Question:
    """Return the question with train.fp8_recipe=tensorwise."""
    stack = dataclasses.replace(question.job.stack, row_scales=False)
    return dataclasses.replace(question, job=dataclasses.replace(question.job, stack=stack))
