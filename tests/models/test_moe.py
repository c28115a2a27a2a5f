"""Expert layer: compared with Hugging Face and a reference loop, and under recompute, compile and evaluation."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.models.reference import llama_weights
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.experts import MoE, routers
from weft.models.registry import build_decoder

SPEC = DecoderSpec(
    vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32,
    num_experts=6, top_k=2, balance="none",
)  # fmt: skip


def layer(spec, seed=0):
    moe = build_decoder(spec, dtype=torch.float64, seed=seed).blocks[-1].mlp
    assert isinstance(moe, MoE)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return moe


def tokens(seed=1, num_sequences=3, num_tokens=8):
    shape = (num_sequences, num_tokens, SPEC.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_output(moe, x_D):
    """Compute one token of the layer, expert by expert."""
    spec = moe.router.spec
    logits = moe.router.weight @ x_D
    scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
    bias = 0.0 if moe.router.bias_ppm is None else moe.router.bias_ppm * 1e-6
    chosen = (scores + bias).topk(spec.top_k).indices
    shares = scores[chosen] / (scores[chosen].sum() if spec.normalise_top_k else 1) * spec.route_scale
    out = moe.shared(x_D) if moe.shared is not None else torch.zeros_like(x_D)
    for expert, share in zip(chosen, shares, strict=True):
        gate, up = (moe.experts.gate_up[expert] @ x_D).chunk(2)
        out = out + share * (moe.experts.down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("changes", [
    {}, {"router": "sigmoid", "balance": "bias", "route_scale": 2.5, "top_k": 3}, {"normalise_top_k": False},
    {"num_shared_experts": 2, "expert_ffn_dim": 5}, {"top_k": 6}, {"top_k": 1, "router": "sigmoid"},
])  # fmt: skip
def test_each_token_gets_the_weighted_sum_of_its_experts(changes):
    moe = layer(replace(SPEC, **changes))
    if moe.router.bias_ppm is not None:
        moe.router.bias_ppm.copy_(torch.arange(6) * 300_000)
    x = tokens()
    out = moe(x)
    for index in ((0, 0), (2, 7), (1, 3)):
        torch.testing.assert_close(out[index], reference_output(moe, x[index]), rtol=1e-12, atol=1e-12)


def test_bias_affects_selection_but_not_weights():
    moe = layer(replace(SPEC, balance="bias", top_k=1, normalise_top_k=False))
    moe.router.bias_ppm[4] = 10_000_000
    routing = moe.router(tokens())
    assert routing.ids_BTK.unique().tolist() == [4]
    scores = F.linear(tokens(), moe.router.weight).softmax(-1)
    torch.testing.assert_close(routing.weights_BTK[..., 0], scores[..., 4])


def test_dropped_token_skips_its_expert_and_keeps_the_shared_one():
    moe = layer(replace(SPEC, capacity_factor=0.01, num_shared_experts=1, top_k=1))  # one token per expert
    same = tokens(num_sequences=1, num_tokens=1).expand(2, 5, -1).contiguous()
    out = moe(same)
    torch.testing.assert_close(out[0, 0], reference_output(moe, same[0, 0]))
    torch.testing.assert_close(out[0, 1:], moe.shared(same[0, 1:]))
    torch.testing.assert_close(out[1], out[0])  # each sequence has its own capacity


def test_output_does_not_depend_on_other_sequences():
    moe = layer(replace(SPEC, capacity_factor=0.8))
    x = tokens()
    alone = torch.cat([moe(sequence[None]) for sequence in x])
    torch.testing.assert_close(moe(x), alone, rtol=1e-13, atol=1e-13)


def test_evaluation_counts_no_load():
    moe = layer(replace(SPEC, balance="aux_loss"))
    moe.eval()
    moe(tokens()).sum().backward()
    moe.train()
    with torch.no_grad():
        moe(tokens())
    assert moe.router.load.tokens_E is None


def test_default_auxiliary_loss_averages_over_the_tokens_of_the_call():
    moe = layer(replace(SPEC, balance="aux_loss", balance_rate=0.5))
    grads = []
    for repeats in (1, 3):
        moe.zero_grad()
        (moe(tokens().repeat(repeats, 1, 1)) * 0.0).sum().backward()
        grads.append(moe.router.weight.grad.clone())
    assert grads[0].abs().max() > 1e-4
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("recompute", ["full", "selective", "50%"])
def test_recompute_counts_and_balances_once(recompute):
    from weft.config.plan import Plan
    from weft.memory.recompute import apply_recompute

    plain = build_decoder(replace(SPEC, balance="bias", num_shared_experts=1), dtype=torch.float64)
    other = copy.deepcopy(plain)
    apply_recompute(other, Plan.parse(f"recompute={recompute}"))
    ids = torch.arange(24).view(2, 12)
    for model in (plain, other):
        model(ids).square().sum().backward()
    for one, two in zip(routers(plain), routers(other), strict=True):
        assert one.load.tokens_E.tolist() == two.load.tokens_E.tolist()
        assert int(one.load.tokens_E.sum()) == 2 * 12 * 2
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)


def test_dtypes_change_neither_bias_nor_the_float32_router():
    model = build_decoder(replace(SPEC, balance="bias"), dtype=torch.bfloat16)
    router = next(routers(model))
    router.bias_ppm.fill_(1)
    assert model.to(torch.float16).blocks[0].mlp.router.bias_ppm.tolist() == [1] * 6
    routing = router(tokens().to(torch.float16))
    assert routing.weights_BTK.dtype == torch.float32


def test_compiled_block_breaks_at_experts_and_gives_equal_results():
    model = build_decoder(SPEC)
    ids = torch.arange(16).view(2, 8)
    plain = model(ids)
    for block in model.blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(model(ids), plain)


def test_meta_models_start_without_bias():
    model = build_decoder(replace(SPEC, balance="bias"), seed=3)
    assert all(not router.bias_ppm.any() for router in routers(model))
    experts = model.blocks[0].mlp.experts
    assert float(experts.gate_up.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(experts.down.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)  # two layers, two branches each


def test_outputs_and_gradients_match_mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=SPEC.vocab_size, hidden_size=SPEC.dim, intermediate_size=SPEC.ffn_dim, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=SPEC.norm_eps,
        num_local_experts=6, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False,
        rope_parameters={"rope_theta": SPEC.rope_theta, "rope_type": "default"}, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(config).double()
    theirs.set_experts_implementation("eager")
    state = theirs.state_dict()
    weights = llama_weights(state, 2, {"input_layernorm", "post_attention_layernorm", "self_attn"})
    names = {
        "gate.weight": "router.weight",
        "experts.gate_up_proj": "experts.gate_up",
        "experts.down_proj": "experts.down",
    }
    for index in range(2):
        weights |= {
            f"blocks.{index}.mlp.{our}": state[f"model.layers.{index}.mlp.{their}"] for their, our in names.items()
        }
    ours = build_decoder(SPEC, dtype=torch.float64)
    ours.load_state_dict(weights)
    ids = torch.arange(40).view(2, 20)
    logits, expected = ours(ids), theirs(input_ids=ids, use_cache=False).logits
    # transformers' norms and router compute in float32.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for index in range(2):
        for their, our in names.items():
            one = ours.get_parameter(f"blocks.{index}.mlp.{our}").grad
            other = theirs.get_parameter(f"model.layers.{index}.mlp.{their}").grad
            assert float((one - other).abs().max()) < 1e-4 * float(other.abs().max()), (index, our)
