"""Spoken numbers, days and months as shards, to see a run learn: Debian's `asterisk-core-sounds-en-wav`, unpacked.

    apt-get download asterisk-core-sounds-en-wav && dpkg-deb -x asterisk-core-sounds-en-wav_*.deb sounds
    python benchmarks/spoken_words.py sounds words
    weft train task=classify_audio task.options.data=words/train.tar task.options.eval=words/eval.tar

One voice says each of 94 words once. Training gets it at three speeds; the evaluation at four others, after a silence
of up to 0.3 s, softer or louder by up to 6 dB, and with white noise 10 dB below it. So what is measured is how well the
network knows the same recordings again when they are changed, not other voices.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
import soundfile
import soxr

TRAIN_SPEEDS, EVAL_SPEEDS = (0.9, 1.0, 1.1), (0.86, 0.95, 1.05, 1.14)


def changed(wave: np.ndarray, rate: int, speed: float, rng: np.random.Generator) -> np.ndarray:
    """A recording as the evaluation hears it."""
    faster = soxr.resample(wave, rate * speed, rate)
    louder = faster * 10 ** (rng.uniform(-6, 6) / 20)
    whole = np.concatenate((np.zeros(rng.integers(0, round(0.3 * rate))), louder))
    return whole + rng.standard_normal(len(whole)) * np.sqrt(np.mean(louder**2)) * 10 ** (-10 / 20)


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write(path: Path, words: list[Path], speeds: tuple[float, ...], is_changed: bool) -> int:
    rng, count = np.random.default_rng(0), 0
    with tarfile.open(path, "w") as tar:
        for word in words:
            wave, rate = soundfile.read(word)
            for speed in speeds:
                made = changed(wave, rate, speed, rng) if is_changed else soxr.resample(wave, rate * speed, rate)
                buffer = io.BytesIO()
                soundfile.write(buffer, made.clip(-1, 1), rate, format="FLAC")
                add(tar, f"{word.stem}-{round(100 * speed)}.flac", buffer.getvalue())
                add(tar, f"{word.stem}-{round(100 * speed)}.cls", f"word {word.stem}".encode())
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sounds", type=Path, help="folder that the package was unpacked into")
    parser.add_argument("out", type=Path, help="folder for train.tar and eval.tar")
    args = parser.parse_args()
    words = sorted(args.sounds.glob("**/digits/*.wav"))
    if not words:
        parser.error(f"{args.sounds}: it has no folder `digits` with .wav files; unpack the package there")
    args.out.mkdir(parents=True, exist_ok=True)
    trained = write(args.out / "train.tar", words, TRAIN_SPEEDS, False)
    held = write(args.out / "eval.tar", words, EVAL_SPEEDS, True)
    print(f"{len(words)} words: {trained} recordings to train on, {held} to evaluate")


if __name__ == "__main__":
    main()
