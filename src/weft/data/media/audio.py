"""The length of an Ogg Vorbis file from its first and last pages (RFC 3533; Vorbis I specification, 4.2.2).

libsndfile unpacks the codec's tables to open a file, which takes longer than all else that an index asks. What is not
quite plain is left to it: another codec, several streams, a start that is not 0, few bytes for its length.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.images import Encoded
from weft.data.media.records import generator_of
from weft.errors import DataError, MissingExtra, WeftError

#: A page is at most so long.
PAGE_BYTES = 65_307
_HEAD_BYTES = 16_384
#: Silence takes a few bytes a packet; a file with more for each second has sound in it.
_SOUND_BYTES_A_S = 1000
_PAGE = struct.Struct("<4sBBqIIIB")


@dataclass(frozen=True, slots=True)
class _Page:
    """start, end: of the page. body: of what it holds. granule: samples up to its end. packets: that end in it."""

    start: int
    body: int
    end: int
    granule: int
    serial: int
    packets: int


def vorbis_size(encoded: Encoded) -> tuple[int, int, int] | None:
    """Return frames, frames a second and channels of a plain Vorbis file that is whole and has sound in it.

    encoded: the recording.

    Returns None for everything else.

    Raises:
        DataError: where the file cannot be read.
    """
    head = encoded.part(0, _HEAD_BYTES)
    first = _page_at(head, 0)
    if first is None or head[first.body : first.body + 7] != b"\x01vorbis" or len(head) < first.body + 30:
        return None
    channels, rate = struct.unpack_from("<BI", head, first.body + 11)
    most_of_packet = 1 << (head[first.body + 28] >> 4)
    sound, size = _first_sound(head, first), encoded.size()
    last = _last_page(encoded, size)
    if sound is None or last is None or not channels or not rate:
        return None
    has_plain_start = 0 < sound.granule <= sound.packets * most_of_packet // 2
    is_one_stream = first.serial == sound.serial == last.serial
    if not (has_plain_start and is_one_stream and last.end == size and last.granule >= sound.granule):
        return None
    seconds = last.granule / rate
    return (last.granule, rate, channels) if size - sound.start > _SOUND_BYTES_A_S * seconds else None


def _page_at(data: bytes, at: int) -> _Page | None:
    """The page that begins at a place; None: there is none, or not all of its table."""
    if len(data) < at + _PAGE.size:
        return None
    mark, version, _, granule, serial, _, _, count = _PAGE.unpack_from(data, at)
    table = data[at + _PAGE.size : at + _PAGE.size + count]
    if mark != b"OggS" or version or len(table) < count:
        return None
    body = at + _PAGE.size + count
    return _Page(at, body, body + sum(table), granule, serial, sum(size < 255 for size in table))


def _first_sound(head: bytes, first: _Page) -> _Page | None:
    """The first page with samples, behind the three packets of headers."""
    packets, page = first.packets, _page_at(head, first.end)
    while page is not None and packets + page.packets <= 3 and page.granule <= 0:
        packets, page = packets + page.packets, _page_at(head, page.end)
    return page if packets == 3 else None


def _last_page(encoded: Encoded, size: int) -> _Page | None:
    start = max(0, size - PAGE_BYTES)
    tail = encoded.part(start, PAGE_BYTES)
    at = tail.rfind(b"OggS")
    page = _page_at(tail, at) if at >= 0 else None
    if page is None:
        return None
    return _Page(page.start + start, page.body + start, page.end + start, page.granule, page.serial, page.packets)


# One recording: its length from its header, and some of its samples.

#: Frames a second that a recording may have.
RATES = range(1000, 768_001)
#: Frames that are looked at for a sample that is not 0, first and at most.
_FIRST_BLOCK, _LARGEST_BLOCK = 256, 65536
#: First bytes of the formats that libsndfile may open; it has decoders for many more, some hardly ever used.
_MAGIC = (
    b"RIFF", b"RIFX", b"RF64", b"riff", b"fLaC", b"OggS", b"FORM", b".snd", b"dns.", b"caff", b"ID3", b"NIST",
    *(bytes((0xFF, second)) for second in range(0xE0, 0x100)),  # frames of MP3
)  # fmt: skip
_MAX_CHANNELS = 64
#: Values that are looked at for one that is not 0.
_MAX_SILENCE = 2**28
#: A header that promises more does not know.
_MOST_FRAMES = 2**48
#: Sizes that programs write where they do not know how much will follow.
_OPEN_ENDED = 0x7FFFF000


def soundfile() -> Any:
    """Return the soundfile module.

    Raises:
        MissingExtra: where it is not installed.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is not there
        raise MissingExtra("soundfile", "media", "a folder of recordings") from error
    return soundfile


