"""Synthesized audio clips for tests: texts as sequences of tones, in every record format."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.data.image_records import add, write_lines

#: The pitch of each letter, in Hz.
PITCHES = {"a": 300.0, "b": 520.0, "c": 900.0, "d": 1500.0}
WORDS = ("ab", "cd", "da")


def tones(word: str, seed: int, rate: int = 16_000, letter_s: float = 0.12) -> np.ndarray:
    """Return a tone for each letter, with some noise and a random level."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(letter_s * rate * rng.uniform(0.8, 1.2))) / rate
    parts = [np.sin(2 * np.pi * PITCHES[letter] * rng.uniform(0.97, 1.03) * time) for letter in word]
    wave = np.concatenate(parts) * rng.uniform(0.1, 0.6)
    return (wave + 0.01 * rng.standard_normal(len(wave))).astype(np.float32)


def encoded(wave: np.ndarray, rate: int = 16_000, form: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=form, subtype=subtype)
    return buffer.getvalue()


def spoken(count: int, seed: int = 0) -> list[tuple[bytes, str]]:
    """Return clips with their texts, of different rates and lengths."""
    rates = (16_000, 8000, 22_050)
    words = [WORDS[index % len(WORDS)] for index in range(count)]
    return [
        (encoded(tones(word, seed + index, rates[index % 2]), rates[index % 2], "FLAC"), word)
        for index, word in enumerate(words)
    ]


def sound_folder(root: Path, count: int = 6) -> Path:
    """Write `count` audio clips in a folder for each text, of several rates and formats."""
    for number, word in enumerate(WORDS):
        (root / word).mkdir(parents=True)
        for index in range(count):
            form, suffix = (("WAV", "wav"), ("FLAC", "flac"), ("OGG", "ogg"))[index % 3]
            rate = (16_000, 8000)[index % 2]
            wave = tones(word, 100 * number + index, rate, 0.1 + 0.02 * index)
            (root / word / f"{index}.{suffix}").write_bytes(encoded(wave, rate, form))
    return root


def as_tar(folder: Path, samples: list[tuple[bytes, str]], key: str) -> Path:
    suffix = {"label": "cls", "text": "txt"}[key]
    with tarfile.open(folder / "x.tar", "w") as tar:
        for index, (data, word) in enumerate(samples):
            add(tar, f"{index:04d}.flac", data)
            add(tar, f"{index:04d}.{suffix}", word.encode())
    return folder / "x.tar"


def as_paths(folder: Path, samples: list[tuple[bytes, str]], key: str) -> Path:
    for index, (data, _) in enumerate(samples):
        (folder / f"{index}.flac").write_bytes(data)
    return write_lines(
        folder / "x.jsonl", [{"audio": f"{index}.flac", key: word} for index, (_, word) in enumerate(samples)]
    )


def as_bytes(folder: Path, samples: list[tuple[bytes, str]], key: str) -> Path:
    records: list[dict[str, Any]] = [
        {"audio": {"bytes": base64.b64encode(data).decode()}, key: word} for data, word in samples
    ]
    return write_lines(folder / "x.jsonl", records)


def as_parquet(folder: Path, samples: list[tuple[bytes, str]], key: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"audio": [{"bytes": data, "path": None} for data, _ in samples], key: [word for _, word in samples]}
    )
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps({})}), folder / "x.parquet")
    return folder / "x.parquet"


FORMS = {"tar": as_tar, "paths": as_paths, "bytes": as_bytes, "parquet": as_parquet}
