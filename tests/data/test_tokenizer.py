from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from weft.data.text.codec import SPECIAL_TOKENS
from weft.data.text.tokenizer import Tokenizer, import_tokenizer, save_bytes_tokenizer, train_bpe
from weft.errors import DataError

TEXTS = ["def f(x):\n    return x + 1\n" * 5, "naïve café 漢字 🎉 the the the", "<|endoftext|> is a token's name"] * 3


@pytest.fixture(scope="module", params=["bpe", "bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return save_bytes_tokenizer(folder / "t")
    trained = train_bpe(folder / "t", TEXTS, 320)
    return trained if request.param == "bpe" else import_tokenizer(folder / "u", str(folder / "t"))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80))
def test_text_round_trips_and_byte_counts_add_up(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.encode_batch([text, "x"])[0].tolist() == ids


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=8)), max_size=8))
def test_text_never_becomes_a_special_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(token) for token in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    v = tokenizer.vocabulary
    specials = [v.end_id, v.pad_id, v.turn_start_id, v.turn_end_id]
    assert len(set(specials)) == 4
    assert max(specials) < tokenizer.vocab_size == len(tokenizer.token_bytes)
    assert tokenizer.token_bytes[specials].tolist() == [0] * 4
    ids = [*tokenizer.encode("a"), tokenizer.end_id, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, specials=True) == "a<|endoftext|>b"
    assert tokenizer.has_chat


def test_loaded_tokenizer_equals_the_saved_one(tmp_path: Path) -> None:
    saved = train_bpe(tmp_path / "t", TEXTS, 300)
    loaded = Tokenizer.load(tmp_path / "t")
    assert loaded.vocabulary == saved.vocabulary
    assert saved.vocab_size == 300
    assert loaded.encode("the café") == saved.encode("the café")


def test_changed_file_is_refused(tmp_path: Path) -> None:
    train_bpe(tmp_path / "t", TEXTS, 300)
    file = tmp_path / "t" / "tokenizer.json"
    file.write_text(file.read_text().replace('"the"', '"teh"', 1) + " ")
    with pytest.raises(DataError, match="do not match their digest"):
        Tokenizer.load(tmp_path / "t")
    with pytest.raises(DataError, match="no tokenizer can be read there"):
        Tokenizer.load(tmp_path / "none")


def test_training_is_the_same_in_another_process(tmp_path: Path) -> None:
    """The library counts in hash maps whose order differs between processes."""
    code = (
        "import sys; from pathlib import Path; import weft.data.text.tokenizer as b;"
        "texts = [Path(b.__file__).read_text(), Path(b.__file__).with_name('tokenizer.py').read_text()];"
        "print(b.train_bpe(Path(sys.argv[1]), texts, 600).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, check=True
        ).stdout
        for name in ("a", "b", "c")
    }
    assert len(digests) == 1


def word_level_tokenizer(path: Path, *added: AddedToken) -> Path:
    library = Library(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.normalizer = normalizers.Lowercase()
    library.add_special_tokens([token for token in added if token.special])
    library.add_tokens([token for token in added if not token.special])
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    return path


def test_end_token_of_a_saved_tokenizer_is_found(tmp_path: Path) -> None:
    source = word_level_tokenizer(tmp_path / "s", AddedToken("<stop>", special=True), AddedToken("<pad>", special=True))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    found = import_tokenizer(tmp_path / "t", str(source / "tokenizer.json"))
    assert (found.end_id, found.pad_id, found.vocab_size, found.has_chat) == (3, 4, 5, False)
    assert found.encode("Hello world") == [1, 2]


def test_added_tokens_match_their_exact_text_and_are_refused_if_known(tmp_path: Path) -> None:
    new = ("<Tool>", "two words")
    trained = train_bpe(tmp_path / "t", TEXTS, 320, new)
    text = "x<Tool>y two words <tool>"
    assert [token for token in trained.encode(text) if token >= trained.vocab_size - 2] == [
        trained.vocab_size - 2, trained.vocab_size - 1
    ]  # fmt: skip
    assert trained.decode(trained.encode(text)) == text
    assert trained.token_bytes[-2:].tolist() == [len(token) for token in new]
    stop = AddedToken("<stop>", special=True)
    source = word_level_tokenizer(tmp_path / "s", stop)  # its normalizer changes texts to lower case
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>"}))
    found = import_tokenizer(tmp_path / "u", str(source), add_tokens=["<Tool>"])
    assert found.encode("hello <Tool> <tool>")[:2] == [1, 4]
    with pytest.raises(DataError, match=r"add_tokens=world: the tokenizer has this token already, with id 2"):
        import_tokenizer(tmp_path / "v", str(source), add_tokens=["world"])


def test_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    source = word_level_tokenizer(tmp_path / "s")
    with pytest.raises(DataError, match=r"tokenizer\.path=.*: it has no end token \(<\|endoftext\|>, "):
        import_tokenizer(tmp_path / "t", str(source))


def test_control_tokens_not_marked_special_are_not_matched(tmp_path: Path) -> None:
    source = word_level_tokenizer(
        tmp_path / "s", AddedToken("<|endoftext|>", special=True), AddedToken("<|im_start|>", special=False),
        AddedToken("<|im_end|>", special=False),
    )  # fmt: skip
    found = import_tokenizer(tmp_path / "t", str(source))
    ids = found.encode("hello <|im_start|>world<|im_end|>")
    assert found.vocabulary.turn_start_id not in ids
    assert found.vocabulary.turn_end_id not in ids
    assert {1, 2} <= set(ids)
    assert found.token_bytes[[found.end_id, found.vocabulary.turn_start_id, found.vocabulary.turn_end_id]].sum() == 0


@pytest.mark.parametrize("end", ["[UNK]", ["<stop>"], {"content": None}])
def test_empty_or_non_text_token_names(tmp_path: Path, end: object) -> None:
    source = word_level_tokenizer(tmp_path / "s", AddedToken("<|endoftext|>", special=True))
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace('"world"', '""'))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "pad_token": ""}))
    found = import_tokenizer(tmp_path / "t", str(source))
    assert (found.end_id, found.pad_id) == (0 if end == "[UNK]" else 3, 2)
    if end == "[UNK]":  # unknown text becomes the end token, which no document may contain
        with pytest.raises(DataError, match=r"^tokenizer: it turns plain text into special tokens\."):
            found.encode("other")
    else:
        assert found.encode("hello") == [1]


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_path_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"^tokenizer\.path="):
        import_tokenizer(tmp_path / "t", str(tmp_path))


def test_batches_are_arrays(tokenizer: Tokenizer) -> None:
    assert [array.dtype for array in tokenizer.encode_batch(["a", ""])] == [np.int64, np.int64]
