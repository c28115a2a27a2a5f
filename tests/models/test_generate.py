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
def test_sampling_with_a_cache_equals_sampling_without(model, options):
    prompt = [3, 1, 4, 1, 5]
    cached = generate(model, prompt, max_tokens=30, **options)
    assert cached == generate(model, prompt, max_tokens=30, use_cache=False, **options)
    assert len(cached) == 30
    assert all(0 <= token < 61 for token in cached)


def test_the_cache_saves_work(model):
    widths = []
    model.embed.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, [1, 2, 3], max_tokens=4)
    assert widths == [3, 1, 1, 1]


def test_a_seed_gives_one_text_and_torchs_generator_is_left_alone(model):
    state = torch.get_rng_state()
    texts = [generate(model, [1], max_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_no_temperature_takes_the_likeliest(model):
    text = [7, 8]
    for _ in range(5):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert generate(model, [7, 8], max_tokens=5, temperature=0) == text[2:]
    assert generate(model, [7, 8], max_tokens=5, top_k=1, seed=3) == text[2:]


def test_frequencies_follow_the_probabilities(model):
    shares = (model(torch.tensor([[5, 6]]))[0, -1] / 0.5).softmax(-1)
    drawn = torch.tensor([generate(model, [5, 6], max_tokens=1, temperature=0.5, seed=seed) for seed in range(400)])
    measured = drawn.flatten().bincount(minlength=61) / 400
    assert (measured - shares).abs().sum() / 2 < 0.2  # the expected distance of 400 draws is about 0.1
    top = shares.topk(4).indices.tolist()
    few = {generate(model, [5, 6], max_tokens=1, temperature=0.5, top_k=4, seed=seed)[0] for seed in range(200)}
    assert few <= set(top)
    assert len(few) > 1


def test_a_stop_id_ends_the_text_and_is_left_out(model):
    whole = generate(model, [9], max_tokens=20, seed=4)
    stop = whole[7]
    assert generate(model, [9], max_tokens=20, seed=4, stop_ids={stop}) == whole[: whole.index(stop)]


def test_ids_beyond_the_tokenizers_are_never_taken(model):
    drawn = {token for seed in range(20) for token in generate(model, [1], max_tokens=10, seed=seed, num_ids=7)}
    assert drawn <= set(range(7))


def test_no_gradients_are_kept_and_no_tokens_are_no_tokens(model):
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
def test_the_sentence_of_each_mistake(model, prompt, options, text):
    with pytest.raises(ModelError) as caught:
        generate(model, prompt, **{"max_tokens": 1, **options})
    assert str(caught.value) == text
