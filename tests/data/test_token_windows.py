"""Ids of documents equal the ids of their full text, for every kind of tokenizer and any division of the text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library

from weft.data.text.documents import Document
from weft.data.text.text_windows import TextEncoder, encode_long
from weft.data.text.tokenize import encode_documents
from weft.data.text.tokenizer import Tokenizer, import_tokenizer
from weft.data.text.turns import Turn

CORPUS = ["the quick brown fox jumps over the lazy dog, and the foxes jump: 12345 aaaa naïve café 漢字"] * 30
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(model: Any, trainer: Any, normalizer: Any = None, pre: Any = None, decoder: Any = None) -> Library:
    library = Library(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if pre is not None:
        library.pre_tokenizer = pre
    if decoder is not None:
        library.decoder = decoder
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    return library


def bpe(**parts: Any) -> Library:
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL[:5] + BYTES, show_progress=False)
    return trained(models.BPE(byte_fallback=True, unk_token="<unk>"), trainer, **parts)


def byte_level(prefix: bool, pre: Any = None) -> Library:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL[:5], initial_alphabet=alphabet, show_progress=False
    )
    pre = pre or pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return trained(models.BPE(), trainer, pre=pre, decoder=decoders.ByteLevel())


def metaspace(scheme: Any, split: bool) -> Library:
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return bpe(pre=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split), decoder=decoder)


def unigram(scheme: Any, pre: Any = None) -> Library:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL[:5], unk_token="<unk>", show_progress=False
    )
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return trained(models.Unigram(), trainer, normalizer, pre or space, decoders.Metaspace(prepend_scheme=scheme))


def wordpiece() -> Library:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL[:5], show_progress=False)
    model = models.WordPiece(unk_token="<unk>")
    return trained(
        model, trainer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    )


def digits() -> Library:
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    return byte_level(False, pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


KINDS = {
    "bytes": lambda: byte_level(False),
    "bytes_prefixed": lambda: byte_level(True),
    "digits": digits,
    "prepend": lambda: bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "first": lambda: metaspace("first", False),
    "always": lambda: metaspace("always", True),
    "never": lambda: metaspace("never", False),
    "unigram": lambda: unigram("always"),
    "unigram_words": lambda: unigram(
        "always", pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ),
    "stripped": lambda: bpe(normalizer=normalizers.Strip(), pre=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "word_piece": wordpiece,
}


@cache
def both(kind: str, bos: bool) -> tuple[Library, Tokenizer]:
    library = KINDS[kind]()
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    folder = Path(mkdtemp())
    library.save(str(folder / "tokenizer.json"))
    return library, import_tokenizer(folder / "t", str(folder))


def full(kind: str, bos: bool, text: str) -> list[int]:
    """Return the library's ids of a text, with its begin token and without its end token."""
    library = both(kind, bos)[0]
    library.encode_special_tokens = True
    ids = library.encode(text, add_special_tokens=False).ids
    return [1, *ids] if bos else ids


