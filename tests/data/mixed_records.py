"""Samples of images, synthesized audio and text for tests, in every record format."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.audio_clips import WORDS, encoded, tones
from tests.data.image_records import add, write_lines

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def picture(colour: str, seed: int) -> bytes:
    noise = np.random.default_rng(seed).normal(0, 20, (20, 24, 3))
    pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def sound(word: str, seed: int) -> bytes:
    return encoded(tones(word, seed, letter_s=0.1), form="FLAC")


def mixed(count: int, kinds: int = 5) -> list[dict[str, Any]]:
    """Return samples with images and audio clips as bytes: one image, one audio, two images, none, a chat with one."""
    colours, found = list(COLOURS), list[dict[str, Any]]()
    for index in range(count):
        colour, word = colours[index % 3], WORDS[index // 3 % 3]
        found.append(
            (
                {"images": [picture(colour, index)], "text": colour},
                {"audios": [sound(word, index)], "text": word},
                {"images": [picture(colour, index), picture("red", index + 500)], "text": f"{colour} red"},
                {"text": "only text"},
                {
                    "images": [picture(colour, index)],
                    "messages": [
                        {"role": "user", "content": "Which is <image>?"},
                        {"role": "assistant", "content": colour},
                    ],
                },
            )[index % kinds]
        )
    return found


def as_tar(folder: Path, samples: list[dict[str, Any]]) -> Path:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for index, sample in enumerate(samples):
            for number, data in enumerate(sample.get("images", ())):
                add(tar, f"{index:04d}.{number}.png", data)
            for number, data in enumerate(sample.get("audios", ())):
                add(tar, f"{index:04d}.{number}.flac", data)
            rest = {name: value for name, value in sample.items() if name not in ("images", "audios")}
            add(tar, f"{index:04d}.json", json.dumps(rest).encode())
    return folder / "x.tar"


def as_bytes(folder: Path, samples: list[dict[str, Any]]) -> Path:
    def lines(sample: dict[str, Any]) -> dict[str, Any]:
        held = {
            name: [f"data:x;base64,{base64.b64encode(data).decode()}" for data in sample[name]]
            for name in ("images", "audios")
            if name in sample
        }
        return {**sample, **held}

    return write_lines(folder / "x.jsonl", [lines(sample) for sample in samples])


def as_paths(folder: Path, samples: list[dict[str, Any]]) -> Path:
    """Write media to separate files. Chats have contents of parts."""
    records = []
    for index, sample in enumerate(samples):
        record = dict(sample)
        for name, suffix in (("images", "png"), ("audios", "flac")):
            for number, data in enumerate(sample.get(name, ())):
                (folder / f"{index}.{number}.{suffix}").write_bytes(data)
            if name in sample:
                record[name] = [f"{index}.{number}.{suffix}" for number in range(len(sample[name]))]
        if "messages" in sample:
            before, after = sample["messages"][0]["content"].split("<image>")
            parts = [
                {"type": "text", "text": before},
                {"type": "image", "image": record.pop("images")[0]},
                {"type": "text", "text": after},
            ]
            record["messages"] = [{"role": "user", "content": parts}, sample["messages"][1]]
        records.append(record)
    return write_lines(folder / "x.jsonl", records)


def as_parquet(folder: Path, samples: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("images", "audios", "text", "messages")
    pq.write_table(pa.table({name: [one.get(name) for one in samples] for name in names}), folder / "x.parquet")
    return folder / "x.parquet"


FORMS = {"tar": as_tar, "bytes": as_bytes, "paths": as_paths, "parquet": as_parquet}
