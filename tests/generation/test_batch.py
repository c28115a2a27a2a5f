"""Batched generation: each text equals a plain loop without a cache, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.choice import todays
from tools.small_configs import small_config
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ConfigError, ModelError
from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.generation.sampling import choose, uniform
from weft.models.registry import build_decoder
from weft.verify.verifier import Float64Throughout

VOCAB = 40
#: Lengths of prompts: equal ones are computed together, and with 3 rows most join late.
LENGTHS = (3, 11, 7, 7, 1, 19, 5)
GREEDY = Sampling(max_tokens=9, temperature=0)
SAMPLED = Sampling(max_tokens=9, temperature=1.3, top_k=20, top_p=0.9, seed=5)
FAMILIES = ("llama", "gpt2", "gemma2", "gemma3_text", "qwen3_moe", "mamba2", "falcon_h1", "bloom", "opt", "jamba")
MORE = ("mistral", "qwen3_next", "mixtral", "deepseek_v3", "gpt_oss", "lfm2", "mpt", "olmo3", "bamba", "mamba",
        "falcon",
        "gptj", "granitemoehybrid", "gemma3n_text", "kimi_linear", "glm4_moe")  # fmt: skip
SHAPES = {
    "llama": DecoderSpec(family="llama", vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48,
                         max_seq_len=64),
    "gpt2": DecoderSpec(family="gpt2", vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=48,
                        max_seq_len=64),
    "experts": DecoderSpec(family="llama", vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48,
                           max_seq_len=64, num_experts=4, top_k=2, expert_ffn_dim=16),
}  # fmt: skip


def widened(model: Any) -> Any:
    """Return the model in float64 with weights so large that a wrong token would show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.double().parameters():
            if param.ndim > 1:
                param.normal_(std=0.3)
    return model.eval()


def family_model(family: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {family}")
    config = small_config(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    for name, value in changes.items():
        setattr(config, name, value)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    return widened(model)


def some_requests(lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    return [
        Request(key, tuple(torch.randint(0, VOCAB, (length,), generator=draw).tolist()))
        for key, length in enumerate(lengths)
    ]


@torch.no_grad()
def plain(model: Any, request: Request, sampling: Sampling) -> tuple[tuple[int, ...], list[float]]:
    """Continue one prompt token by token, computing the whole text each time."""
    text, log_probs = list(request.prompt_ids), list[float]()
    while len(log_probs) < sampling.max_tokens:
        found = model(torch.tensor([text]), **({} if hasattr(model, "spec") else {"use_cache": False}))
        token, log_prob = choose(getattr(found, "logits", found)[:, -1, :VOCAB], sampling, [request.key], [len(text)])
        text.append(int(token))
        log_probs.append(float(log_prob))
    return tuple(text[len(request.prompt_ids) :]), log_probs


def expect_plain(model: Any, sampling: Sampling, rows: int = 3, tolerance: float = 1e-8) -> None:
    with Float64Throughout():
        requests = some_requests()
        for request, found in zip(
            requests, generate_batch(model, requests, sampling, Limits(VOCAB, rows=rows)), strict=True
        ):
            ids, log_probs = plain(model, request, sampling)
            assert found.ids == ids
            assert found.reason == "length"
            assert found.log_probs == pytest.approx(log_probs, abs=tolerance)


@pytest.mark.parametrize("family", todays(FAMILIES))
def test_texts_of_hugging_face_families_equal_a_plain_loop(family):
    model = family_model(family)
    for sampling in (GREEDY, SAMPLED):
        expect_plain(model, sampling)


@pytest.mark.full
@pytest.mark.parametrize("family", MORE)
def test_texts_of_more_families_equal_a_plain_loop(family):
    model = family_model(family)
    for sampling in (GREEDY, SAMPLED):
        expect_plain(model, sampling)


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_of_weft_decoders_equal_a_plain_loop(shape):
    model = widened(build_decoder(SHAPES[shape], seed=0))
    for sampling in (GREEDY, SAMPLED):
        expect_plain(model, sampling, tolerance=1e-10)


def test_a_sliding_window_shorter_than_the_texts():
    model = family_model("gemma2", sliding_window=4)
    for rows in (2, 7):
        expect_plain(model, GREEDY, rows)


def test_texts_do_not_depend_on_neighbours_or_order():
    model, requests = widened(build_decoder(SHAPES["llama"], seed=0)), some_requests()
    every = generate_batch(model, requests, SAMPLED, Limits(VOCAB, rows=3))
    turned = generate_batch(model, requests[::-1], SAMPLED, Limits(VOCAB, rows=5))
    alone = [generate_batch(model, [one], SAMPLED, Limits(VOCAB))[0] for one in requests]
    assert [one.ids for one in every] == [one.ids for one in turned[::-1]] == [one.ids for one in alone]
    other = generate_batch(model, [Request(key + 100, one.prompt_ids) for key, one in enumerate(requests)], SAMPLED,
                           Limits(VOCAB))  # fmt: skip
    assert [one.ids for one in other] != [one.ids for one in every]


def test_texts_end_at_stop_ids_at_ends_and_at_the_context():
    model, requests = widened(build_decoder(SHAPES["llama"], seed=0)), some_requests()
    long = Sampling(max_tokens=10**9, temperature=0)
    whole = generate_batch(model, requests, long, Limits(VOCAB, max_positions=30))
    assert [len(one.ids) for one in whole] == [30 - length for length in LENGTHS]
    stop = whole[0].ids[4]
    ended = generate_batch(
        model, requests, Sampling(10**9, temperature=0, stop_ids=frozenset({stop})), Limits(VOCAB, 30)
    )
    for found, free in zip(ended, whole, strict=True):
        end = free.ids.index(stop) + 1 if stop in free.ids else None
        assert found.ids == free.ids[:end]
        assert found.reason == ("stop" if end else "length")
    two = generate_batch(model, requests, long, Limits(VOCAB, 30), ends=lambda ids: len(ids) == 2)
    assert all(one.ids == free.ids[:2] and one.reason == "stop" for one, free in zip(two, whole, strict=True))


def test_a_request_that_cannot_be_continued_is_refused_alone():
    model = widened(build_decoder(SHAPES["llama"], seed=0))
    requests = [Request(0, ()), Request(1, (3, 99)), Request(2, tuple(range(30))), Request(3, (1, 2))]
    found = generate_batch(model, requests, GREEDY, Limits(VOCAB, 30))
    assert [one.reason for one in found] == ["refused", "refused", "refused", "length"]
    assert found[0].error == "the prompt has no tokens. Give at least one."
    assert found[1].error == "prompt id 99: the model's vocabulary has 40 entries. Use ids from 0 to 39."
    assert found[2].error == "the prompt has 30 tokens, and the model reads at most 30. Give a shorter prompt."
    with pytest.raises(ConfigError, match="request 3: another request has this key"):
        generate_batch(model, [Request(3, (1,)), Request(3, (2,))], GREEDY, Limits(VOCAB))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 0}, "max_tokens=0: it must be at least 1"),
        ({"temperature": math.nan}, "temperature=nan: it must be 0 or a positive number"),
        ({"temperature": math.inf}, "temperature=inf: it must be 0 or a positive number"),
        ({"temperature": -1.0}, "temperature=-1.0: it must be 0"),
        ({"top_k": 0}, "top_k=0: it must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: it must be more than 0"),
        ({"top_p": math.nan}, "top_p=nan: it must be more than 0"),
    ],
)
def test_settings_out_of_range(changes, text):
    with pytest.raises(ConfigError, match=text):
        Sampling(**changes)


