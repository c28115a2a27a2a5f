"""A model split into stages equals the model: all stages run in one process, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.choice import todays
from tests.parity.chain_cases import ChainCase
from tests.parity.pipeline_cases import GPT2, TIED, FamilyCase, FrozenCase, SequentialCase
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.models.inspect.chain import find_chain
from weft.models.registry import build_decoder
from weft.parallel.pipeline.boundary import Carried, RemoteModule, without_tensors
from weft.parallel.pipeline.stage import Stage, _cost, stage_counts
from weft.parallel.pipeline.survey import ValueSurvey
from weft.parallel.state.precision import Precision
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


def stages_of(model: nn.Module, splits: list[int]) -> list[Stage]:
    chain = find_chain(model)
    survey = ValueSurvey(model, chain, [*splits, len(chain.blocks)])
    return [
        Stage(model, chain, survey, index, takes_gradient=index > 0, trains=True) for index in range(len(splits) + 1)
    ]


@pytest.mark.parametrize(("name", "splits"), todays(itertools.product(CASES, ([4], [1, 2, 7]))))
def test_consecutive_stages_equal_the_model(name, splits):
    case = CASES[name]
    batch = case.batch(0)
    model = case.model()
    full_output = case.forward(model, batch)
    case.loss(full_output, batch)[0].backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    paths = list(dict(model.named_modules()))
    leaves, roots, activation = [], [], None
    for stage in stages_of(model, splits):
        output = stage.forward(case.forward, batch, activation)
        roots.append(output)
        if not stage.is_last:
            activation = Carried(output.slots, tuple(each.detach().requires_grad_() for each in output.tensors))
            leaves.append(activation)
    assert torch.equal(output, full_output)
    case.loss(output, batch)[0].backward()
    for root, leaf in reversed(list(zip(roots, leaves, strict=False))):
        pairs = [(each, got.grad) for each, got in zip(root.tensors, leaf.tensors, strict=True) if each.requires_grad]
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs]) if pairs else None
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-12, atol=1e-14)
    assert list(dict(model.named_modules())) == paths


def test_batches_with_and_without_padding_alternate():
    case = ChainCase("t5")
    model = case.model()
    stages = stages_of(model, [4])
    batch = case.batch(0)
    for row in range(4):
        one = {name: each[row : row + 1] for name, each in batch.items()}
        activation = stages[0].forward(case.forward, one, None)
        output = stages[1].forward(case.forward, one, activation)
        assert torch.equal(output.logits, case.forward(model, one).logits)
    assert {bool(row.all()) for row in batch["attention_mask"][:4]} == {True, False}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_shapes_of_convolutions_are_known_in_another_precision(precision):
    model = ChainCase("whisper").model()
    chain = find_chain(model)
    survey = ValueSurvey(model, chain, [2, 8], Precision.of(Plan.parse(f"precision={precision}")))
    probe = survey.probes[survey.paths.index("model.encoder.conv2")]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    returned = probe.returned((torch.zeros(2, 16, 24, dtype=dtype, device="meta"),), {})
    assert (tuple(returned.value.shape), returned.value.dtype) == ((2, 16, 12), dtype)
    assert {param.dtype for param in model.parameters()} == {torch.float64}


class HeadFirst(nn.Module):
    """Registers its head before the blocks, as some transformers models do."""

    def __init__(self, names_head: bool):
        super().__init__()
        self.lm_head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        if names_head:
            self.get_output_embeddings = lambda: self.lm_head[2]


def test_named_head_is_placed_after_the_blocks():
    assert [site.path for site in find_chain(HeadFirst(True)).after] == ["lm_head"]
    assert [site.path for site in find_chain(HeadFirst(True)).before] == ["embed"]
    assert find_chain(HeadFirst(False)).after == ()


def test_chain_of_a_decoder():
    chain = find_chain(build_decoder(GPT2, device="meta"))
    assert [site.path for site in chain.before] == ["embed", "pos_embed"]
    assert [site.path for site in chain.blocks] == [f"blocks.{index}" for index in range(8)]
    assert [site.path for site in chain.after] == ["norm", "head"]


def test_stage_split_counts_the_head_but_not_embeddings():
    chain = find_chain(build_decoder(TIED, device="meta"))
    assert _cost(chain.before) < 1
    assert _cost(chain.after) == 61 * 16
    assert stage_counts(chain, Plan(pp=4, microbatches=4)) == (2, 2, 2, 2)
    heavy = build_decoder(TIED.__class__(**{**vars_of(TIED), "vocab_size": 4096}), device="meta")
    assert stage_counts(find_chain(heavy), Plan(pp=2, microbatches=4)) == (7, 1)


def vars_of(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_model_without_a_chain_is_rejected():
    with pytest.raises(ModelError) as caught:
        find_chain(nn.Linear(2, 2))
    assert str(caught.value) == (
        "model of type Linear: a pipeline divides a chain of blocks, and it has no repeated modules that are "
        "called. Put the blocks into nn.ModuleList, nn.ModuleDict or nn.Sequential, or use pp=1."
    )


def test_remote_module_has_attributes_but_no_tensors():
    block = nn.Linear(3, 4)
    weight = block.weight
    remote = RemoteModule(without_tensors(block), "blocks.0")
    assert (remote.in_features, remote.weight.device.type, list(remote.parameters())) == (3, "meta", [])
    assert weight.device.type == "cpu"
