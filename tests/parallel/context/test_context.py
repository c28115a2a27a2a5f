"""Context parallelism: generation and copies are unchanged, memory decreases, and misuse is rejected."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.parity.cases import LLAMA
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.partitioning import choose_cp_mode, sent_bytes
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import CommError, ModelError
from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.models.inspect import token_flow
from weft.models.registry import build_decoder
from weft.parallel.context.apply import Context
from weft.parallel.context.attention import PREFIX, refuse_chunks
from weft.parallel.context.context import apply_context, check_sequences, context_of, sequence_in_use, shard_sequence
from weft.parallel.parallelize import parallelize
from weft.train.step.evaluation import evaluate
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.parity import DecoderCase, train_case


def hf_llama(**changes):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=64, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def run_outside_of_steps(text):
    """Return generation and logits of a plain model, of a model under cp after a forward, and of its copy."""
    case = DecoderCase(LLAMA)
    mesh = build_mesh(Plan.parse(text))
    plain, model = case.model(), case.model()
    parallelize(model, mesh)
    batch = case.batch(0)
    with sequence_in_use(model), torch.no_grad():
        model_forward(model, shard_sequence(model, batch))
    found = []
    for one in (plain, model, copy.deepcopy(model)):
        one.eval()
        with torch.no_grad():
            (text,) = generate_batch(one, [Request(0, (1, 2, 3))], Sampling(8, temperature=0), Limits(61, rows=1))
            found.append((list(text.ids), one(batch["input_ids"])))
    return found


def test_model_takes_full_sequences_outside_of_steps(ranks2):
    for (ids, logits), *others in ranks2.run(run_outside_of_steps, "cp=2 cp_mode=ring precision=fp64"):
        for other_ids, other_logits in others:
            assert other_ids == ids
            torch.testing.assert_close(other_logits, logits, rtol=1e-12, atol=1e-12)


def run_hf_outside_of_steps():
    plain, model = hf_llama(), hf_llama()
    before = model.config
    parallelize(model, build_mesh(Plan.parse("cp=2 precision=fp64")))
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = []
    for one in (plain, model, copy.deepcopy(model)):
        one.eval()
        generated = one.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            found.append((generated, one(ids, attention_mask=mask).logits[mask.bool()]))
    return found, before._attn_implementation, model.config._attn_implementation


def test_transformers_generation_is_unchanged(ranks2):
    for found, before, after in ranks2.run(run_hf_outside_of_steps):
        assert (before, after) == ("sdpa", PREFIX + "sdpa")  # the user's config is not modified
        (ids, logits), *others = found
        for other_ids, other_logits in others:
            assert torch.equal(other_ids, ids)
            torch.testing.assert_close(other_logits, logits, rtol=1e-12, atol=1e-12)


def evaluation(text):
    case = DecoderCase(LLAMA, documents=True)
    mesh = build_mesh(Plan.parse(text))
    model = case.model()
    parallelize(model, mesh)
    batches = [case.batch(step) for step in range(2)]
    task = DecoderTask()
    task.config = RunConfig()
    task._text_bytes = SimpleNamespace(of=lambda labels, weights: labels[labels != -100].double().sum())
    return evaluate(model, batches, mesh, task)


def test_evaluation_counts_each_token_once(ranks4):
    expected = evaluation("precision=fp64")
    for found in ranks4.run(evaluation, "cp=4 precision=fp64"):
        assert found.count == expected.count
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.parametrize("mode", ["", pytest.param("cp_mode=ring compile=on", marks=pytest.mark.full)])
def test_auto_mode_and_compiled_blocks_match_one_process(mode, ranks2):
    case = DecoderCase(dataclasses.replace(LLAMA, num_layers=1), num_steps=1)
    expected = train_case("precision=fp64", case)
    found = ranks2.run(train_case, f"cp=2 precision=fp64 {mode}", case)
    assert max(each.largest_difference(expected) for each in found) < 1e-10


def test_bf16_is_close_to_fp32(ranks2):
    case = DecoderCase(LLAMA, num_steps=2)
    expected = train_case("precision=fp32", case).losses
    for mode in ("gather", "ring", "ulysses"):
        for found in ranks2.run(train_case, f"cp=2 cp_mode={mode} precision=bf16", case):
            assert found.losses == pytest.approx(expected, rel=2e-3)


def saved_and_sent_bytes(mode, seq_len):
    """Return the bytes saved for backward and the cp bytes of one forward and backward on this rank."""
    ledger = Ledger()
    size = torch.distributed.get_world_size()
    mesh = build_mesh(Plan(cp=size, cp_mode=mode, precision="fp64"), record=ledger.record)
    model = build_decoder(LLAMA, dtype=torch.float64)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    apply_context(model, mesh)
    full = DecoderCase(LLAMA, seq_len=seq_len, global_batch=2).batch(0)
    saved: dict[int, int] = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with sequence_in_use(model):
        batch = shard_sequence(model, full)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = token_cross_entropy(model_forward(model, batch), batch)
        loss.backward()
    num_bytes = sum(entry.num_bytes for axis, _, entry in ledger.rows() if axis == "cp")
    return sum(size for key, size in saved.items() if key not in parameters), num_bytes


@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
def test_saved_bytes_decrease_with_ranks_and_sent_bytes_match_formula(mode, ranks2, ranks4):
    full, _ = saved_bytes_of_one_process(32)
    for ranks, pool in ((2, ranks2), (4, ranks4)):
        for saved, sent in pool.run(saved_and_sent_bytes, mode, 32):
            # Ulysses saves the output twice, by heads and by tokens, and key-value heads once per rank.
            copied = 16 + 2 * (max(ranks, 2) - 2) * 4 if mode == "ulysses" else 0
            copied_bytes = LLAMA.num_layers * (2 * 32 // ranks) * copied * 8
            # A few bytes, such as the loss, do not depend on the sequence length.
            assert saved == pytest.approx(full / ranks + copied_bytes, abs=64)
            shape = {"cp": ranks, "tokens": 2 * 32 // ranks, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
            formula = sum(
                sent_bytes(mode, **shape, itemsize=8, sum_itemsize=8, backward=backward) for backward in (False, True)
            )
            assert sent == LLAMA.num_layers * formula


def saved_bytes_of_one_process(seq_len):
    """Return the saved bytes of one process without context parallelism."""
    model = build_decoder(LLAMA, dtype=torch.float64)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    batch = DecoderCase(LLAMA, seq_len=seq_len, global_batch=2).batch(0)
    saved: dict[int, int] = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        token_cross_entropy(model_forward(model, batch), batch)
    return sum(size for key, size in saved.items() if key not in parameters), 0


class Free(nn.Module):
    """Neither a Weft nor a transformers model."""

    def forward(self, x):
        return x


class WithoutAttention(nn.Module):
    """Mixes tokens without attention."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states.cumsum(1), None


