"""Packed documents in Hugging Face models: each matches its unpacked result, or the model is rejected."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from weft.parallel.layers.documents import (
    _LIMIT,
    _difference,
    _packed,
    attend_in_documents,
    call_in_documents,
    reads_documents,
    small_copy,
    why_documents_mix,
)

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = (9, 14, 5, 4)
#: Models that separate documents: config name and settings in addition to SIZES. Those with a star need Weft's masks
#: with document boundaries, or positions that start after the pad token's.
SEPARATING: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "attention_chunk_size": 6, "intermediate_size_mlp": 24}),
    "falcon": ("FalconConfig", {}),
    "gpt_oss*": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1,
         "experts_implementation": "eager"},  # grouped products do not support float64
    ),
    "opt*": ("OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "biogpt*": ("BioGptConfig", {}),
    "bloom*": ("BloomConfig", {"n_head": 4, "n_layer": 2}),
    "mpt*": ("MptConfig", {"d_model": 16, "n_heads": 4, "n_layers": 2}),
    "roberta*": ("RobertaConfig", {"is_decoder": True, "pad_token_id": 1}),
    "megatron-bert*": ("MegatronBertConfig", {"is_decoder": True}),
}  # fmt: skip
#: Models that carry state along the row in their own way, or compute positions themselves.
MIXING: dict[str, tuple[str, dict[str, Any]]] = {
    "rwkv": ("RwkvConfig", {}),
    "openai-gpt": ("OpenAIGPTConfig", {}),
    "bart": ("BartConfig", {}),
}


def built(name: str, changes: dict[str, Any], device: str = "cpu") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | changes))


@pytest.mark.parametrize("family", SEPARATING)
def test_packed_documents_match_unpacked_ones(family):
    model = built(*SEPARATING[family]).double().eval()
    assert not why_documents_mix(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)  # otherwise tokens hardly affect each other
        documents = torch.randint(5, 61, (sum(LENGTHS),)).split(LENGTHS)
        unpacked = [model(input_ids=one[None], use_cache=False).logits for one in documents]
        attend_in_documents(model)
        row = call_in_documents(model, _packed(*documents)).logits
    for ours, theirs in zip(row.split(LENGTHS, dim=1), unpacked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # some models compute rotations in float32


@pytest.mark.parametrize("family", MIXING)
def test_mixing_models_are_reported(family):
    reason = why_documents_mix(built(*MIXING[family], device="meta"))
    assert reason == f"documents of one row see each other in a {family} model"


def test_model_that_fails_the_trial_is_reported():
    assert why_documents_mix(built("XmodConfig", {}, device="meta")) == (
        "Weft cannot show that documents of one row stay apart in a xmod model, since a small one fails (ValueError: "
        "Input language unknown. Please call `XmodPreTrainedModel.set_default_language()`)"
    )


def test_trial_changes_neither_model_nor_random_state():
    model = built(*SEPARATING["opt*"])
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert not why_documents_mix(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_trial_restores_mask_functions():
    known = __import__("transformers.masking_utils", fromlist=["x"]).ALL_MASK_ATTENTION_FUNCTIONS
    before = {name: known[name] for name in known}
    why_documents_mix(built(*SEPARATING["opt*"]))
    assert {name: known[name] for name in before} == before


@pytest.mark.full
def test_models_that_read_boundaries_need_no_trial():
    """Check every installed transformers family with small sizes: those that need no trial separate documents."""
    found = {}
    for kind in sorted(transformers.AutoModelForCausalLM._model_mapping._model_mapping):
        # Some default configs do not build, or have incompatible sizes.
        with contextlib.suppress(Exception):
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind]())
            if reads_documents(model):
                found[kind] = _difference(small_copy(type(model), model.config, window=6))
    assert len(found) > 70
    assert not {kind: difference for kind, difference in found.items() if not difference < _LIMIT}
