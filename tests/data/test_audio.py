"""Audio in every record format: indexed by headers, transformed by a key, faulty clips named; mel filter banks."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.data.audio_clips import FORMS, encoded, sound_folder, spoken, tones
from tests.data.image_records import add, write_lines
from weft.data.media.audio import AudioTransform, apply_transform, sound_size, vorbis_size
from weft.data.media.audio_features import LogMel, folder_features, log_mel, mel_energy, mel_filters
from weft.data.media.audio_source import Sounds
from weft.data.media.decode_workers import DecodedAhead
from weft.data.media.files import RecordColumns
from weft.data.media.images import Encoded
from weft.data.media.media_records import MediaRecords, Survey, find_records, record_files
from weft.data.media.records import SOUND
from weft.errors import DataError, MissingExtra


def found(path: Path, cache: Path, *, text: bool = False, survey: Survey | None = None) -> MediaRecords:
    files = record_files(str(path), SOUND) or [path]
    return find_records(str(path), files, RecordColumns("", "", SOUND, text), cache, None, survey)


@pytest.mark.parametrize("form", FORMS)
def test_every_format_has_the_same_clips(tmp_path: Path, form: str) -> None:
    samples = spoken(12)
    (tmp_path / "data").mkdir()
    records = found(FORMS[form](tmp_path / "data", samples, "label"), tmp_path / "cache")
    assert [records.classes[records.label(i)] for i in range(12)] == [word for _, word in samples]
    assert [records.encoded(i).read_all() for i in range(12)] == [data for data, _ in samples]
    infos = [soundfile.info(io.BytesIO(data)) for data, _ in samples]
    assert [records.size(i) for i in range(12)] == [(one.frames, one.samplerate, one.channels) for one in infos]
    stored = sum(file.stat().st_size for file in Path(records.folder).iterdir())
    assert stored < 12 * 120 + 1500  # offsets, and no samples
    assert MediaRecords.parse(records.format()) == records
    survey = Survey(("letters",), None, lambda text: [ord(letter) for letter in text])
    (tmp_path / "said").mkdir()
    texts = found(FORMS[form](tmp_path / "said", samples, "text"), tmp_path / "cache", text=True, survey=survey)
    assert [texts.text(i) for i in range(12)] == [word for _, word in samples]
    assert texts.tokens(1).tolist() == [ord("c"), ord("d")]


def test_class_folder_is_indexed_and_again_when_it_changes(tmp_path: Path) -> None:
    root = sound_folder(tmp_path / "folder")
    records = found(root, tmp_path / "cache")
    assert (records.classes, len(records)) == (("ab", "cd", "da"), 18)
    assert records.file(7) == f"{root}, cd/1.flac"
    assert records.encoded(7).read_all() == (root / "cd" / "1.flac").read_bytes()
    assert records.size(7)[1:] == (8000, 1)
    assert found(root, tmp_path / "cache").digest == records.digest
    (root / "cd" / "1.flac").write_bytes(encoded(tones("cd", 5), 16_000, "OGG"))  # the suffix is ignored
    assert found(root, tmp_path / "cache").size(7)[1:] == (16_000, 1)
    (root / "empty").mkdir()
    with pytest.raises(DataError, match=r"class 'empty' has no recording\. Add some, or take the folder away\."):
        found(root, tmp_path / "cache")


HEARING = AudioTransform(16_000, 0.15, crops=True, gain=6.0, noise=0.3, masks=2)


def test_bits_are_determined_by_the_key_at_any_number_of_processes(tmp_path: Path) -> None:
    records = found(sound_folder(tmp_path / "folder"), tmp_path / "cache")
    sounds = Sounds(records, HEARING, LogMel(mels=20), 7)
    assert sounds[0][0].shape == (20, 15)
    assert np.array_equal(sounds.in_epoch(1, 2)[0], sounds.in_epoch(1, 2)[0])
    assert not np.array_equal(sounds.in_epoch(1, 2)[0], sounds.in_epoch(2, 2)[0])
    keys = [(place % 2, place) for place in range(18)]
    ahead = DecodedAhead(sounds, 2)
    for (made, label), key in zip(ahead.many(keys[:9], keys[9:]) + ahead.many(keys[9:]), keys, strict=True):
        assert label == records.label(key[1])
        assert np.array_equal(made, sounds.decoded(*key))
    ahead.close()


def test_clips_are_mixed_to_mono_and_resampled(tmp_path: Path) -> None:
    wave = tones("ab", 1)
    pair = np.stack((wave, -0.5 * wave), 1)
    plain = AudioTransform(16_000, 10.0)

    def transformed(data: bytes, hearing: AudioTransform = plain, key: tuple[int, ...] = ()) -> np.ndarray:
        one = Encoded("x", held=data)
        return apply_transform(one, sound_size(one), hearing, key)

    assert np.allclose(transformed(encoded(pair, subtype="FLOAT")), 0.25 * wave, atol=1e-7)
    low = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000).astype(np.float32)
    high = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(transformed(encoded(low, 8000, subtype="FLOAT")) - high)[200:-200].max() < 1e-4
    ramp = np.linspace(0.1, 0.9, 16_000, dtype=np.float32)
    middle = transformed(encoded(ramp, subtype="FLOAT"), AudioTransform(16_000, 0.5))
    assert np.array_equal(middle, ramp[4000:12_000])
    starts = {
        float(transformed(encoded(ramp, subtype="FLOAT"), AudioTransform(16_000, 0.5, True), (key,))[0])
        for key in range(9)
    }
    assert len(starts) == 9
    louder = transformed(encoded(ramp, subtype="FLOAT"), AudioTransform(16_000, 9.0, gain=6.0), (1,)) / ramp
    assert np.allclose(louder, louder[0])
    assert 0.5 < louder[0] < 2.0
    noise = transformed(encoded(ramp, subtype="FLOAT"), AudioTransform(16_000, 9.0, noise=0.5), (1,)) - ramp
    assert 0 < noise.std() < 0.5 * np.sqrt(np.mean(ramp**2))


def test_mel_bands_match_other_libraries() -> None:
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    wave = (rng.standard_normal(16_000) * np.sin(np.arange(16_000) / 900) * 0.1).astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1)
    theirs = extractor._np_extract_fbank_features(wave[None], "cpu")[0]
    assert np.abs(log_mel(wave) - theirs).max() < 1e-6
    assert np.abs(mel_filters(16_000, 80, 400, most_hz=8000.0) - extractor.mel_filters.T).max() < 1e-12
    bank = transformers.audio_utils.mel_filter_bank
    for scale, norm in (("htk", None), ("slaney", "slaney"), ("htk", "slaney")):
        filters = mel_filters(22_050, 40, 512, scale=scale, is_even=norm is not None)
        assert np.abs(filters - bank(257, 40, 0.0, 11_025.0, 22_050, norm=norm, mel_scale=scale).T).max() < 1e-12
        # torchaudio's MelSpectrogram: power 2, a periodic Hann window, mirrored ends.
        window = torch.hann_window(512, dtype=torch.float64)
        spectrum = torch.stft(torch.from_numpy(wave).double(), 512, 128, window=window, return_complex=True)
        expected = torch.from_numpy(filters) @ spectrum.abs() ** 2
        assert np.abs(mel_energy(wave, filters, 512, 128) - expected.numpy()).max() < 1e-9
    assert log_mel(np.zeros(16_000, np.float32)).max() == -1.5  # silence is not infinite
    assert LogMel()(np.ones(1, np.float32)).shape == (80, 1)


def test_features_of_a_model_folder_are_used(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wave = tones("abcd", 3)[:16_000]
    whisper = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    whisper.save_pretrained(tmp_path / "whisper")
    features, seconds = folder_features(tmp_path / "whisper")
    assert (seconds, features.shape(9)) == (1.0, (16, 100))
    theirs = whisper(wave, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    assert np.abs(features(wave) - theirs).max() < 1e-4  # with torch it computes in float32
    ast = transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=64)
    ast.save_pretrained(tmp_path / "ast")
    features, seconds = folder_features(tmp_path / "ast")
    assert (features.shape(16_000), seconds) == ((32, 64), None)
    theirs = ast(wave, sampling_rate=16_000, return_tensors="np")["input_values"][0]
    assert np.array_equal(features(wave), theirs.T)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "wav2vec")
    with pytest.raises(DataError, match=r"its Wav2Vec2FeatureExtractor gives samples, and this task trains on bands"):
        folder_features(tmp_path / "wav2vec")
    with pytest.raises(DataError, match=r"its preprocessor_config\.json cannot be read \(No such file or directory\)"):
        folder_features(tmp_path / "nothing")


def faulty() -> dict[str, tuple[bytes, str]]:
    wave = tones("abcd", 1)
    good = {form: encoded(wave, form=form) for form in ("WAV", "FLAC", "OGG", "AIFF", "MP3")}
    cut = {
        f"cut.{form.lower()}": (data[: int(0.6 * len(data))], "it is truncated. Copy it again, or delete it.")
        for form, data in good.items()
    }
    return {
        **cut,
        "empty.wav": (b"", "it cannot be read as audio (it is empty). Repair it, or delete it."),
        "text.wav": (b"no audio " * 20, "it cannot be read as audio (no known format). Repair it, or delete it."),
        "none.wav": (encoded(wave[:0]), "it has no samples. Delete it."),
        "silent.flac": (encoded(0 * wave, form="FLAC"), "it is silent, every sample is 0. Delete it."),
        "slow.wav": (encoded(wave, 100), "it has 100 frames a second, and 1000 to 768000 can be read. Resample it."),
    }


def test_unreadable_clips_are_left_out_and_named(tmp_path: Path) -> None:
    good, bad = spoken(3), faulty()
    odd = {"stereo.wav": encoded(np.stack([tones("ab", 1)] * 2, 1)), "flac.mp3": encoded(tones("ba", 1), form="FLAC")}
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for index in range(1000):
            add(tar, f"{index}.flac", good[index % 3][0])
            add(tar, f"{index}.cls", good[index % 3][1].encode())
        for name, data in {**odd, **{name: data for name, (data, _) in bad.items() if name[:3] != "cut"}}.items():
            add(tar, f"x{name}", data)
            add(tar, f"x{name.partition('.')[0]}.cls", b"ab")
    records = found(tmp_path / "x.tar", tmp_path / "cache")
    reasons = "\n".join(records.unreadable)
    for name, (_, text) in bad.items():
        if not name.startswith("cut"):
            assert f"x{name}: {text}" in reasons
    assert len(records) == 1002
    for name, (data, text) in bad.items():
        with pytest.raises(DataError) as caught:
            sound_size(Encoded(name, held=data))
        assert str(caught.value) == f"{name}: {text}"


def test_long_clips_are_read_in_parts_and_later_damage_is_named(tmp_path: Path) -> None:
    frames = 3 * 3600 * 8000
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + 2 * frames, b"WAVE", b"fmt ", 16, 1, 1, 8000, 16_000, 2, 16,
                       b"data", 2 * frames)  # fmt: skip
    path = tmp_path / "long.wav"
    path.write_bytes(head + encoded(tones("abcd", 1), 8000)[44:])
    with path.open("r+b") as file:
        file.truncate(44 + 2 * frames)  # a sparse file, which takes no space
    one = Encoded.of_file(path)
    assert sound_size(one) == (frames, 8000, 1)
    assert apply_transform(one, sound_size(one), AudioTransform(16_000, 4.0)).shape == (64_000,)
    (tmp_path / "data").mkdir()
    samples = spoken(3)
    for index, (data, _) in enumerate(samples):
        (tmp_path / "data" / f"{index}.flac").write_bytes(data)
    lines = [{"audio": f"{index}.flac", "label": word} for index, (_, word) in enumerate(samples)]
    records = found(write_lines(tmp_path / "data" / "x.jsonl", lines), tmp_path / "cache")
    (tmp_path / "data" / "1.flac").write_bytes(samples[1][0][:300])
    with pytest.raises(DataError, match=r"1\.flac: it (cannot be read as audio|ends \d+ frames before its h)"):
        Sounds(records, AudioTransform(16_000, 1.0), LogMel(), 0).decoded(0, 1)
    nan = Encoded("nan.wav", held=encoded(np.array([0.5, np.nan, 0.5], np.float32), subtype="FLOAT"))
    with pytest.raises(DataError, match=r"^nan\.wav: it has samples that are not finite\. Repair it"):
        apply_transform(nan, (3, 16_000, 1), AudioTransform(16_000, 1.0))


def test_missing_soundfile_error_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Encoded("x.wav", held=encoded(tones("ab", 1), 8000))
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "soundfile", None)
        with pytest.raises(MissingExtra, match=r'soundfile is not installed: .* pip install -e "\.\[media\]"'):
            sound_size(one)
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(MissingExtra, match=r'soxr is not installed: .* pip install -e "\.\[media\]"'):
        apply_transform(one, sound_size(one), AudioTransform(16_000, 1.0))


def test_ogg_is_measured_without_its_codec(tmp_path: Path) -> None:
    """The size from the pages equals libsndfile's. Unusual files are left to libsndfile."""
    wave = tones("abcd", 3, 24_000)
    for rate, channels in ((24_000, 1), (44_100, 2), (8000, 1)):
        file = tmp_path / f"{rate}.ogg"
        soundfile.write(file, np.stack([wave] * channels, 1), rate, format="OGG", subtype="VORBIS")
        known = soundfile.info(file)
        assert vorbis_size(Encoded.of_file(file)) == (known.frames, rate, channels) == sound_size(file)
    complete = (tmp_path / "8000.ogg").read_bytes()
    opus, silent = encoded(tones("ab", 1, 48_000), 48_000, "OGG", "OPUS"), encoded(np.zeros(24_000), 24_000, "OGG")
    odd = {
        "cut": complete[:-40],
        "two": (tmp_path / "24000.ogg").read_bytes() + complete,
        "opus": opus,
        "silent": silent,
        "head": complete[:100],
        "none": b"",
    }
    for name, data in odd.items():
        (tmp_path / name).write_bytes(data)
        assert vorbis_size(Encoded.of_file(tmp_path / name)) is None, name
    with pytest.raises(DataError, match=r"it is silent, every sample is 0"):
        sound_size(tmp_path / "silent")
    with pytest.raises(DataError, match=r"it is truncated"):
        sound_size(tmp_path / "cut")
    assert sound_size(tmp_path / "opus")[1] == 48_000
