"""Bytes and times of generation: caches as `RowCache` allocates them, and how times grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.inference.models import write_folder
from weft.config.plan import Plan
from weft.planner.cost.generation import CacheKind, Texts, cache_growth, cache_kinds, estimate_generation
from weft.planner.search.model_source import read_model
from weft.planner.search.question import Question

PROMPT, NEW, ROWS = 30, 34, 3
MLA = {
    "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 8}, "deepseek_v3": MLA, "mamba": {"state_size": 4},
}  # fmt: skip


def memory_of(cache: Any) -> int:
    """Return the bytes of all storages behind a cache's tensors."""
    found = dict[int, int]()
    for layer in cache.cache.layers:
        states = [s for name in ("conv_states", "recurrent_states") for s in getattr(layer, name, {}).values()]
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None), *states):
            if tensor is not None:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("family", KINDS)
def test_bytes_of_caches_equal_those_of_real_rows(family, tmp_path):
    from weft.generation.cache_kinds import folder_caches
    from weft.generation.forward import next_logits
    from weft.generation.row_cache import RowCache

    transformers: Any = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / family, family, **KINDS[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = RowCache(model)
    with torch.no_grad():
        next_logits(model, torch.zeros(ROWS, PROMPT, dtype=torch.long), cache=cache)
        cache.started(ROWS, PROMPT)
        for place in range(PROMPT, PROMPT + NEW - 1):
            next_logits(model, torch.zeros(ROWS, 1, dtype=torch.long), torch.full((ROWS, 1), place), cache)
            cache.advanced()
    measured = folder_caches(folder)
    planned = measured if family == "mamba" else cache_kinds(read_model(str(folder)).shape)
    size = cache_growth(PROMPT, NEW, joined=False)[-1]
    for kinds in (measured, planned):
        bytes_ = sum(kind.row_bytes(min(size, kind.window or size), 1, 4.0) for kind in kinds)
        assert ROWS * bytes_ == memory_of(cache)


def test_columns_grow_as_the_cache_does():
    from weft.models.kv_cache import LayerCache

    for prompt, new in ((5, 300), (400, 30), (1000, 700)):
        layer, sizes = LayerCache(), list[int]()
        for tokens in (prompt, *[1] * (new - 1)):
            layer.append(torch.zeros(1, 1, tokens, 1), torch.zeros(1, 1, tokens, 1))
            columns = layer.keys.untyped_storage().nbytes() // 4
            sizes += [columns] * (columns not in sizes)
        assert cache_growth(prompt, new, joined=False) == sizes


def predicted(plan: str, *, prompt: int = 500, new: int = 100, batch: int = 64, model: str = "llama3-8b", **changes):
    parsed = Plan.parse(plan + " precision=bf16")
    asked = Question.of(model, f"{parsed.world_size}xh100")
    texts = Texts(prompt=prompt, new=new, batch=batch, **changes)
    shape = asked.job.shape
    return estimate_generation(shape, cache_kinds(shape), asked.cluster, asked.tables, parsed, texts)


def test_times_and_bytes_grow_with_texts():
    base = predicted("tp=2")
    longer, more = predicted("tp=2", prompt=2000), predicted("tp=2", batch=256)
    for other in (longer, more):
        assert sum(other.first.values()) > 2 * sum(base.first.values())
        assert other.memory["cache"] > 2 * base.memory["cache"]
        assert sum(other.token.values()) >= sum(base.token.values())
    assert longer.token["attention"] > 2 * base.token["attention"]
    assert predicted("tp=2", new=500).memory["cache"] > base.memory["cache"]


def test_plans_divide_weights_caches_and_texts():
    one, two = predicted(""), predicted("tp=2")
    assert two.memory["parameters"] == pytest.approx(one.memory["parameters"] / 2, rel=0.01)
    assert two.memory["cache"] == pytest.approx(one.memory["cache"] / 2, rel=0.01)
    assert "tp" in two.token
    assert "tp" not in one.token
    data = predicted("dp_replicate=2")
    assert (data.rows, data.memory["parameters"]) == (32, one.memory["parameters"])
    assert data.memory["cache"] == pytest.approx(one.memory["cache"] / 2)
    sharded = predicted("dp_shard=2 zero=3")
    assert sharded.memory["parameters"] == pytest.approx(one.memory["parameters"] / 2)
    assert sharded.token["dp_exposed"] > one.memory["parameters"] / 2 / 900e9  # each token gathers all weights
    stages = predicted("pp=2")
    assert stages.memory["cache"] < 0.6 * one.memory["cache"]
    assert stages.token["gemm"] == pytest.approx(one.token["gemm"])  # the stages work one after the other
    assert stages.token["stages"] > 0


def test_decoding_is_bound_by_the_bytes_of_weights():
    """In bf16, one token of one text reads all weights of the layers and the head: 14 GiB at 80 % of 3.35 TB/s."""
    weights = 2 * (8.03e9 - 128_256 * 4096)
    found = predicted("", batch=1, prompt=1, new=2)
    assert weights / 3.35e12 < found.token["gemm"] < 1.3 * weights / (0.8 * 3.35e12)


def test_experts_that_no_token_uses_are_not_read():
    few, many = (predicted("", model="mixtral-8x7b", batch=batch, prompt=1) for batch in (1, 256))
    assert few.token["gemm"] < 0.5 * many.token["gemm"]


def test_more_texts_than_rows_come_one_after_the_other():
    once, twice = predicted("", batch=32), predicted("", batch=64, most_rows=32)
    assert (twice.rows, twice.waves) == (32, 2)
    assert twice.memory["cache"] == once.memory["cache"]


def test_windows_bound_the_cache_and_latent_vectors_are_not_divided():
    window, latent = CacheKind(layers=2, heads=4, width=16, window=8), CacheKind(layers=2, width=24)
    assert window.row_bytes(8, 2, 2.0) == 2 * 2 * 16 * 8 * 2
    assert latent.row_bytes(10, 1, 2.0) == latent.row_bytes(10, 8, 2.0) == 2 * 24 * 10 * 2
