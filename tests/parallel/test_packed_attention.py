"""Packed attention in Hugging Face models matches transformers' masks, without a tensor over pairs of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.parallel.layers.documents import attend_in_documents, borders_of

transformers: Any = pytest.importorskip("transformers")

TOKENS, VOCABULARY = 96, 61
COMMON = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 6, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: Name -> config, settings in addition to COMMON, and whether the model reads document boundaries.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("LlamaConfig", {}, True),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, True),
    "mistral, window": ("MistralConfig", {"sliding_window": 7}, True),
    "gemma3, windows": (
        "Gemma3TextConfig",
        {"sliding_window": 9, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "granite, own scale": ("GraniteConfig", {"attention_multiplier": 0.1}, True),
    "phi3": ("Phi3Config", {}, True),
    "deepseek_v3, narrow values": ("DeepseekV3Config", LATENT, True),
    "gemma2, softcap": ("Gemma2Config", {"head_dim": 8, "sliding_window": 9}, False),
    "deepseek_v32, an indexer reads the mask": (
        "DeepseekV32Config",
        LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 96},
        False,
    ),
    "bloom": ("BloomConfig", {}, False),
}


def build_model(family: str) -> Any:
    name, changes, _ = FAMILIES[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**COMMON | changes)).double()


def build_with_boundaries(family: str) -> Any:
    """Return the same model with attention that reads document boundaries."""
    model = build_model(family)
    attend_in_documents(model)
    return model


def batch_of(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a batch in the loader's format, with documents of the given lengths in each row."""
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    batch = {
        "input_ids": torch.randint(VOCABULARY, ids.shape, generator=torch.Generator().manual_seed(1)),
        "positions": torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths]),
    }
    if ids.any():
        starts = torch.full((len(lengths), 8), TOKENS)
        for row, found in zip(starts, lengths, strict=True):
            row[: len(found)] = torch.tensor([0, *found[:-1]]).cumsum(0)
        batch |= {"document_ids": ids, "document_starts": starts}
    return batch


def trained(model: Any, batch: dict[str, torch.Tensor], **given: Any) -> tuple[torch.Tensor, ...]:
    """Return logits and the gradients of all parameters."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=False, **given).logits
    logits.square().sum().backward()
    return logits.detach(), *(param.grad for param in model.parameters() if param.grad is not None)


@pytest.mark.parametrize("lengths", [[[40, 17, 39], [96]], [[96], [96]]], ids=["borders", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_attention_matches_masks(family, lengths):
    batch = batch_of(lengths)
    model = build_with_boundaries(family)
    given = borders_of(model, batch)
    assert bool(given) == FAMILIES[family][2]
    for ours, theirs in zip(trained(model, batch, **given), trained(build_model(family), batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_boundaries_from_ids_and_user_mask():
    batch = batch_of([[40, 56], [10, 86]])
    model = build_with_boundaries("llama")
    by_ids = borders_of(model, {name: one for name, one in batch.items() if name != "document_starts"})
    torch.testing.assert_close(by_ids["attention_mask"][:, 0, 0], batch["document_starts"][:, :2])
    padded = {"attention_mask": (torch.arange(TOKENS) < 80).expand(2, -1).long()}
    for ours, theirs in zip(
        trained(model, batch, **padded), trained(build_model("llama"), batch, **padded), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple) else (found,):
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return found


def test_packed_attention_has_no_tensor_over_pairs():
    # Larger than any other tensor of a row: 96 tokens of 61 logits are 5,856.
    batch, pairs = batch_of([[40, 17, 39]]), TOKENS * TOKENS
    model = build_with_boundaries("llama")
    with Largest() as plain:
        trained(model, batch)
    with Largest() as given:
        trained(model, batch, **borders_of(model, batch))
    assert plain.numel >= pairs > given.numel
