"""The same colored images in every record format, for tests."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path

from tests.data.image_folders import COLOURS, picture


def png(colour: str, seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(COLOURS[colour], seed).save(buffer, "PNG")
    return buffer.getvalue()


def labelled(count: int) -> list[tuple[bytes, str]]:
    names = list(COLOURS)
    return [(png(names[index % 3], index), names[index % 3]) for index in range(count)]


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tar(path: Path, samples: list[tuple[bytes, str]], first: int = 0) -> Path:
    with tarfile.open(path, "w") as tar:
        for index, (data, label) in enumerate(samples, first):
            add(tar, f"a/{index:04d}.png", data)
            add(tar, f"a/{index:04d}.cls", label.encode())
    return path


def write_lines(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_tars(folder: Path, samples: list[tuple[bytes, str]]) -> Path:
    half = len(samples) // 2
    write_tar(folder / "0.tar", samples[:half])
    write_tar(folder / "1.tar", samples[half:], half)
    return folder


def as_lines_with_paths(folder: Path, samples: list[tuple[bytes, str]]) -> Path:
    for index, (data, _) in enumerate(samples):
        (folder / f"{index}.png").write_bytes(data)
    return write_lines(
        folder / "x.jsonl", [{"file_name": f"{i}.png", "label": label} for i, (_, label) in enumerate(samples)]
    )


def as_lines_with_bytes(folder: Path, samples: list[tuple[bytes, str]]) -> Path:
    encoded = [(base64.b64encode(data).decode(), label) for data, label in samples]
    return write_lines(folder / "x.jsonl", [{"image": {"bytes": data}, "label": label} for data, label in encoded])


def as_parquet(folder: Path, samples: list[tuple[bytes, str]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(COLOURS)
    table = pa.table(
        {
            "image": [{"bytes": data, "path": None} for data, _ in samples],
            "label": [names.index(label) for _, label in samples],
        }
    )
    features = {"label": {"names": names}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, folder / "x.parquet", row_group_size=5)
    return folder / "x.parquet"


FORMS = {
    "tar": as_tars,
    "paths": as_lines_with_paths,
    "bytes": as_lines_with_bytes,
    "parquet": as_parquet,
}
