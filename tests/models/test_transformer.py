"""B sequences, T tokens, V vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from weft.errors import ModelError
from weft.models.attention import takes_groups
from weft.models.decoder import Decoder
from weft.models.kv_cache import Cache
from weft.models.registry import build_decoder

from .reference import gpt2_pair, llama_pair


def random_ids(spec, *shape, seed=3):
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


LLAMAS = {
    "grouped": {},
    "one kv head": {"num_kv_heads": 1},
    "ungrouped, tied": {"num_kv_heads": 4, "tied": True},
    "other theta and eps": {"rope_theta": 500.0, "norm_eps": 1e-3},
    "stretched": {"rope_theta": 500_000.0, "rope_scale": 8.0, "dim": 64, "num_heads": 2},
}


@pytest.mark.parametrize("changes", LLAMAS.values(), ids=LLAMAS.keys())
def test_llama_family_matches_transformers(make_spec, changes):
    spec = make_spec("llama", **changes)
    theirs, ours = llama_pair(spec)
    ids_BT = random_ids(spec, 3, 17)
    expected_BTV = theirs(input_ids=ids_BT).logits.detach()
    assert_same(ours(ids_BT), expected_BTV)
    assert expected_BTV.std() > 0.1  # not all near 0, so equality is meaningful
    positions_BT = torch.arange(17).expand(3, 17) + torch.tensor([[0], [5], [21]])
    assert_same(ours(ids_BT, positions_BT), theirs(input_ids=ids_BT, position_ids=positions_BT).logits.detach())


def test_rotary_scaling_at_far_positions_matches_transformers(make_spec):
    spec = make_spec("llama", rope_theta=500_000.0, rope_scale=8.0, dim=64, num_heads=2, max_seq_len=131_072)
    theirs, ours = llama_pair(spec)
    ids_BT = random_ids(spec, 1, 6)
    positions_BT = torch.tensor([[0, 1, 900, 8_191, 40_000, 131_071]])
    assert_same(ours(ids_BT, positions_BT), theirs(input_ids=ids_BT, position_ids=positions_BT).logits.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_family_matches_transformers(make_spec, tied):
    spec = make_spec("gpt2", tied=tied)
    theirs, ours = gpt2_pair(spec)
    ids_BT = random_ids(spec, 3, 17)
    expected_BTV = theirs(input_ids=ids_BT).logits.detach()
    assert_same(ours(ids_BT), expected_BTV)
    assert expected_BTV.std() > 0.1


def test_gradients_match_transformers(make_spec):
    spec = make_spec("llama", tied=True)
    theirs, ours = llama_pair(spec)
    ids_BT = random_ids(spec, 2, 9)
    for model, logits_BTV in ((ours, ours(ids_BT)), (theirs, theirs(input_ids=ids_BT).logits)):
        model.zero_grad()
        F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "blocks.1.attn.k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blocks.0.mlp.gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blocks.2.norm1.weight": "model.layers.2.input_layernorm.weight",
    }
    for our_name, their_name in pairs.items():
        assert_same(ours.get_parameter(our_name).grad, theirs.get_parameter(their_name).grad)


def randomized(spec):
    """Return a float64 model with random biases and norms."""
    model = build_decoder(spec, dtype=torch.float64)
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=dice, dtype=parameter.dtype), alpha=0.2)
    return model


def test_packed_documents_get_their_unpacked_logits(spec):
    model = randomized(spec)
    first, second, third = random_ids(spec, 1, 7), random_ids(spec, 1, 9, seed=4), random_ids(spec, 1, 16, seed=5)
    packed_BT = torch.cat([torch.cat([first, second], 1), third])
    positions_BT = torch.stack([torch.cat([torch.arange(7), torch.arange(9)]), torch.arange(16)])
    documents_BT = torch.tensor([[0] * 7 + [1] * 9, [0] * 16])
    logits_BTV = model(packed_BT, positions_BT, documents_BT)
    assert_same(logits_BTV[:1, :7], model(first))
    assert_same(logits_BTV[:1, 7:], model(second))
    assert_same(logits_BTV[1:], model(third))
    borderless_BTV = model(packed_BT, positions_BT)
    assert (borderless_BTV[:1, 7:] - model(second)).abs().max() > 1e-3


def test_separated_parts_of_one_document_attend_to_each_other(spec):
    model = randomized(spec)
    ids_BT = random_ids(spec, 1, 6)
    positions_BT = torch.arange(6)[None]
    split_BTV = model(ids_BT, positions_BT, torch.tensor([[0, 0, 7, 7, 0, 0]]))
    ids_BT[0, 0] = (ids_BT[0, 0] + 1) % spec.vocab_size
    changed_BTV = model(ids_BT, positions_BT, torch.tensor([[0, 0, 7, 7, 0, 0]]))
    moved_T = (split_BTV - changed_BTV).abs().amax(-1)[0] > 1e-9
    assert moved_T.tolist() == [True, True, False, False, True, True]


def test_one_document_with_ids_equals_none(spec):
    model = randomized(spec)
    ids_BT = random_ids(spec, 2, 8)
    assert_same(model(ids_BT, document_ids_BT=torch.zeros_like(ids_BT)), model(ids_BT))


def test_no_token_attends_to_a_later_one(spec):
    model = randomized(spec)
    ids_BT = random_ids(spec, 1, 10)
    before_BTV = model(ids_BT)
    ids_BT[0, 6] = (ids_BT[0, 6] + 1) % spec.vocab_size
    moved_T = (model(ids_BT) - before_BTV).abs().amax(-1)[0] > 1e-9
    assert moved_T.tolist() == [False] * 6 + [True] * 4


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6], [12]])
def test_cache_gives_the_logits_of_one_pass(spec, pieces):
    model = randomized(spec)
    ids_BT = random_ids(spec, 2, 12)
    cache = Cache(spec.num_layers, 12)
    parts = [model(part_BT, cache=cache) for part_BT in ids_BT.split(pieces, 1)]
    assert_same(torch.cat(parts, 1), model(ids_BT))
    assert cache.num_tokens == 12
    with pytest.raises(ModelError, match=r"^cache of 12 tokens: it holds 12, and 1 more do not fit. Make one for 13"):
        model(ids_BT[:, :1], cache=cache)


def test_cache_rejects_documents(spec):
    ids_BT = random_ids(spec, 1, 4)
    with pytest.raises(ModelError, match=r"^document_ids with a cache"):
        build_decoder(spec)(ids_BT, document_ids_BT=ids_BT, cache=Cache(spec.num_layers, 4))


def test_sequence_longer_than_the_position_table_is_rejected(make_spec):
    model = build_decoder(make_spec("gpt2"))
    with pytest.raises(ModelError, match=r"^sequence of 41 tokens: the model has a table of 40 positions. Use at most"):
        model(torch.zeros(1, 41, dtype=torch.long))
    assert build_decoder(make_spec("llama"))(torch.zeros(1, 41, dtype=torch.long)).shape == (1, 41, 61)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", [False, True])
def test_autocast_is_finite_and_close(spec, dtype, documents):
    model = build_decoder(spec)
    ids_BT = random_ids(spec, 2, 16)
    documents_BT = torch.tensor([[0] * 5 + [1] * 11] * 2) if documents else None
    with torch.autocast("cpu", dtype):
        logits_BTV = model(ids_BT, None, documents_BT)
    F.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT.flatten()).backward()
    assert logits_BTV.dtype == dtype
    torch.testing.assert_close(logits_BTV.float(), model(ids_BT, None, documents_BT), rtol=0.05, atol=0.05)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_may_have_any_floating_dtype(spec, dtype):
    model = build_decoder(spec, dtype=dtype)
    ids_BT = random_ids(spec, 2, 16)
    documents_BT = torch.tensor([[0] * 5 + [1] * 11] * 2)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for logits_BTV in (model(ids_BT), model(ids_BT, None, documents_BT)):
        assert logits_BTV.dtype == dtype
        assert logits_BTV.isfinite().all()


def test_module_paths_match_the_documented_ones(make_spec):
    llama = build_decoder(make_spec("llama", num_layers=1), device="meta")
    block = ["norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "mlp.gate", "mlp.up", "mlp.down"]
    expected = ["embed", *(f"blocks.0.{name}" for name in block), "norm", "head"]
    assert [name for name, _ in llama.named_parameters()] == [f"{path}.weight" for path in expected]
    gpt2 = build_decoder(make_spec("gpt2", num_layers=1), device="meta")
    block.remove("mlp.gate")
    expected = ["embed", "pos_embed", *(f"blocks.0.{name}" for name in block), "norm", "head"]
    assert list(dict.fromkeys(name.rpartition(".")[0] for name, _ in gpt2.named_parameters())) == expected
    assert {name for name, _ in gpt2.named_buffers()} | {name for name, _ in llama.named_buffers()} == set()


@pytest.mark.parametrize("move", [lambda m: m.to_empty(device="cpu"), lambda m: m.double(), lambda m: m.to("meta")])
def test_tied_pair_stays_tied_when_the_model_is_moved(make_spec, move):
    model = build_decoder(make_spec(tied=True), device="meta")
    move(model)
    assert model.head.weight is model.embed.weight
    untied = build_decoder(make_spec(tied=False))
    assert untied.head.weight is not untied.embed.weight


def test_attention_core_can_be_replaced(make_spec):
    spec = make_spec("llama")
    model = build_decoder(spec, dtype=torch.float64)
    ids_BT = random_ids(spec, 2, 8)
    expected_BTV = model(ids_BT)
    seen = []

    class Plain(torch.nn.Module):
        def forward(self, q, k, v, visible):
            seen.append(visible.positions_BT.shape)
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            later = torch.ones(scores.shape[-2:]).triu(1).bool()
            return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    for block in model.blocks:
        block.attn.core = Plain()
    assert_same(model(ids_BT), expected_BTV)
    assert len(seen) == spec.num_layers


@pytest.mark.parametrize(("device", "dtype", "has_mask", "fused"), [
    ("cpu", torch.float32, True, True),
    ("cuda", torch.bfloat16, False, True),
    ("cuda", torch.bfloat16, True, False),
    ("cuda", torch.float32, False, False),
])  # fmt: skip
def test_fused_kernel_support_for_grouped_heads(device, dtype, has_mask, fused):
    assert takes_groups(device, dtype, has_mask) is fused


@pytest.mark.parametrize("documents", [False, True])
def test_repeated_heads_match_the_grouped_kernel(make_spec, monkeypatch, documents):
    model = randomized(make_spec("llama"))
    ids_BT = random_ids(model.spec, 2, 8)
    documents_BT = torch.tensor([[0] * 3 + [1] * 5] * 2) if documents else None
    grouped_BTV = model(ids_BT, None, documents_BT)
    monkeypatch.setattr("weft.models.attention.takes_groups", lambda *_: False)
    assert_same(model(ids_BT, None, documents_BT), grouped_BTV)


def test_attention_works_with_a_subset_of_heads(make_spec):
    """Required by tensor parallelism: outputs of both halves of the heads sum to the full output."""
    model = build_decoder(make_spec("llama"), dtype=torch.float64)
    attention, block_input = model.blocks[0].attn, {}
    model.blocks[0].attn.register_forward_pre_hook(lambda _, args: block_input.update(args=args))
    ids_BT = random_ids(model.spec, 2, 8)
    model(ids_BT)
    whole = attention(*block_input["args"])
    halves = []
    for half in range(2):
        part = build_decoder(make_spec("llama"), dtype=torch.float64).blocks[0].attn
        for name in "qkv":
            getattr(part, name).weight = torch.nn.Parameter(getattr(attention, name).weight.chunk(2)[half])
        part.o.weight = torch.nn.Parameter(attention.o.weight.chunk(2, 1)[half])
        halves.append(part(*block_input["args"]))
    assert_same(halves[0] + halves[1], whole)


def test_compiled_block_matches_eager(make_spec):
    spec = make_spec("llama", num_layers=2)
    model = build_decoder(spec)
    ids_BT = random_ids(spec, 2, 8)
    expected_BTV = model(ids_BT)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ids_BT), expected_BTV, rtol=1e-5, atol=1e-6)
    model(ids_BT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_full_model_compiles_to_one_graph(make_spec):
    spec = make_spec("llama", num_layers=1)
    model = build_decoder(spec)
    ids_BT, documents_BT = random_ids(spec, 2, 8), torch.tensor([[0] * 3 + [1] * 5] * 2)
    expected_BTV = model(ids_BT, None, documents_BT)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids_BT, None, documents_BT), expected_BTV)


def test_rotary_tables_are_computed_once_per_forward(make_spec, monkeypatch):
    calls = []
    real = torch.Tensor.cos
    monkeypatch.setattr(torch.Tensor, "cos", lambda self: calls.append(1) or real(self))
    build_decoder(make_spec("llama"))(torch.zeros(1, 4, dtype=torch.long))
    assert len(calls) == 1


def test_decoder_can_be_built_without_the_registry(make_spec):
    spec = replace(make_spec("llama"), num_layers=1)
    assert Decoder(spec)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, spec.vocab_size)
