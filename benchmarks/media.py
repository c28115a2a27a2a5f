"""Pictures from a tar shard to normalised batches: Weft's pipeline beside torch's DataLoader, in turns.

    python benchmarks/media.py                 # two workers each, 2,000 pictures of 500 x 375, squares of 224
    python benchmarks/media.py --records 1000000 --index-only

Both draw a random crop and mirror half of the pictures. The rival reads the same stretches of the same tar with PIL and
hands over 8-bit pictures or normalised floats; the faster of the two counts. The medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from weft.data import Prefetch
from weft.data.media import DecodedAhead, Look, Pictures, RecordColumns, MediaRecords, find_records

MEAN = torch.tensor((123.675, 116.28, 103.53)).view(3, 1, 1)
STD = torch.tensor((58.395, 57.12, 57.375)).view(3, 1, 1)


def write_shard(path: Path, count: int, size: tuple[int, int]) -> None:
    """Write a tar of JPEGs with the grain of photographs, 16 of them over and over."""
    rng = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(size[1]), np.arange(size[0]))[..., None] * 200.0 / sum(size)
    encoded = []
    for index in range(16):
        buffer = io.BytesIO()
        pixels = ramp + rng.normal(0, 14, (size[1], size[0], 3)) + 3 * index
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
        encoded.append(buffer.getvalue())
    with tarfile.open(path, "w") as tar:
        for index in range(count):
            for suffix, data in (("jpg", encoded[index % 16]), ("cls", b"%d" % (index % 10))):
                member = tarfile.TarInfo(f"{index:07d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


class Plain(Dataset[Any]):
    """What a user of torch writes: PIL decodes, crops and resizes. is_float: workers normalise."""

    def __init__(self, source: MediaRecords, side: int, is_float: bool):
        self.source, self.side, self.is_float = source, side, is_float

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(self.source.encoded(index).whole())) as opened:
            picture = opened.convert("RGB")
        share, ratio, left, top, mirrored = torch.rand(5).tolist()
        area, ratio = picture.width * picture.height * (0.35 + 0.65 * share), 0.75 + 0.58 * ratio
        width, height = min(picture.width, (area * ratio) ** 0.5), min(picture.height, (area / ratio) ** 0.5)
        left, top = left * (picture.width - width), top * (picture.height - height)
        picture = picture.resize(
            (self.side, self.side), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height)
        )
        if mirrored < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        return (normalised(pixels) if self.is_float else pixels), self.source.label(index)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().sub_(MEAN).div_(STD)


def torch_batches(source: MediaRecords, args: argparse.Namespace, is_float: bool) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        Plain(source, args.side, is_float), args.batch, shuffle=True, num_workers=args.workers, drop_last=True
    )
    for pixels, _ in loader:
        yield pixels if is_float else normalised(pixels)


class Steps:
    """Batches by step, as a run has them: built in a thread, with the next step's pictures in view."""

    def __init__(self, source: MediaRecords, args: argparse.Namespace):
        pictures = Pictures(source, Look(args.side, crops=True, mirrors=True), 0)
        self.samples, self.size = DecodedAhead(pictures, args.workers), args.batch
        self.order = np.random.default_rng(0).permutation(len(source)).tolist()

    def keys(self, step: int) -> list[tuple[int, int]]:
        return [(0, index) for index in self.order[step * self.size : (step + 1) * self.size]]

    def batches(self, step: int) -> list[torch.Tensor]:
        samples = self.samples.many(self.keys(step), self.keys(step + 1))
        values = np.stack([pixels for pixels, _ in samples]).astype(np.float32)  # as the task on pictures does it
        values -= MEAN.numpy()
        values /= STD.numpy()
        return [torch.from_numpy(values)]


def weft_batches(source: MediaRecords, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    steps = Steps(source, args)
    with closing(steps.samples), Prefetch(steps, 0, len(source) // args.batch) as found:
        for [batch] in found:
            yield batch


def rate(batches: Iterator[torch.Tensor], consume: Any) -> float:
    """Pictures a second, from the second batch on: the first waits for processes to start."""
    count = len(next(batches)) * 0
    began = time.perf_counter()
    for batch in batches:
        count += len(batch)
        consume(batch)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("records", 2000), ("workers", 2), ("batch", 64), ("side", 224), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--index-only", action="store_true", help="measure the index alone, of small pictures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "shard.tar"
        size = (16, 12) if args.index_only else (args.width, args.width * 3 // 4)
        write_shard(shard, args.records, size)
        before, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        source = find_records(str(shard), [shard], RecordColumns(), Path(folder) / "cache", None)
        found = {
            "records": len(source),
            "records_per_cpu_s": round(len(source) / (time.process_time() - cpu)),
            "index_grew_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        }
        if not args.index_only:
            rates: dict[str, list[float]] = {"weft": [], "torch, 8 bits": [], "torch, floats": []}
            for _ in range(args.rounds):
                rates["weft"].append(rate(weft_batches(source, args), torch.Tensor.sum))
                rates["torch, 8 bits"].append(rate(torch_batches(source, args, False), torch.Tensor.sum))
                rates["torch, floats"].append(rate(torch_batches(source, args, True), torch.Tensor.sum))
            found |= {name: round(statistics.median(each), 1) for name, each in rates.items()}
            found["ratio"] = round(found["weft"] / max(found["torch, 8 bits"], found["torch, floats"]), 3)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
