"""`position_ids` of a script separate packed documents, or the model is rejected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.parallel.test_documents import LENGTHS, MIXING, SEPARATING, built
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.layers import documents as position_borders
from weft.parallel.layers.documents import _packed, call_in_documents
from weft.parallel.parallelize import parallelize

pytest.importorskip("transformers")


def parallelized(family: str, kinds: dict[str, tuple[str, dict[str, Any]]]) -> Any:
    model = built(*kinds[family]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)  # otherwise tokens hardly affect each other
    return parallelize(model, build_mesh(Plan.parse("precision=fp64")))


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    documents = torch.randint(5, 61, (sum(LENGTHS),)).split(LENGTHS)
    row = _packed(*documents)
    return list(documents), row["input_ids"], row["positions"]


def check_matches(row: torch.Tensor, documents: list[torch.Tensor], model: Any) -> None:
    with torch.no_grad():
        for found, one in zip(row.split(LENGTHS, dim=1), documents, strict=True):
            torch.testing.assert_close(found, model(input_ids=one[None]).logits, rtol=1e-5, atol=1e-5)


STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"state_size": 4}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss*", "opt*", "falcon", "mamba", "lfm2"])
def test_packed_documents_match_unpacked_ones(family):
    """Call models as scripts do. transformers then makes a cache and ignores positions."""
    model = parallelized(family, SEPARATING | STATES)
    documents, tokens, positions = packed()
    with torch.no_grad():
        check_matches(model(input_ids=tokens, position_ids=positions).logits, documents, model)
        # With a mask of ones, as from a collator.
        ones = torch.ones_like(tokens)
        check_matches(model(input_ids=tokens, attention_mask=ones, position_ids=positions).logits, documents, model)
        if family == "llama":
            check_matches(model(tokens, ones.bool(), positions).logits, documents, model)


def test_document_starts_need_no_device_synchronization(monkeypatch):
    """Simulate a GPU, which gets an id per token instead of starts, whose number would need a synchronization."""
    monkeypatch.setattr(position_borders, "find_starts", lambda ids: None)
    for family in ("llama", "mistral"):
        model = parallelized(family, SEPARATING)
        documents, tokens, positions = packed()
        with torch.no_grad():
            check_matches(model(input_ids=tokens, position_ids=positions).logits, documents, model)


def test_padding_is_a_separate_document():
    model = parallelized("llama", SEPARATING)
    documents, tokens, positions = packed()
    pad = torch.zeros(1, 6, dtype=torch.int64)
    mask = torch.cat([pad, torch.ones_like(tokens)], 1)
    with torch.no_grad():
        # Positions that continue from the padding to the first document hide its start.
        given = torch.cat([torch.arange(-6, 0)[None], positions], 1)
        row = model(input_ids=torch.cat([pad, tokens], 1), attention_mask=mask, position_ids=given.clamp(min=0)).logits
        check_matches(row[:, 6:], documents, model)
        row = model(input_ids=torch.cat([pad, tokens], 1), attention_mask=mask, position_ids=given).logits
        check_matches(row[:, 6:], documents, model)


def test_calls_without_documents_are_unchanged(monkeypatch):
    called: list[Any] = []
    model = parallelized("llama", SEPARATING)
    monkeypatch.setattr(position_borders, "as_borders", lambda *given: called.append(given))
    monkeypatch.setattr(position_borders, "within_documents", lambda *given: called.append(given))
    _, tokens, positions = packed()
    straight = torch.arange(tokens.shape[1])[None]
    pairs = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=straight)
        model.generate(input_ids=tokens, position_ids=straight, max_new_tokens=2, do_sample=False)
        model(input_ids=tokens, position_ids=positions, attention_mask=pairs)
        call_in_documents(model, {"input_ids": tokens, "positions": positions})
        model(input_ids=tokens)
    assert len(called) == 1  # the call by call_in_documents


@pytest.mark.parametrize("family", ["rwkv", "openai-gpt"])
def test_model_that_mixes_documents_is_rejected(family):
    model = parallelized(family, MIXING)
    _, tokens, positions = packed()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=False)
        with pytest.raises(
            ModelError, match=f"restart within a row, and documents of one row see each other in a {family} "
        ):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
        model(input_ids=tokens, use_cache=False)


def test_failing_call_restores_mask_functions():
    known = __import__("transformers.masking_utils", fromlist=["x"]).ALL_MASK_ATTENTION_FUNCTIONS
    before = {name: known[name] for name in known}
    model = parallelized("opt*", SEPARATING)
    _, tokens, positions = packed()
    with pytest.raises(ModelError, match="61 entries"):
        model(input_ids=tokens + 1000, position_ids=positions)
    assert {name: known[name] for name in before} == before


def test_copied_models_read_positions():
    model = parallelized("opt*", SEPARATING)
    documents, tokens, positions = packed()
    for other in (model, copy.deepcopy(model)):
        with torch.no_grad():
            check_matches(other(input_ids=tokens, position_ids=positions).logits, documents, other)