def sound_size(source: Path | Encoded) -> tuple[int, int, int]:
    """Return frames, frames a second and channels, from the header and the first samples that are not 0.

    Raises:
        DataError: where the file is no sound, has no samples, is cut off, or is silent from end to end.
    """
    encoded = source if isinstance(source, Encoded) else Encoded.of_file(source)
    plain = vorbis_size(encoded)
    if plain is not None and plain[1] in RATES:
        return plain
    with _opened(encoded) as sound:
        frames, rate, channels = sound.frames, sound.samplerate, sound.channels
        if _is_truncated(encoded, sound):
            raise DataError(f"{encoded.name}: it is cut off. Copy it again, or delete it.")
        if frames <= 0:
            raise DataError(f"{encoded.name}: it has no samples. Delete it.")
        if frames >= _MOST_FRAMES:
            raise DataError(f"{encoded.name}: its header does not say how long it is. Write it again.")
        if channels > _MAX_CHANNELS:
            raise DataError(f"{encoded.name}: it has {channels} channels, more than {_MAX_CHANNELS}. Mix it down.")
        if rate not in RATES:
            raise DataError(
                f"{encoded.name}: it has {rate} frames a second, and {RATES.start} to {RATES.stop - 1} can be read. "
                "Resample it."
            )
        _refuse_silence(sound, frames, encoded.name)
        if sound.format == "FLAC" and not _has_last_frame(sound):
            raise DataError(f"{encoded.name}: it is cut off. Copy it again, or delete it.")
    return frames, rate, channels


def read_frames(encoded: Encoded, start: int, count: int) -> NDArray[np.float32]:
    """Return some frames of a recording, (count, channels), full scale as 1.

    Args:
        encoded: the recording.
        start: of the first.
        count: how many.

    Raises:
        DataError: where they cannot be decoded, or are not numbers.
    """
    with _opened(encoded) as sound:
        if start:
            sound.seek(start)
        found = sound.read(count, dtype="float32", always_2d=True)
    if len(found) < count:
        raise DataError(
            f"{encoded.name}: it ends {count - len(found)} frames before its header says. Copy it again, or delete it."
        )
    if not np.isfinite(found).all():
        raise DataError(f"{encoded.name}: it holds samples that are no finite numbers. Repair it, or delete it.")
    return found


class _Stream(io.RawIOBase):
    """Bytes of a recording, read where they lie as the decoder asks for them."""

    def __init__(self, encoded: Encoded):
        self.fault: DataError | None = None
        self._encoded, self._at, self._size = encoded, 0, encoded.size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._encoded.part(self._at, len(buffer))
        except DataError as error:  # a library written in C calls, which knows no exceptions
            self.fault, found = error, b""
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


@cache
def _reader(library: Any) -> Any:
    """A SoundFile that does not seek to where it is after each read, which costs the decoders more than a header."""

    class Reader(library.SoundFile):
        def seekable(self) -> bool:
            return False

    return Reader


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Any]:
    """An open recording. DataError where it, or what is done with it, cannot be read."""
    library = soundfile()
    stream = _Stream(encoded)
    if not encoded.size():
        raise DataError(f"{encoded.name}: it cannot be read as sound (it is empty). Repair it, or delete it.")
    if not encoded.part(0, 4).startswith(_MAGIC):
        raise DataError(f"{encoded.name}: it cannot be read as sound (no known format). Repair it, or delete it.")
    try:
        with _reader(library)(stream) as sound:
            yield sound
    except WeftError:
        raise
    except Exception as error:  # soundfile raises assertions and errors of cffi too
        if stream.fault is not None:
            raise stream.fault from error
        said = str(getattr(error, "error_string", error)).strip().rstrip(".")
        why = "no known format" if "not recognised" in said or "unknown format" in said.lower() else said
        raise DataError(f"{encoded.name}: it cannot be read as sound ({why}). Repair it, or delete it.") from error


