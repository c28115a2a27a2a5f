from __future__ import annotations

import pytest
import torch

from weft.errors import ModelError
from weft.models.registry import build_decoder
from weft.models.sampling import generate


@pytest.fixture
def model(spec):
    decoder = build_decoder(spec, dtype=torch.float64)
    with torch.no_grad():
        decoder.head.weight.mul_(20)  # otherwise all tokens are about equally likely
    return decoder


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"top_k": 1000, "seed": 9},
])  # fmt: skip
def test_sampling_with_cache_equals_sampling_without(model, options):
    prompt = [3, 1, 4, 1, 5]
    cached = generate(model, prompt, max_tokens=30, **options)
    assert cached == generate(model, prompt, max_tokens=30, use_cache=False, **options)
    assert len(cached) == 30
    assert all(0 <= token < 61 for token in cached)


def test_cache_computes_only_new_tokens(model):
    widths = []
    model.embed.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, [1, 2, 3], max_tokens=4)
    assert widths == [3, 1, 1, 1]


def test_seed_determines_text_and_torch_generator_is_unchanged(model):
    state = torch.get_rng_state()
    texts = [generate(model, [1], max_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_temperature_zero_is_greedy(model):
    text = [7, 8]
    for _ in range(5):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert generate(model, [7, 8], max_tokens=5, temperature=0) == text[2:]
    assert generate(model, [7, 8], max_tokens=5, top_k=1, seed=3) == text[2:]


def test_frequencies_match_the_probabilities(model):
    shares = (model(torch.tensor([[5, 6]]))[0, -1] / 0.5).softmax(-1)
    sampled = torch.tensor([generate(model, [5, 6], max_tokens=1, temperature=0.5, seed=seed) for seed in range(400)])
    measured = sampled.flatten().bincount(minlength=61) / 400
    assert (measured - shares).abs().sum() / 2 < 0.2  # the expected distance of 400 samples is about 0.1
    top = shares.topk(4).indices.tolist()
    few = {generate(model, [5, 6], max_tokens=1, temperature=0.5, top_k=4, seed=seed)[0] for seed in range(200)}
    assert few <= set(top)
    assert len(few) > 1


def test_stop_id_ends_the_text_and_is_omitted(model):
    whole = generate(model, [9], max_tokens=20, seed=4)
    stop = whole[7]
    assert generate(model, [9], max_tokens=20, seed=4, stop_ids={stop}) == whole[: whole.index(stop)]


def test_ids_beyond_the_tokenizers_are_never_sampled(model):
    sampled = {token for seed in range(20) for token in generate(model, [1], max_tokens=10, seed=seed, num_ids=7)}
    assert sampled <= set(range(7))


def test_generation_builds_no_gradients_and_accepts_zero_tokens(model):
    assert generate(model, [1], max_tokens=0) == []
    generate(model, [1], max_tokens=3)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("prompt", "options", "text"), [
    ([], {}, "prompt: it has no tokens, and the model needs one to start from. Give at least one."),
    ([1, 61], {}, "prompt id 61: the model's vocabulary has 61 entries. Use ids from 0 to 60."),
    ([-1], {}, "prompt id -1: the model's vocabulary has 61 entries. Use ids from 0 to 60."),
    ([1], {"max_tokens": -1}, "max_tokens=-1: it must be 0 or more. Use e.g. 100."),
    ([1] * 30, {"max_tokens": 11}, "max_tokens=11: with a prompt of 30 tokens this is longer than max_seq_len=40. "
     "Use max_tokens=10 or less."),
    ([1] * 41, {}, "max_tokens=1: with a prompt of 41 tokens this is longer than max_seq_len=40. "
     "Use a prompt of fewer than 40 tokens."),
    ([1], {"temperature": -0.5}, "temperature=-0.5: it must be finite and at least 0. Use e.g. 0.8."),
    ([1], {"temperature": float("nan")}, "temperature=nan: it must be finite and at least 0. Use e.g. 0.8."),
    ([1], {"top_k": 0}, "top_k=0: it must be at least 1. Use e.g. 50."),
])  # fmt: skip
def test_invalid_options_have_their_message(model, prompt, options, text):
    with pytest.raises(ModelError) as caught:
        generate(model, prompt, **{"max_tokens": 1, **options})
    assert str(caught.value) == text
