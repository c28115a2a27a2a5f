"""A model cut into stages is the model: all stages in one process, one after another, and back."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.parity.pipeline_cases import GPT2, TIED, FamilyCase, FrozenCase, SequentialCase
from weft.errors import ModelError
from weft.models import build_decoder
from weft.parallel.pipeline.absent import Absent, Flow, without_tensors
from weft.parallel.pipeline.carried import Carried
from weft.parallel.pipeline.split import _cost, stage_counts
from weft.parallel.pipeline.stage import Stage
from weft.spec.plan import Plan
from weft.structure import find_chain
from weft.testing import DecoderCase

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
    borders = [0, *cuts, len(chain.blocks)]
    return [
        Stage(model, chain, index, first, stop, takes_gradient=index > 0, trains=True)
        for index, (first, stop) in enumerate(itertools.pairwise(borders))
    ]


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
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(2, 2)])
            self.decoder = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(ModelError) as caught:
        find_chain(Two())
    assert str(caught.value) == (
        "model of type Two: a pipeline cuts one chain of blocks, and it has 2 lists of blocks (decoder, encoder). "
        "Put the blocks into one nn.ModuleList or nn.Sequential, or use pp=1."
    )
    with pytest.raises(ModelError, match="it has no list of blocks"):
        find_chain(nn.Linear(2, 2))


def test_a_parameter_in_no_module_of_a_stage_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(ModelError, match="parameter 'scale': it lies beside the chain of blocks"):
        find_chain(Scaled())


class Late(nn.Module):
    """Its norm is registered before the blocks, and runs after them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_a_module_that_runs_where_it_is_not_held_is_an_error():
    first, last = stages_of(Late(), [1])
    middle = first.forward(lambda model, x: model(x), torch.ones(1, 3), None)
    with pytest.raises(ModelError) as caught:
        last.forward(lambda model, x: model(x), torch.ones(1, 3), middle)
    assert str(caught.value) == (
        "module 'norm': this stage of the pipeline runs it, but another one holds it. Blocks must run one after "
        "another, and modules beside them wholly before or after. Register those that run after the blocks behind "
        "them, or use pp=1."
    )


class Around(nn.Module):
    """Residuals outside of the blocks, or an embedding that is added again behind them."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.embed = kind, nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) if self.kind == "residual" else block(x)
        return self.head(x + first if self.kind == "skip" else x)


@pytest.mark.parametrize("with_gradient", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", ["residual", "skip", "plain"])
def test_what_goes_around_the_blocks_is_refused_by_the_stage_that_lacks_it(kind, with_gradient):
    """It computed other numbers without a word before."""
    model, batch = Around(kind), torch.randn(3, 4)
    wrong, activation = {"residual": [1, 2], "skip": [2], "plain": []}, None
    for stage in stages_of(model, [1, 2]):
        with pytest.raises(ModelError, match="outside of them") if stage.index in wrong[kind] else nullcontext():
            with torch.set_grad_enabled(with_gradient):
                output = stage.forward(lambda model, x: model(x), batch, activation)
            given = output if stage.is_last else output.tensors[0]
            assert given.requires_grad == with_gradient
            activation = Carried.one(given.detach().requires_grad_())
        if stage.index in wrong[kind]:
            activation = Carried.one(torch.randn(3, 4, requires_grad=True))
    if kind == "plain":
        assert torch.equal(activation.tensors[0], model(batch))


def test_a_stand_in_has_no_tensors_and_all_attributes():
    block = nn.Linear(3, 4)
    weight = block.weight
    absent = Absent(without_tensors(block), "blocks.0", Flow())
    assert (absent.in_features, absent.weight.device.type, list(absent.parameters())) == (3, "meta", [])
    assert weight.device.type == "cpu"