def _refuse_silence(sound: Any, frames: int, name: str) -> None:
    """Read up to the first sample that is not 0."""
    done, size = 0, _FIRST_BLOCK
    while done < min(frames, _MAX_SILENCE // sound.channels):
        block = sound.read(size, dtype="float32")
        if not len(block):
            raise DataError(f"{name}: it is cut off. Copy it again, or delete it.")
        if block.any():
            return
        done, size = done + len(block), min(4 * size, _LARGEST_BLOCK)
    which = "every sample" if done >= frames else f"each of the first {done:,} samples"
    raise DataError(f"{name}: it is silent, {which} is 0. Delete it.")


def _is_truncated(encoded: Encoded, sound: Any) -> bool:
    """Whether the file ends before its own tables say, in the formats that have some."""
    if sound.format in ("WAV", "WAVEX"):
        return _chunk_end(encoded, "<", b"data") > encoded.size()
    if sound.format == "AIFF":
        return _chunk_end(encoded, ">", b"SSND") > encoded.size()
    if sound.format == "OGG":
        return _last_page_end(encoded) > encoded.size()
    if sound.format in ("MP3", "MPEG"):
        return _frames_end(encoded) > encoded.size()
    return False


def _has_last_frame(sound: Any) -> bool:
    try:
        sound.seek(sound.frames - 1)
        return len(sound.read(1)) == 1
    except soundfile().SoundFileError:
        return False


def _chunk_end(encoded: Encoded, order: str, wanted: bytes) -> int:
    """Where the chunk of samples ends by its own size, in a file of chunks; 0 where it does not say."""
    at = 12
    while len(head := encoded.part(at, 8)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        if name == wanted:
            return 0 if size >= _OPEN_ENDED else at + 8 + size
        at += 8 + size + size % 2
    return 0


def _last_page_end(encoded: Encoded) -> int:
    """Where the last page of an Ogg file ends by its own table; 0 where none is found."""
    start = max(0, encoded.size() - 2 * PAGE_BYTES)
    tail = encoded.part(start, 2 * PAGE_BYTES)
    at = tail.rfind(b"OggS")
    if at < 0:
        return 0
    if len(tail) < at + 27:
        return encoded.size() + 1
    table = tail[at + 27 : at + 27 + tail[at + 26]]
    return start + at + 27 + tail[at + 26] + sum(table)


def _frames_end(encoded: Encoded) -> int:
    """Where the frames of an MP3 end by the table that encoders put into the first; 0 where there is none."""
    head = encoded.part(0, 10)
    start = 0
    if head[:3] == b"ID3" and len(head) == 10:  # tags, with 7 bits of their length in each of four bytes
        start = 10 + sum((byte & 127) << 7 * (3 - place) for place, byte in enumerate(head[6:10]))
    first = encoded.part(start, 256)
    at = max(first.find(b"Xing"), first.find(b"Info"))
    if at < 0 or len(first) < at + 16:
        return 0
    flags, _, size = struct.unpack(">III", first[at + 4 : at + 16])
    return start + size if flags & 3 == 3 else 0


# What is heard of a recording: one channel at one rate, at most so many seconds, with changes drawn by a key.

#: A mask covers at most this share of the frames, and this share of the bands.
_TIME_SHARE, _BAND_SHARE = 0.125, 0.25


@dataclass(frozen=True, slots=True)
class AudioTransform:
    """How a recording is heard.

    rate: samples a second. seconds: heard of it at most. crops: a random part is taken of a longer one, in place of its
    middle. gain: it becomes up to so many dB louder or softer. noise: white noise is added, of up to this share of the
    recording's own level. masks: so many stretches of time, and as many of pitch, are hidden (SpecAugment, arXiv
    1904.08779).
    """

    rate: int
    seconds: float
    crops: bool = False
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0

    @property
    def most_samples(self) -> int:
        """Return how many samples are heard at most."""
        return round(self.seconds * self.rate)


def soxr() -> Any:
    """Return the soxr module, which resamples.

    Raises:
        MissingExtra: where it is not installed.
    """
    try:
        import soxr
    except ImportError as error:
        raise MissingExtra("soxr", "media", "recordings of another rate") from error
    return soxr


def hear(
    encoded: Encoded, size: tuple[int, ...], hearing: AudioTransform, key: tuple[int | str, ...] = ()
) -> NDArray[np.float32]:
    """Return samples of a recording, full scale as 1: the mean of its channels, resampled. No more of it is decoded.

    Args:
        encoded: the recording.
        size: its frames, frames a second and channels.
        hearing: how it is heard.
        key: what is drawn follows from it.

    Raises:
        DataError: where it cannot be decoded.
        MissingExtra: where its rate differs, and soxr is not installed.
    """
    frames, rate, _ = size
    rng = generator_of(key)
    wanted = min(frames, round(hearing.seconds * rate))
    place = rng.random() if hearing.crops else 0.5
    found = read_frames(encoded, round(place * (frames - wanted)), wanted)
    wave = found[:, 0] if found.shape[1] == 1 else found.mean(1, dtype=np.float32)
    if rate != hearing.rate:
        wave = np.asarray(soxr().resample(wave, rate, hearing.rate, quality="HQ"), np.float32)
    wave = np.ascontiguousarray(wave[: hearing.most_samples])
    if hearing.gain:
        wave = wave * np.float32(10.0 ** (rng.uniform(-hearing.gain, hearing.gain) / 20.0))
    if hearing.noise:
        level = np.sqrt(np.mean(np.square(wave, dtype=np.float64))) * rng.uniform(0.0, hearing.noise)
        wave = wave + rng.standard_normal(len(wave), np.float32) * np.float32(level)
    return wave


def masked(
    features_MT: NDArray[np.float32], count: int, num_frames: int, key: tuple[int | str, ...]
) -> NDArray[np.float32]:
    """Return features of which some stretches of time and of pitch have the mean of all, in place.

    Args:
        features_MT: bands, then frames.
        count: of the stretches, each.
        num_frames: of the recording; those after are filled up.
        key: where they lie follows from it.
    """
    rng = generator_of((*key, "masks"))
    heard = features_MT[:, :num_frames]
    mean = heard.mean(dtype=np.float64).astype(np.float32)
    for _ in range(count):
        for axis, share in ((1, _TIME_SHARE), (0, _BAND_SHARE)):
            length = heard.shape[axis]
            width = int(rng.integers(0, int(length * share) + 1))
            start = int(rng.integers(0, length - width + 1))
            hidden = heard[:, start : start + width] if axis else heard[start : start + width]
            hidden[:] = mean
    return features_MT
