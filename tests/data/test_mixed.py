"""Samples of images, audio and text: equal in every record format, and left out with a reason if unusable."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_records import write_lines
from tests.data.mixed_records import FORMS, as_paths, mixed, picture, sound
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import LogMel
from weft.data.media.images import Look
from weft.data.media.mixed_items import MixedAhead, MixedItems
from weft.data.media.mixed_records import MixedSurvey, find_mixed
from weft.data.media.mixed_samples import ByteText, MixedColumns
from weft.errors import DataError


def found(path: Path, cache: Path, columns: MixedColumns | None = None):
    survey = MixedSurvey(columns or MixedColumns(), ByteText(), lambda tokens, media: "")
    return find_mixed(str(path), [path], survey, cache, None)


def items(path: Path, cache: Path, **look) -> MixedItems:
    return MixedItems(found(path, cache), Look(16, **look), AudioTransform(16_000, 2.0, noise=0.1), LogMel(mels=20), 3)


@pytest.fixture(scope="module")
def by_form(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MixedItems]:
    made = {}
    for name, write in FORMS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = items(write(folder, mixed(10)), folder / "cache", crops=True, mirrors=True)
    return made


def test_every_format_has_the_same_samples(by_form: dict[str, MixedItems]) -> None:
    expected = list(MixedAhead(by_form["tar"], 0))
    text = ByteText()
    assert [text.decode_all(one.tokens.tolist()) for one in expected[:5]] == [
        "<image>red<|end|>",
        "<audio>ab<|end|>",
        "<image><image>blue red<|end|>",
        "only text<|end|>",
        "<|turn|>user\nWhich is <image>?<|end of turn|>\n<|turn|>assistant\ngreen<|end of turn|>\n",
    ]
    chat = expected[4]
    assert text.decode_all(chat.tokens[chat.learnt == 1].tolist()) == "green<|end of turn|>"
    assert [len(one.media) for one in expected[:5]] == [1, 1, 2, 0, 1]
    for name, made in by_form.items():
        for one, other in zip(MixedAhead(made, 0), expected, strict=True):
            assert np.array_equal(one.tokens, other.tokens), name
            assert np.array_equal(one.learnt, other.learnt), name
            for mine, theirs in zip(one.media, other.media, strict=True):
                assert np.array_equal(mine, theirs), name


def test_processes_decode_the_same_bits(by_form: dict[str, MixedItems]) -> None:
    ahead = MixedAhead(by_form["paths"], 2)
    try:
        for epoch in range(2):
            keys = [(epoch, index) for index in range(10)]
            for one, key in zip(ahead.many(keys, [(epoch + 1, 0)]), keys, strict=True):
                expected = ahead.in_epoch(*key)
                assert all(np.array_equal(a, b) for a, b in zip(one.media, expected.media, strict=True)), key
        pixels = [ahead.in_epoch(epoch, 0).media[0] for epoch in range(2)]
        assert not np.array_equal(*pixels)  # another augmentation in another epoch
    finally:
        ahead.close()


def test_unusable_samples_are_left_out_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red", 0))
    (tmp_path / "cut.png").write_bytes(picture("red", 0)[:60])
    held = base64.b64encode(sound("ab", 1)).decode()
    bad = {
        "it has 2 <image> marks and 1 picture": {"images": ["a.png"], "text": "<image> <image> x"},
        "it has 0 <audio> marks and 1 recording": {
            "audios": [{"bytes": held}],
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        },
        "it has no text that could be learnt": {"messages": [{"role": "user", "content": "x"}]},
        "it has no text": {"image": "a.png"},
        "a turn of its chat has no role, or no content": {"messages": [{"role": "user"}]},
        "a part of its chat is of type 'video'": {
            "messages": [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "y"}]
        },
        "there is no file 'gone.png' beside it": {"image": "gone.png", "text": "x"},
        "'../a.png' lies outside ": {"image": "../a.png", "text": "x"},
        "picture 1 has neither a path nor bytes": {"images": [7], "text": "x"},
        "cut.png: its pixels cannot be decoded": {"image": "cut.png", "text": "x"},
    }
    good = [{"image": "a.png", "text": f"x{number}"} for number in range(100 * len(bad))]
    records = found(write_lines(tmp_path / "x.jsonl", [*bad.values(), *good]), tmp_path / "cache")
    assert len(records) == len(good)
    for reason, message in zip(bad, records.unreadable, strict=True):
        assert reason in message, message
    with pytest.raises(DataError, match=r"10 of 11 samples cannot be used, more than 1%\. The first: "):
        found(write_lines(tmp_path / "y.jsonl", [*bad.values(), good[0]]), tmp_path / "cache")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"its files hold no records"):
        found(tmp_path / "empty.jsonl", tmp_path / "cache")


def test_file_that_is_added_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red", 0))
    good = [{"image": "a.png", "text": "x"} for _ in range(100)]
    file = write_lines(tmp_path / "x.jsonl", [*good, {"image": "late.png", "text": "y"}])
    assert len(found(file, tmp_path / "cache")) == 100
    (tmp_path / "late.png").write_bytes(picture("blue", 0))
    assert len(found(file, tmp_path / "cache")) == 101


def test_columns_can_be_named(tmp_path: Path) -> None:
    as_paths(tmp_path, mixed(2))
    lines = [{"seen": "0.0.png", "heard": "1.0.flac", "said": "both"}]
    records = found(write_lines(tmp_path / "y.jsonl", lines), tmp_path / "cache", MixedColumns("said", "seen", "heard"))
    assert ByteText().decode_all(records.tokens(0).tolist()) == "<image><audio>both<|end|>"
    assert [is_sound for is_sound, _ in records.sizes(0)] == [False, True]
