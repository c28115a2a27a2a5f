"""Pictures and sound from a tar shard to batches: Weft's pipeline beside torch's DataLoader, in turns.

    python benchmarks/media.py                 # two workers each, 2,000 pictures of 500 x 375, squares of 224
    python benchmarks/media.py --records 1000000 --index-only
    python benchmarks/media.py --sound OGG     # 600 recordings of 10 s at 24 kHz, log-mel bands of 16 kHz

Both draw a random crop and mirror half of the pictures. The rival reads the same stretches of the same tar with PIL and
hands over 8-bit pictures or normalised floats; where webdataset is installed, its pipeline is another one. The fastest
rival counts. The medians of the rounds are compared.

Of sound both decode with libsndfile, resample with soxr and make Whisper's bands; the rival with torch's stft, or with
transformers' extractor where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
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
import soundfile
import soxr
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import LogMel, mel_filters
from weft.data.media.audio_source import Sounds
from weft.data.media.decode_workers import DecodedAhead
from weft.data.media.files import RecordColumns
from weft.data.media.image_source import Pictures
from weft.data.media.images import Look
from weft.data.media.media_records import MediaRecords, find_records
from weft.data.media.records import SOUND
from weft.data.order.loader import Prefetch

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
        with Image.open(io.BytesIO(self.source.encoded(index).read_all())) as opened:
            picture = opened.convert("RGB")
        return self.seen(picture), self.source.label(index)

    def seen(self, picture: Image.Image) -> torch.Tensor:
        """A random crop of a picture, (3, side, side)."""
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
        return normalised(pixels) if self.is_float else pixels


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().sub_(MEAN).div_(STD)


def torch_batches(source: MediaRecords, args: argparse.Namespace, is_float: bool) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        Plain(source, args.side, is_float), args.batch, shuffle=True, num_workers=args.workers, drop_last=True
    )
    for pixels, _ in loader:
        yield pixels if is_float else normalised(pixels)


def webdataset_batches(shard: Path, source: MediaRecords, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """As its documentation has it: both workers read the shard, and each keeps its share of the samples."""
    import webdataset

    loaded = (
        webdataset.WebDataset(str(shard), shardshuffle=False, workersplitter=webdataset.single_node_only)
        .compose(lambda samples: itertools.islice(samples, *_own_part()))
        .shuffle(200)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(Plain(source, args.side, False).seen)
        .batched(args.batch, partial=False)
    )
    for pixels, _ in webdataset.WebLoader(loaded, batch_size=None, num_workers=args.workers):
        yield normalised(pixels)


def _own_part() -> tuple[int, None, int]:
    worker = get_worker_info()
    return worker.id, None, worker.num_workers


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


# --- sound ---

SOUND_S, SOUND_RATE, HEARD_RATE = 10.0, 24_000, 16_000


def write_sounds(path: Path, count: int, form: str) -> None:
    """Write a tar of recordings with the swell of speech, 16 of them over and over."""
    rng, time_s = np.random.default_rng(0), np.arange(round(SOUND_S * SOUND_RATE)) / SOUND_RATE
    made = []
    for index in range(16):
        voice = sum(np.sin(2 * np.pi * (110 + 5 * index) * step * time_s) / step for step in range(1, 20))
        swell = np.abs(np.sin(2 * np.pi * 1.3 * time_s)) ** 2
        wave = 0.1 * voice * swell + 0.01 * rng.standard_normal(len(time_s))
        buffer = io.BytesIO()
        soundfile.write(buffer, wave.clip(-1, 1), SOUND_RATE, format=form)
        made.append(buffer.getvalue())
    with tarfile.open(path, "w") as tar:
        for index in range(count):
            for suffix, data in ((form.lower(), made[index % 16]), ("cls", b"%d" % (index % 10))):
                member = tarfile.TarInfo(f"{index:07d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


class PlainSound(Dataset[Any]):
    """What a user of torch writes. extractor: transformers' of Whisper; None: torch's stft with the same filters."""

    def __init__(self, source: MediaRecords, extractor: Any):
        self.source, self.extractor = source, extractor
        self.filters, self.window = torch.from_numpy(mel_filters(HEARD_RATE, 80, 400)).float(), torch.hann_window(400)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        wave, own = soundfile.read(io.BytesIO(self.source.encoded(index).read_all()), dtype="float32")
        wave = soxr.resample(wave, own, HEARD_RATE)
        if self.extractor is not None:
            found = self.extractor(wave, sampling_rate=HEARD_RATE, padding="do_not_pad", return_tensors="pt")
            return found["input_features"][0], self.source.label(index)
        spectrum = torch.stft(torch.from_numpy(wave), 400, 160, window=self.window, return_complex=True)
        bands = (self.filters @ spectrum[:, :-1].abs() ** 2).clamp(min=1e-10).log10()
        return (torch.maximum(bands, bands.max() - 8.0) + 4.0) / 4.0, self.source.label(index)


def torch_sounds(source: MediaRecords, args: argparse.Namespace, extractor: Any) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        PlainSound(source, extractor), args.batch, shuffle=True, num_workers=args.workers, drop_last=True
    )
    for bands, _ in loader:
        yield bands


class SoundSteps(Steps):
    """Batches of bands by step, as a run has them."""

    def __init__(self, source: MediaRecords, args: argparse.Namespace):
        sounds = Sounds(source, AudioTransform(HEARD_RATE, SOUND_S), LogMel(), 0)
        self.samples, self.size = DecodedAhead(sounds, args.workers), args.batch
        self.order = np.random.default_rng(0).permutation(len(source)).tolist()

    def batches(self, step: int) -> list[torch.Tensor]:
        samples = self.samples.many(self.keys(step), self.keys(step + 1))
        return [torch.from_numpy(np.stack([bands for bands, _ in samples]))]


def weft_sounds(source: MediaRecords, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    steps = SoundSteps(source, args)
    with closing(steps.samples), Prefetch(steps, 0, len(source) // args.batch) as found:
        for [batch] in found:
            yield batch


def seconds_a_core(source: MediaRecords, count: int = 48) -> dict[str, float]:
    """Seconds of sound that one core does in a second: decoding alone, and all of it."""
    sounds = Sounds(source, AudioTransform(HEARD_RATE, SOUND_S), LogMel(), 0)
    found = {}
    for name, act in (
        ("decoded", lambda index: soundfile.read(io.BytesIO(source.encoded(index).read_all()), dtype="float32")),
        ("heard, with bands", lambda index: sounds.decoded(0, index)),
    ):
        began = time.process_time()
        for index in range(count):
            act(index)
        found[f"x real time a core, {name}"] = round(count * SOUND_S / (time.process_time() - began))
    return found


def cpu_s() -> float:
    """Seconds of processors that this process and those that it has ended used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def sound_figures(source: MediaRecords, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of sound a second through both pipelines."""
    try:
        from transformers import WhisperFeatureExtractor

        extractor = WhisperFeatureExtractor()
    except ImportError:
        extractor = None
    makers: dict[str, Any] = {
        "weft": lambda: weft_sounds(source, args),
        "torch, stft": lambda: torch_sounds(source, args, None),
        **({"torch, transformers": lambda: torch_sounds(source, args, extractor)} if extractor is not None else {}),
    }
    rates: dict[str, list[float]] = {name: [] for name in makers}
    cores: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(args.rounds):
        for name, make in makers.items():
            before = cpu_s()
            rates[name].append(SOUND_S * rate(make(), torch.Tensor.sum))
            cores[name].append(SOUND_S * len(source) / (cpu_s() - before))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    best = max(median for name, median in medians.items() if name != "weft")
    found = {f"x real time, {name}": round(median) for name, median in medians.items()}
    found |= {f"x real time a core in use, {name}": round(statistics.median(each)) for name, each in cores.items()}
    return {**seconds_a_core(source), **found, "ratio": round(medians["weft"] / best, 3)}


def picture_figures(shard: Path, source: MediaRecords, args: argparse.Namespace) -> dict[str, Any]:
    """Pictures a second through all pipelines."""
    makers: dict[str, Any] = {
        "weft": lambda: weft_batches(source, args),
        "torch, 8 bits": lambda: torch_batches(source, args, False),
        "torch, floats": lambda: torch_batches(source, args, True),
    }
    if importlib.util.find_spec("webdataset"):
        makers["webdataset"] = lambda: webdataset_batches(shard, source, args)
    rates: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(args.rounds):
        for name, make in makers.items():
            rates[name].append(rate(make(), torch.Tensor.sum))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    best = max(median for name, median in medians.items() if name != "weft")
    return {name: round(each, 1) for name, each in medians.items()} | {"ratio": round(medians["weft"] / best, 3)}


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
    parser.add_argument("--sound", choices=("FLAC", "OGG", "WAV", "MP3"), help="recordings of this format")
    args = parser.parse_args()
    if args.sound:
        args.records, args.batch = min(args.records, 600) if not args.index_only else args.records, min(args.batch, 16)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "shard.tar"
        size = (16, 12) if args.index_only else (args.width, args.width * 3 // 4)
        if args.sound:
            write_sounds(shard, args.records, args.sound)
        else:
            write_shard(shard, args.records, size)
        before, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        columns = RecordColumns(kind=SOUND) if args.sound else RecordColumns()
        source = find_records(str(shard), [shard], columns, Path(folder) / "cache", None)
        found = {
            "records": len(source),
            "records_per_cpu_s": round(len(source) / (time.process_time() - cpu)),
            "index_grew_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        }
        if args.sound and not args.index_only:
            found |= sound_figures(source, args)
        elif not args.index_only:
            found |= picture_figures(shard, source, args)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