def test_a_model_that_ignores_its_cache_is_refused():
    model = family_model("llama")
    forward = model.forward

    def without_mask(input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

    def with_cache(input_ids=None, attention_mask=None, position_ids=None, cache=None, past_key_values=None,
                   use_cache=None, logits_to_keep=0):  # fmt: skip
        held = {"cache": cache} if cache is not None else {}
        return without_mask(input_ids, attention_mask, position_ids, use_cache=use_cache, **held)

    model.forward = with_cache
    with pytest.raises(ModelError, match="with a cache of two texts its logits differ"):
        generate_batch(model, some_requests(), GREEDY, Limits(VOCAB))


def test_chunked_attention_and_caches_of_other_kinds_are_refused():
    with pytest.raises(ModelError, match="its layers attend within chunks"):
        generate_batch(family_model("llama4_text"), some_requests(), GREEDY, Limits(VOCAB))
    with pytest.raises(ModelError, match="its forward takes no cache"):
        generate_batch(family_model("rwkv"), some_requests(), GREEDY, Limits(VOCAB))


def test_sampled_ids_have_the_models_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]], dtype=torch.float64).expand(20_000, -1)
    keys = list(range(20_000))
    ids, log_probs = choose(logits, Sampling(temperature=2.0), keys, [7] * 20_000)
    wanted = (logits[0] / 2).softmax(-1)
    shares = torch.bincount(ids, minlength=5) / 20_000
    assert (shares - wanted).abs().max() < 4 * (0.25 / 20_000) ** 0.5
    assert torch.equal(log_probs, wanted.log()[ids]) or torch.allclose(log_probs, wanted.log()[ids], atol=1e-12)
    ids, _ = choose(logits, Sampling(temperature=2.0, top_p=0.7), keys, [7] * 20_000)
    assert set(ids.tolist()) == {0, 1}  # 0.45 and 0.27 reach 0.7
    ids, _ = choose(logits, Sampling(temperature=2.0, top_k=3), keys, [7] * 20_000)
    assert set(ids.tolist()) == {0, 1, 2}


def test_random_numbers_depend_on_each_argument():
    numbers = {uniform(seed, key, position) for seed in range(5) for key in range(50) for position in range(50)}
    assert len(numbers) == 5 * 50 * 50
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 3, 2)


def test_completions_of_one_prompt_share_its_forward():
    model, calls = widened(build_decoder(SHAPES["llama"], seed=0)), list[tuple[int, ...]]()
    model.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    prompt, other = (3, 1, 4, 1), (2, 7, 1, 8)
    requests = [Request(key, prompt if key % 2 else other) for key in range(6)]
    found = generate_batch(model, requests, SAMPLED, Limits(VOCAB), check=False)
    assert calls == [(2, 4), *[(6, 1)] * 8]
    assert len({one.ids for one in found}) == 6
    for request, one in zip(requests, found, strict=True):
        assert one.ids == generate_batch(model, [request], SAMPLED, Limits(VOCAB), check=False)[0].ids


def test_routers_with_a_capacity_and_nan_are_refused():
    spec = dataclasses.replace(SHAPES["experts"], capacity_factor=1.0)
    with pytest.raises(ModelError, match=r"capacity_factor=1\.0: its routers drop tokens"):
        generate_batch(build_decoder(spec, seed=0).eval(), some_requests(), GREEDY, Limits(VOCAB))
    model = widened(build_decoder(SHAPES["llama"], seed=0))
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(ModelError, match="its logits are nan"):
        generate_batch(model, some_requests(), GREEDY, Limits(VOCAB), check=False)
    with pytest.raises(ModelError, match="differ"):
        generate_batch(model, some_requests(), GREEDY, Limits(VOCAB))
