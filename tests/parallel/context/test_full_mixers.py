"""Models whose attention gathers all tokens under cp match one process, including dropout and padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.parallel.context.context import check_sequences
from weft.parallel.context.full_mixers import FullSequenceMixers
from weft.train.batches.microbatches import call_model
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.verify.parity import DecoderCase, train_case

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "alibi": (
        "BloomForCausalLM",
        {"hidden_size": 16, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.2, "attention_dropout": 0.1},
    ),
    "fourier": ("FNetForMaskedLM", {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}),
    "two sequences": (
        "BartForConditionalGeneration",
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.2,
         "attention_dropout": 0.1},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ForeignCase(DecoderCase):
    """A padded transformers family. In encoder-decoder models, the second sequence is shorter."""

    family: str = "alibi"

    def model(self):
        import transformers

        torch.manual_seed(0)
        name, sizes = FAMILIES[self.family]
        kind = getattr(transformers, name)
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        return kind(kind.config_class(vocab_size=self.spec.vocab_size, **tokens, **sizes)).double()

    def batch(self, step):
        found = super().batch(step)
        batch = {name: found[name] for name in ("input_ids", "labels")}
        if self.family == "fourier":
            return batch
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][::2, -5:] = 0
        if self.family == "two sequences":
            batch["decoder_input_ids"], batch["labels"] = batch["input_ids"][:, :8], batch["labels"][:, :8]
        return batch

    def forward(self, model, batch):
        return call_model(model, batch).logits

    def loss(self, output, batch):
        return token_cross_entropy(output, batch)


def train_each(plan):
    found = {}
    for family in FAMILIES:
        with pytest.warns(WeftWarning) if plan.startswith("cp") and torch.distributed.get_rank() == 0 else _quiet():
            found[family] = train_case(plan, ForeignCase(LLAMA, num_steps=2, family=family, optimizer="sgd"))
    return found


def _quiet():
    import contextlib

    return contextlib.nullcontext()


def _check(found, family):
    case = ForeignCase(LLAMA, num_steps=2, family=family, optimizer="sgd")
    expected = train_case("precision=fp64", case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, grad in expected.grads.items():
        scale = max(1e-9, float(grad.abs().max()))
        assert float((found.grads[name] - grad).abs().max()) / scale < 1e-10, name


def test_full_mixers_match_one_process(ranks2):
    found = ranks2.run(train_each, "cp=2 precision=fp64")[0]
    for family in FAMILIES:
        _check(found[family], family)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["cp=2 tp=2", "cp=2 dp_shard=2 zero=3 recompute=full", "cp=4"])
def test_full_mixers_with_other_axes_match_one_process(plan, ranks4):
    for family, result in ranks4.run(train_each, f"{plan} precision=fp64")[0].items():
        _check(result, family)


def test_two_chains_under_sp_match_one_process(ranks2):
    case = ForeignCase(LLAMA, num_steps=2, family="two sequences", optimizer="sgd")
    _check(ranks2.run(train_case, "tp=2 sp=on precision=fp64", case)[0], "two sequences")


@pytest.mark.full
def test_full_mixers_in_a_pipeline_match_one_process(ranks4):
    case = ForeignCase(LLAMA, num_steps=2, optimizer="sgd")
    _check(ranks4.run(train_case, "cp=2 pp=2 microbatches=2 precision=fp64", case)[0], "alibi")


def test_unsupported_models_and_batches_are_rejected():
    import transformers

    mesh = build_mesh(Plan())
    context = FullSequenceMixers(Plan(cp=2), dataclasses.replace(mesh["cp"], size=2), (), ())
    with pytest.raises(ModelError, match=("cp=2: a sequence is divided into 2 equal chunks of at least 2 tokens, and")):
        context.order(2)
    with pytest.raises(ModelError, match=r"the batch has no tokens to shard \(it has pixel_values\). Use cp"):
        context.shard({"pixel_values": torch.zeros(2, 3, 4, 4)})
    config = transformers.XLMConfig(vocab_size=61, emb_dim=16, n_layers=2, n_heads=4)
    with pytest.raises(
        ModelError, match=r"only between blocks with attention inside; its lists without are transformer\.att"
    ):
        check_sequences(transformers.XLMWithLMHeadModel(config), _Mesh(Plan(cp=2), context.axis))
    config.n_layers = 1
    for field in ("sp", "compile"):
        plan = Plan(cp=2, tp=2, sp=True) if field == "sp" else Plan(cp=2, compile=True)
        with pytest.raises(ModelError, match=f"cp=2 {field}=on: the attention of XLM.*Use {field}=off or cp=1"):
            check_sequences(transformers.XLMWithLMHeadModel(config), _Mesh(plan, context.axis))


class _Mesh(dict):
    """The parts of a mesh that `check_sequences` reads."""

    def __init__(self, plan, axis):
        super().__init__(cp=axis)
        self.plan = plan
