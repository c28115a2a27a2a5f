"""Does `weft train` learn from real pictures and sound? Three runs from new weights, told by what they hold out.

    python benchmarks/learning.py digits            # scikit-learn's 1,797 written digits, resnet18
    python benchmarks/learning.py stamps FOLDER     # Debian's tuxpaint-stamps-default, unpacked: pictures and captions
    python benchmarks/learning.py spoken FOLDER     # Debian's asterisk-core-sounds-en-wav, unpacked: seen or said

digits: every fifth is held out; the share named right. stamps: every tenth stamp is held out with its caption; recall
at 5 of `task=contrast`, beside chance. spoken: omni-tiny writes the name of a digit that it sees or hears. One voice
says each digit once: training hears it at seven speeds, the evaluation at four others, shifted, softer or louder and
with noise 10 dB below, so that half tells of the same recordings changed, not of other voices.

Settings after the case override those of the run: train.epochs=40 plan="dp_replicate=2". Needs scikit-learn, Pillow,
soundfile and soxr.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr
from PIL import Image
from spoken_words import EVAL_SPEEDS, add, changed

from weft.monitor.events import read_events

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEEDS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
#: Bytes of a caption, and in which languages beside English training gets them.
LONGEST, LANGUAGES = 60, ("ca", "da", "de", "es", "fr", "it", "nl", "pt", "ro", "sv")
HELD_SPEEDS = tuple(speed + 0.02 for speed in EVAL_SPEEDS)

#: The files of one sample: by suffix, what is in them.
Files = dict[str, bytes]


def written_digits() -> Iterator[tuple[bytes, int, bool]]:
    """Pictures of digits, what each is, and whether it is held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for number, (values, digit) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        buffer = io.BytesIO()
        Image.fromarray((values * 255 / 16).astype(np.uint8)).save(buffer, format="PNG")
        yield buffer.getvalue(), int(digit), number % 5 == 4


def said_digits(folder: Path, held_out: bool) -> Iterator[tuple[bytes, int]]:
    """Recordings of digits, and what each says; of those held out, as many again with other noise."""
    rng = np.random.default_rng(0)
    for digit in range(10):
        (file,) = folder.glob(f"**/digits/{digit}.wav")
        wave, rate = soundfile.read(file)
        for speed in HELD_SPEEDS * 9 if held_out else SPEEDS:
            made = changed(wave, rate, speed, rng) if held_out else soxr.resample(wave, rate * speed, rate)
            buffer = io.BytesIO()
            soundfile.write(buffer, made.clip(-1, 1), rate, format="FLAC")
            yield buffer.getvalue(), digit


def digits(folder: Path | None) -> dict[bool, list[Files]]:
    """Samples of the case, those held out under True."""
    found: dict[bool, list[Files]] = {False: [], True: []}
    for picture, digit, held_out in written_digits():
        found[held_out].append({".png": picture, ".cls": str(digit).encode()})
    return found


def stamps(folder: Path | None) -> dict[bool, list[Files]]:
    """Each stamp whose English caption no earlier one has; training gets it with captions in other languages too."""
    found: dict[bool, list[Files]] = {False: [], True: []}
    seen = set[str]()
    for file in sorted(need(folder).rglob("*.png")):
        words = file.with_suffix(".txt")
        lines = words.read_text("utf-8", "replace").splitlines() if words.is_file() else []
        caption = lines[0].strip() if lines else ""
        if not caption or caption in seen:
            continue
        held_out = len(seen) % 10 == 9
        seen.add(caption)
        others = [line.partition("=")[2].strip() for line in lines[1:] if line.partition(".")[0] in LANGUAGES]
        texts = {caption} if held_out else {caption, *others}
        short = sorted(text for text in texts if 0 < len(text.encode()) <= LONGEST)
        found[held_out] += [{".png": file.read_bytes(), ".txt": text.encode()} for text in short]
    return found


def spoken(folder: Path | None) -> dict[bool, list[Files]]:
    """Digits to see and digits to hear, each with its name."""
    found: dict[bool, list[Files]] = {False: [], True: []}
    for picture, digit, held_out in written_digits():
        found[held_out].append({".png": picture, ".txt": NAMES[digit].encode()})
    for held_out in (False, True):
        for sound, digit in said_digits(need(folder), held_out):
            # Seven recordings of a digit beside 144 pictures: each is heard ten times an epoch.
            found[held_out] += [{".flac": sound, ".txt": NAMES[digit].encode()}] * (1 if held_out else 10)
    return found


def need(folder: Path | None) -> Path:
    if folder is None or not folder.is_dir():
        raise SystemExit(f"learning.py: {folder}: it is no folder; unpack the package there.")
    return folder


CASES = {
    "digits": (
        digits,
        "task=classify task.options.model=resnet18 task.options.side=16 task.options.augment=false train.epochs=12 "
        "train.global_batch=32 train.norm_group=32 optimizer.name=sgd optimizer.lr=0.02 optimizer.momentum=0.9 "
        "optimizer.weight_decay=5e-4",
    ),
    "stamps": (
        stamps,
        "task=contrast task.options.model=vlm-tiny task.options.side=32 task.options.dropout=0.1 "
        "task.options.colour=0.3 train.epochs=6 train.global_batch=64 optimizer.lr=1e-3",
    ),
    "spoken": (
        spoken,
        "task=caption task.options.model=omni-tiny task.options.side=32 task.options.rate=8000 "
        "task.options.seconds=2 task.options.gain=6 task.options.noise=0.3 task.options.masks=1 "
        "task.options.augment=false train.epochs=8 train.global_batch=32 optimizer.lr=1e-3",
    ),
}


def write(path: Path, samples: list[Files]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, files in enumerate(samples):
            for suffix, data in files.items():
                add(tar, f"{number:05d}{suffix}", data)


def main() -> None:
    """Train, and print what the last evaluation found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", nargs="?", type=Path)
    options, settings = parser.parse_known_args()
    if options.folder and "=" in str(options.folder):
        options.folder, settings = None, [str(options.folder), *settings]
    make, usual = CASES[options.case]
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        samples = make(options.folder)
        write(root / "train.tar", samples[False])
        write(root / "eval.tar", samples[True])
        words = [
            *usual.split(), f"task.options.data={root / 'train.tar'}", f"task.options.eval={root / 'eval.tar'}",
            f"run.dir={root}", "run.name=run", f"data.cache_dir={root / 'cache'}", "eval.batches=99", *settings,
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "weft", "train", *words], check=True, stdout=sys.stderr)
        told = [event for event in read_events(root / "run" / "events.jsonl") if event.get("event") == "eval"]
        head = {"case": options.case, "trained": len(samples[False]), "held_out": len(samples[True])}
        if options.case == "stamps":
            head["chance_at_5"] = round(5 / len(samples[True]), 4)
        print(json.dumps(head | told[-1]))


if __name__ == "__main__":
    main()