def misused_model(kind):
    """Return a model that cp does not support."""
    if kind == "free":
        return Free()
    model = hf_llama(attention_dropout=0.1 if kind == "dropout" else 0.0)
    if kind == "heads":
        model.config.num_attention_heads = 3
    elif kind == "layer":
        model.model.layers[1].self_attn = WithoutAttention()
    asked = {"bias": {"position_bias": torch.zeros(4)}, "own mask": {"attention_mask": torch.zeros(8, 4, 8, 8)}}.get(
        kind, {}
    )
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, **asked}), with_kwargs=True
    )
    return model


def misused_batch(kind, batch):
    """Return a batch that cannot be sharded."""
    tokens = 15 if kind == "length" else 16
    changes = {
        "labels": lambda: {"labels": batch["input_ids"]},
        "mask": lambda: {"attention_mask": torch.ones(8, 1, 16, 16)},
        "image": lambda: {"pixel_values": torch.ones(8, 3, 16, 16)},
        "again": lambda: {"document_ids": torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0] * 2]).repeat(8, 1)},
    }
    if kind == "nothing":
        return {"x": torch.ones(3)}
    return {name: tensor[:, :tokens] for name, tensor in batch.items()} | changes.get(kind, dict)()


def misuse(kind):
    """Run one unsupported case, which must raise."""
    mesh = build_mesh(Plan(cp=2, cp_mode="ulysses" if kind in ("heads", "length") else "auto"))
    case = DecoderCase(LLAMA)
    model = misused_model(kind) if kind in MODELS else case.model()
    batch = misused_batch(kind, case.batch(0))
    apply_context(model, mesh, check_sequences(model, mesh))
    with sequence_in_use(model):
        batch = shard_sequence(model, batch)
        if isinstance(model, type(case.model())):
            model_forward(model, batch)
        else:
            model.train()
            model(input_ids=batch["input_ids"])