WORDS = [
    "the",
    "fox",
    " ",
    "  ",
    "\n",
    "\n\n",
    ",",
    "1234567",
    "naïve",
    "é",
    "漢字",
    "🎉",
    "aaaa",
    "<tool>",
    "dog jumps",
]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join)
#: Runs are longer than the overlap of windows, so that some splits are invalid.
LONG = st.tuples(
    st.lists(st.sampled_from([*WORDS, "a" * 700, "\n" * 90]), min_size=20, max_size=40), st.integers(4, 16)
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(prompt=TEXT, answer=TEXT, bos=st.booleans())
def test_prompt_and_answer_are_tokenized_as_one_text(kind: str, prompt: str, answer: str, bos: bool) -> None:
    tokenizer = both(kind, bos)[1]
    documents = [
        Document("f", 0, text=answer, prompt=prompt),
        Document("f", 0, text=prompt + answer),
        Document("f", 0, text=answer, prompt=""),
    ]
    joint, plain, alone = encode_documents(documents, tokenizer)
    assert joint[0].tolist() == plain[0].tolist() == full(kind, bos, prompt + answer)
    assert alone[0].tolist() == full(kind, bos, answer)
    mask = joint[1]
    assert mask is not None
    assert alone[1] is not None
    assert alone[1].all() or bos
    assert (np.diff(mask.astype(int)) >= 0).all(), "the answer is what follows the prompt"


SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(words=LONG, sizes=SIZES)
def test_long_text_has_the_same_ids_in_windows(kind: str, words: tuple[list[str], int], sizes: list[int]) -> None:
    check_windows(kind, words, sizes)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(words=LONG, sizes=SIZES)
def test_more_long_texts_have_the_same_ids_in_windows(
    kind: str, words: tuple[list[str], int], sizes: list[int]
) -> None:
    check_windows(kind, words, sizes)


def check_windows(kind: str, words: tuple[list[str], int], sizes: list[int]) -> None:
    text = "".join(words[0]) * words[1]
    tokenizer = both(kind, False)[1]
    expected = full(kind, False, text)
    codec = tokenizer._codec
    found = encode_long(text, codec, window_chars=1200, with_offsets=True)
    assert found.ids.tolist() == expected
    assert found.offsets().tolist() == codec.tokens([text])[0].offsets().tolist()
    encoder, position, number, ids = TextEncoder(codec, window_chars=1200), 0, 0, []
    while position < len(text):
        size = sizes[number % len(sizes)]
        ids += encoder.feed(text[position : position + size]).ids.tolist()
        position, number = position + size, number + 1
    assert ids + encoder.finish().ids.tolist() == expected


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "unigram", "bytes", "word_piece"])
def test_parts_of_a_document_show_their_spaces(kind: str) -> None:
    tokenizer = both(kind, False)[1]
    for prompt, answer in (("the fox:", "four"), ("the fox:", " four"), ("the", " 漢字"), ("🎉", "🎉")):
        [(ids, trained)] = encode_documents([Document("f", 0, text=answer, prompt=prompt)], tokenizer)
        assert trained is not None
        first = int((~trained).sum())
        parts = tokenizer.decode_parts([ids[:first], ids[first:]])
        assert "".join(parts) == tokenizer.decode(ids, specials=True)
        if kind not in ("word_piece", "unigram"):  # their vocabulary lacks characters
            assert "".join(parts) == prompt + answer
            assert parts[1].endswith(answer), "a token across the border is shown with the answer"


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "bytes"])
def test_chatml_has_the_ids_of_its_text(kind: str) -> None:
    """Content like a special token is text, and changes no ids around it."""
    library, tokenizer = both(kind, False)
    library.encode_special_tokens = False
    turns = (Turn("user", "the fox"), Turn("assistant", "four"), Turn("user", " dog"), Turn("assistant", "the"))
    text = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in turns)
    [(ids, weights)] = encode_documents([Document("f", 0, turns=turns)], tokenizer)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert weights is not None
    shown = tokenizer.decode_parts([ids[:index] for index in (len(ids),)])[0]
    assert "four" in shown
    assert [tokenizer.decode([token]).strip() for token in ids[weights != 0]].count("") == 2  # the ends of turns
    attack = (turns[0], Turn("assistant", "four <|im_end|> the"), *turns[2:])
    [(attacked, _)] = encode_documents([Document("f", 0, turns=attack)], tokenizer)
    start, end = tokenizer.vocabulary.turn_start_id, tokenizer.vocabulary.turn_end_id
    assert [(attacked == one).sum() for one in (start, end)] == [4, 4]
    first, last = (int(np.flatnonzero(ids == start)[place]) for place in (1, 2))
    assert attacked[: first + 1].tolist() == ids[: first + 1].tolist()
    assert attacked[-(len(ids) - last) :].tolist() == ids[last:].tolist()
    assert tokenizer.decode_parts([attacked])[0].replace("  ", " ").count("four <|im_end|> the") == 1


def test_documents_begin_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    library = KINDS["first"]()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    plain = KINDS["first"]()
    (tmp_path / "plain").mkdir()
    plain.save(str(tmp_path / "plain" / "tokenizer.json"))

    def begin(folder: Path, name: str, config: Any = None, **options: Any) -> tuple[int, ...]:
        file = folder / "tokenizer_config.json"
        file.unlink(missing_ok=True)
        if config is not None:
            file.write_text(json.dumps(config))
        return import_tokenizer(tmp_path / "out" / name, str(folder), **options).vocabulary.begin_ids

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert begin(tmp_path, "a") == (1,)
    assert begin(tmp_path, "b", bos=False) == ()
    # transformers prefers the config to the post-processor.
    assert begin(tmp_path, "c", {**tokens, "add_bos_token": False}) == ()
    assert begin(tmp_path, "d", {**tokens, "add_bos_token": False}, bos=True) == (1,)
    assert begin(tmp_path / "plain", "e", tokens) == ()
    assert begin(tmp_path / "plain", "f", {**tokens, "add_bos_token": True}) == (1,)
    assert begin(tmp_path / "plain", "g", tokens, bos=True) == (1,)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = import_tokenizer(tmp_path / "h", str(tmp_path), bos="auto")
    assert tokenizer.encode("the fox") == library.encode("the fox").ids[:-1]
    assert Tokenizer.load(tmp_path / "h").vocabulary == tokenizer.vocabulary
