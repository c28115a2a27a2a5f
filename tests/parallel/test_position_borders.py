"""Documents that a script packs into rows stay apart by its `position_ids`, or the model is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.parallel.test_documents import APART, LENGTHS, MIXING, built
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.layers import documents as position_borders
from weft.parallel.layers.documents import _packed, call_in_documents
from weft.parallel.parallelize import parallelize

pytest.importorskip("transformers")


def laid(family: str, kinds: dict[str, tuple[str, dict[str, Any]]]) -> Any:
    model = built(*kinds[family]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)  # else tokens hardly see each other
    return parallelize(model, build_mesh(Plan.parse("precision=fp64")))


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    documents = torch.randint(5, 61, (sum(LENGTHS),)).split(LENGTHS)
    row = _packed(*documents)
    return list(documents), row["input_ids"], row["positions"]


def same(row: torch.Tensor, documents: list[torch.Tensor], model: Any) -> None:
    with torch.no_grad():
        for found, one in zip(row.split(LENGTHS, dim=1), documents, strict=True):
            torch.testing.assert_close(found, model(input_ids=one[None]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss*", "opt*", "falcon"])
def test_each_document_gives_what_it_gives_alone(family):
    """Called as scripts do: transformers makes a cache then, and looks at no positions."""
    model = laid(family, APART)
    documents, tokens, positions = packed()
    with torch.no_grad():
        same(model(input_ids=tokens, position_ids=positions).logits, documents, model)
        # With a mask of ones, as a collator gives it.
        ones = torch.ones_like(tokens)
        same(model(input_ids=tokens, attention_mask=ones, position_ids=positions).logits, documents, model)
        if family == "llama":
            same(model(tokens, ones.bool(), positions).logits, documents, model)


def test_the_device_is_not_asked_where_documents_begin(monkeypatch):
    """What a GPU gets: an id for each token instead of places, whose number nobody knows."""
    monkeypatch.setattr(position_borders, "find_starts", lambda ids: None)
    for family in ("llama", "mistral"):
        model = laid(family, APART)
        documents, tokens, positions = packed()
        with torch.no_grad():
            same(model(input_ids=tokens, position_ids=positions).logits, documents, model)


def test_padding_is_a_document_of_its_own():
    model = laid("llama", APART)
    documents, tokens, positions = packed()
    pad = torch.zeros(1, 6, dtype=torch.int64)
    mask = torch.cat([pad, torch.ones_like(tokens)], 1)
    with torch.no_grad():
        # Positions that go on from the padding to the first document hide that it is one.
        given = torch.cat([torch.arange(-6, 0)[None], positions], 1)
        row = model(input_ids=torch.cat([pad, tokens], 1), attention_mask=mask, position_ids=given.clamp(min=0)).logits
        same(row[:, 6:], documents, model)
        row = model(input_ids=torch.cat([pad, tokens], 1), attention_mask=mask, position_ids=given).logits
        same(row[:, 6:], documents, model)


def test_calls_that_say_nothing_of_documents_stay_as_they_are(monkeypatch):
    called: list[Any] = []
    model = laid("llama", APART)
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
    assert len(called) == 1  # of call_in_documents itself


@pytest.mark.parametrize("family", ["mamba", "lfm2", "openai-gpt"])
def test_a_model_that_mixes_documents_is_refused(family):
    model = laid(family, MIXING)
    _, tokens, positions = packed()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=False)
        with pytest.raises(
            ModelError, match=f"restart within a row, and documents of one row see each other in a {family} "
        ):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
        model(input_ids=tokens, use_cache=False)


def test_a_failing_call_leaves_masks_as_they_were():
    known = __import__("transformers.masking_utils", fromlist=["x"]).ALL_MASK_ATTENTION_FUNCTIONS
    before = {name: known[name] for name in known}
    model = laid("opt*", APART)
    _, tokens, positions = packed()
    with pytest.raises(ModelError, match="61 entries"):
        model(input_ids=tokens + 1000, position_ids=positions)
    assert {name: known[name] for name in before} == before


def test_copies_follow_positions_too():
    model = laid("opt*", APART)
    documents, tokens, positions = packed()
    for other in (model, copy.deepcopy(model)):
        with torch.no_grad():
            same(other(input_ids=tokens, position_ids=positions).logits, documents, other)
