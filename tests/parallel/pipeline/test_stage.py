"""A model cut into stages is the model: all stages in one process, one after another, and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity.pipeline_cases import GPT2, TIED, FamilyCase, FrozenCase, SequentialCase
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.models.inspect.chain import find_chain
from weft.models.registry import build_decoder
from weft.parallel.pipeline.boundary import Carried, RemoteModule, without_tensors
from weft.parallel.pipeline.stage import Stage, _cost, stage_counts
from weft.parallel.pipeline.survey import ValueSurvey
from weft.verify.parity import DecoderCase

CASES = {
    "llama": DecoderCase(TIED, documents=True, seq_len=8),
    "gpt2": DecoderCase(GPT2, seq_len=8),
    "frozen": FrozenCase(GPT2, seq_len=8),
    "sequential": SequentialCase(),
    **{
        f"hf-{kind}": FamilyCase(TIED, seq_len=8, kind=kind)
        for kind in ("llama", "qwen2", "gemma2", "gemma3_text", "gpt2", "bloom", "gpt_neox", "mistral", "phi")
    },
}


def stages_of(model: nn.Module, cuts: list[int]) -> list[Stage]:
    chain = find_chain(model)
    survey = ValueSurvey(model, chain, [*cuts, len(chain.blocks)])
    return [Stage(model, chain, survey, index, takes_gradient=index > 0, trains=True) for index in range(len(cuts) + 1)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [[4], [1, 2, 7]])
def test_stages_one_after_another_are_the_model(name, cuts):
    case = CASES[name]
    batch = case.batch(0)
    model = case.model()
    whole = case.forward(model, batch)
    case.loss(whole, batch)[0].backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    paths = list(dict(model.named_modules()))
    leaves, roots, activation = [], [], None
    for stage in stages_of(model, cuts):
        output = stage.forward(case.forward, batch, activation)
        roots.append(output)
        if not stage.is_last:
            activation = Carried(output.slots, tuple(each.detach().requires_grad_() for each in output.tensors))
            leaves.append(activation)
    assert torch.equal(output, whole)
    case.loss(output, batch)[0].backward()
    for root, leaf in reversed(list(zip(roots, leaves, strict=False))):
        pairs = [(each, got.grad) for each, got in zip(root.tensors, leaf.tensors, strict=True) if each.requires_grad]
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs]) if pairs else None
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-12, atol=1e-14)
    assert list(dict(model.named_modules())) == paths


class HeadFirst(nn.Module):
    """Registers its head before the blocks, as some models of transformers do."""

    def __init__(self, says_so: bool):
        super().__init__()
        self.lm_head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        if says_so:
            self.get_output_embeddings = lambda: self.lm_head[2]


def test_a_head_is_after_the_blocks_where_the_model_names_it():
    assert [site.path for site in find_chain(HeadFirst(True)).after] == ["lm_head"]
    assert [site.path for site in find_chain(HeadFirst(True)).before] == ["embed"]
    assert find_chain(HeadFirst(False)).after == ()


def test_the_chain_of_a_decoder():
    chain = find_chain(build_decoder(GPT2, device="meta"))
    assert [site.path for site in chain.before] == ["embed", "pos_embed"]
    assert [site.path for site in chain.blocks] == [f"blocks.{index}" for index in range(8)]
    assert [site.path for site in chain.after] == ["norm", "head"]


def test_heads_count_and_tables_do_not():
    chain = find_chain(build_decoder(TIED, device="meta"))
    assert _cost(chain.before) < 1
    assert _cost(chain.after) == 61 * 16
    assert stage_counts(chain, Plan(pp=4, microbatches=4)) == (2, 2, 2, 2)
    heavy = build_decoder(TIED.__class__(**{**vars_of(TIED), "vocab_size": 4096}), device="meta")
    assert stage_counts(find_chain(heavy), Plan(pp=2, microbatches=4)) == (7, 1)


def vars_of(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_what_is_no_chain_is_refused():
    with pytest.raises(ModelError) as caught:
        find_chain(nn.Linear(2, 2))
    assert str(caught.value) == (
        "model of type Linear: a pipeline divides a chain of blocks, and it has no repeated modules that are "
        "called. Put the blocks into nn.ModuleList, nn.ModuleDict or nn.Sequential, or use pp=1."
    )


def test_a_stand_in_has_no_tensors_and_all_attributes():
    block = nn.Linear(3, 4)
    weight = block.weight
    absent = RemoteModule(without_tensors(block), "blocks.0")
    assert (absent.in_features, absent.weight.device.type, list(absent.parameters())) == (3, "meta", [])
    assert weight.device.type == "cpu"