MODELS = ("free", "heads", "dropout", "bias", "layer", "own mask")
REFUSALS = {
    "free": "cp=2: Free has no repeated blocks between which tokens can be cut. Use cp=1 for this model.",
    "heads": "cp_mode=ulysses: 3 heads and 2 key-value heads cannot be divided over cp=2 and tp=1. "
    "Use cp_mode=ring or cp_mode=gather.",
    "dropout": "cp=2: LlamaAttention drops 0.1 of its attention weights in training, and Weft finds that rate under "
    "none of the usual names. Store it as module.attention_dropout, or set it to 0.",
    "bias": "cp=2: LlamaAttention passes position_bias to its attention, which is not supported for a sharded "
    "sequence. Use cp=1.",
    "layer": "cp=2: model.layers.1 (LlamaDecoderLayer) called no attention, and sequences are sharded only through "
    "attention. Use cp=1 for this model.",
    "own mask": "cp=2: LlamaAttention makes its own attention mask, which is not supported for a sharded sequence. "
    "Use cp=1 for this model.",
    "labels": "labels: they equal input_ids, so the loss would have to shift them, and under cp=2 a token and the "
    "next may be on different ranks. Shift them in the data: labels[t] = input_ids[t + 1].",
    "length": "cp=2: cp_mode=ulysses divides a sequence into 2 equal chunks, and 15 tokens do not divide evenly. "
    "Pad the sequences to a multiple of 2 tokens.",
    "mask": "cp=2: the batch holds a mask of shape (8, 1, 16, 16) over pairs of tokens, which cannot be sharded "
    "along the sequence. Use document_ids, or an attention_mask of shape (batch, sequence).",
    "image": "cp=2: the last two dims of pixel_values (8, 3, 16, 16) both equal the sequence length 16, so it may "
    "be an image or a mask over pairs of tokens. Use cp=1, or another length.",
    "nothing": "cp=2: the batch has no tensor of shape (batch, sequence) to shard. Use cp=1 for this model.",
    "again": "document_ids: document 0 continues after another one has begun, and a sharded sequence needs "
    "contiguous documents. Use another id for each part.",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_misuse_is_rejected(kind, ranks2):
    with pytest.raises(CommError) as caught:
        ranks2.run(misuse, kind)
    assert REFUSALS[kind] in str(caught.value)


def test_chunked_attention_is_rejected_for_longer_sequences():
    context = Context(Plan(cp=2), build_mesh(Plan())["cp"], 4, 2)
    module = nn.Module()
    module.layer_idx = 0
    module.config = SimpleNamespace(attention_chunk_size=8, layer_types=["chunked_attention"])
    refuse_chunks(module, context, 8)
    with pytest.raises(
        ModelError, match=("Module attends within chunks of 8 tokens, which a sharded sequence of 16 does not support")
    ):
        refuse_chunks(module, context, 16)
    module.config.layer_types = ["full_attention"]
    refuse_chunks(module, context, 16)


def test_apply_context_without_cp_changes_nothing():
    model = build_decoder(LLAMA)
    batch = {"input_ids": torch.zeros(1, 3)}
    assert apply_context(model, build_mesh(Plan())) == {}
    assert context_of(model) is None
    assert shard_sequence(model, batch) is batch
    assert choose_cp_mode("auto", 1, 4, 4, 3) == "gather"
    with sequence_in_use(model):
        pass


@pytest.mark.parametrize(
    "change, why",
    [
        ("_supports_attention_backend", "the attention of LlamaForCausalLM cannot be replaced from outside"),
        ("trigram_input", "LlamaForCausalLM reads the embeddings of neighboring tokens together"),
    ],
)
def test_reason_for_gathering_all_tokens_in_attention(change, why):
    model = hf_llama()
    assert token_flow.why_fixed_attention(model) == ""
    if change == "trigram_input":
        model.config.trigram_input = True
    else:
        model._supports_attention_backend = False
    assert token_flow.why_fixed_attention(model).startswith(why)
