"""Audio files: length, samples, and transforms.

The length of a plain Ogg Vorbis file is computed from its first and last pages (RFC 3533; Vorbis I specification,
4.2.2). This avoids libsndfile, which unpacks the codec's tables to open a file and so would take most of the time of
indexing. libsndfile reads all other files: other codecs, several streams, a start that is not 0, possible silence.
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

#: Maximum size of a page.
PAGE_BYTES = 65_307
_HEAD_BYTES = 16_384
#: A file with more bytes per second is not silent. Silence takes a few bytes per packet.
_SOUND_BYTES_A_S = 1000
_PAGE = struct.Struct("<4sBBqIIIB")


@dataclass(frozen=True, slots=True)
class _Page:
    """An Ogg page. `start`, `body` and `end` are byte offsets.

    Attributes:
        start: start of the page.
        body: start of its payload.
        end: end of the page.
        granule: number of samples up to its end.
        serial: serial number of its stream.
        packets: number of packets that end in it.
    """

    start: int
    body: int
    end: int
    granule: int
    serial: int
    packets: int


def vorbis_size(encoded: Encoded) -> tuple[int, int, int] | None:
    """Return frames, frames per second and channels of a plain, complete Vorbis file that is not silent.

    Return None for all other files.

    Raises:
        DataError: if the file cannot be read.
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
    """Return the page that begins at offset `at`, or None if there is no page, or its segment table is incomplete."""
    if len(data) < at + _PAGE.size:
        return None
    mark, version, _, granule, serial, _, _, count = _PAGE.unpack_from(data, at)
    table = data[at + _PAGE.size : at + _PAGE.size + count]
    if mark != b"OggS" or version or len(table) < count:
        return None
    body = at + _PAGE.size + count
    return _Page(at, body, body + sum(table), granule, serial, sum(size < 255 for size in table))


def _first_sound(head: bytes, first: _Page) -> _Page | None:
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


# Reading an audio clip: its length from the header, and ranges of its samples.

#: Valid sample rates, in frames per second.
RATES = range(1000, 768_001)
#: First and largest block of frames in the search for a sample that is not 0.
_FIRST_BLOCK, _LARGEST_BLOCK = 256, 65536
#: First bytes of the formats that libsndfile may open. It has decoders for many more, some rarely used.
_MAGIC = (
    b"RIFF", b"RIFX", b"RF64", b"riff", b"fLaC", b"OggS", b"FORM", b".snd", b"dns.", b"caff", b"ID3", b"NIST",
    *(bytes((0xFF, second)) for second in range(0xE0, 0x100)),  # frames of MP3
)  # fmt: skip
_MAX_CHANNELS = 64
#: Maximum number of values to search for one that is not 0.
_MAX_SILENCE = 2**28
#: Larger frame counts are placeholders for an unknown length.
_MOST_FRAMES = 2**48
#: Larger chunk sizes are placeholders of programs that write a file of unknown length.
_OPEN_ENDED = 0x7FFFF000


def soundfile() -> Any:
    """Return the soundfile module.

    Raises:
        MissingExtra: if it is not installed.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise MissingExtra("soundfile", "media", "a folder of recordings") from error
    return soundfile


def sound_size(source: Path | Encoded) -> tuple[int, int, int]:
    """Return frames, frames per second and channels from the header, after a check for truncation and silence.

    Raises:
        DataError: if the file is not audio, has no samples or an unknown length, is truncated or silent, or has more
            than 64 channels or a sample rate outside `RATES`.
        MissingExtra: if soundfile is needed and not installed.
    """
    encoded = source if isinstance(source, Encoded) else Encoded.of_file(source)
    plain = vorbis_size(encoded)
    if plain is not None and plain[1] in RATES:
        return plain
    with _opened(encoded) as sound:
        frames, rate, channels = sound.frames, sound.samplerate, sound.channels
        if _is_truncated(encoded, sound):
            raise DataError(f"{encoded.name}: it is truncated. Copy it again, or delete it.")
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
            raise DataError(f"{encoded.name}: it is truncated. Copy it again, or delete it.")
    return frames, rate, channels


def read_frames(encoded: Encoded, start: int, count: int) -> NDArray[np.float32]:
    """Return frames of an audio clip, float32 (count, channels), where 1 is full scale.

    Args:
        encoded: the audio clip.
        start: the first frame.
        count: number of frames.

    Raises:
        DataError: if the frames cannot be decoded, the clip ends before them, or values are not finite.
    """
    with _opened(encoded) as sound:
        if start:
            sound.seek(start)
        found = sound.read(count, dtype="float32", always_2d=True)
    if len(found) < count:
        raise DataError(
            f"{encoded.name}: it ends {count - len(found)} frames before the end in its header. Copy it again, or "
            "delete it."
        )
    if not np.isfinite(found).all():
        raise DataError(f"{encoded.name}: it has samples that are not finite. Repair it, or delete it.")
    return found


class _Stream(io.RawIOBase):
    """Seekable binary stream over the bytes of an audio clip. The decoder reads from it in C."""

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
        except DataError as error:  # C code calls this and drops exceptions
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
    """Return a subclass of SoundFile that claims to be not seekable.

    SoundFile seeks to its current position after each read of a seekable file, which is slower than reading a header.
    """

    class Reader(library.SoundFile):
        def seekable(self) -> bool:
            return False

    return Reader


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Any]:
    """Open an audio clip. Errors of opening it, and of the body of `with`, are raised as DataError."""
    library = soundfile()
    stream = _Stream(encoded)
    if not encoded.size():
        raise DataError(f"{encoded.name}: it cannot be read as audio (it is empty). Repair it, or delete it.")
    if not encoded.part(0, 4).startswith(_MAGIC):
        raise DataError(f"{encoded.name}: it cannot be read as audio (no known format). Repair it, or delete it.")
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
        raise DataError(f"{encoded.name}: it cannot be read as audio ({why}). Repair it, or delete it.") from error


def _refuse_silence(sound: Any, frames: int, name: str) -> None:
    """Raise DataError if all samples, or at least the first 2**28 values, are 0, or if the file ends before that.

    Reading stops after a block with another value.
    """
    done, size = 0, _FIRST_BLOCK
    while done < min(frames, _MAX_SILENCE // sound.channels):
        block = sound.read(size, dtype="float32")
        if not len(block):
            raise DataError(f"{name}: it is truncated. Copy it again, or delete it.")
        if block.any():
            return
        done, size = done + len(block), min(4 * size, _LARGEST_BLOCK)
    which = "every sample" if done >= frames else f"each of the first {done:,} samples"
    raise DataError(f"{name}: it is silent, {which} is 0. Delete it.")


def _is_truncated(encoded: Encoded, sound: Any) -> bool:
    """Return True if the file is shorter than its header declares. Only some formats declare a length."""
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
    """Return the byte offset at which the sample chunk should end by its declared size, or 0 if none is declared."""
    at = 12
    while len(head := encoded.part(at, 8)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        if name == wanted:
            return 0 if size >= _OPEN_ENDED else at + 8 + size
        at += 8 + size + size % 2
    return 0


def _last_page_end(encoded: Encoded) -> int:
    """Return the byte offset at which the last page of an Ogg file should end, or 0 if no page is found."""
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
    """Return the byte offset at which an MP3 should end by the Xing header of its first frame, or 0 without one."""
    head = encoded.part(0, 10)
    start = 0
    if head[:3] == b"ID3" and len(head) == 10:  # ID3 tag: four bytes with 7 bits of the length each
        start = 10 + sum((byte & 127) << 7 * (3 - place) for place, byte in enumerate(head[6:10]))
    first = encoded.part(start, 256)
    at = max(first.find(b"Xing"), first.find(b"Info"))
    if at < 0 or len(first) < at + 16:
        return 0
    flags, _, size = struct.unpack(">III", first[at + 4 : at + 16])
    return start + size if flags & 3 == 3 else 0


# Transforms of an audio clip: to one channel, one sample rate and a maximum length, with augmentation from a random
# key.

#: Maximum share of the frames, and of the mel bands, that one mask covers.
_TIME_SHARE, _BAND_SHARE = 0.125, 0.25


@dataclass(frozen=True, slots=True)
class AudioTransform:
    """Resampling, cropping and augmentation of audio clips.

    Attributes:
        rate: samples per second.
        seconds: maximum length (s).
        crops: whether to take a random part of a longer audio clip instead of its middle.
        gain: maximum change of the level, in dB, up or down.
        noise: maximum level of added white noise, as a share of the clip's level.
        masks: number of time masks, and of frequency masks (SpecAugment, arXiv 1904.08779).
    """

    rate: int
    seconds: float
    crops: bool = False
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0

    @property
    def most_samples(self) -> int:
        """Maximum number of samples."""
        return round(self.seconds * self.rate)


def soxr() -> Any:
    """Return the soxr module, which resamples.

    Raises:
        MissingExtra: if it is not installed.
    """
    try:
        import soxr
    except ImportError as error:
        raise MissingExtra("soxr", "media", "recordings of another rate") from error
    return soxr


def apply_transform(
    encoded: Encoded, size: tuple[int, ...], hearing: AudioTransform, key: tuple[int | str, ...] = ()
) -> NDArray[np.float32]:
    """Return the transformed samples of an audio clip, float32 (samples,), where 1 is full scale.

    Channels are averaged, and the result is resampled. Gain and noise may make values larger than 1. Only the frames
    that are used are decoded.

    Args:
        encoded: the audio clip.
        size: its frames, frames per second and channels.
        hearing: the transform.
        key: seed of the random numbers, as in `generator_of`.

    Raises:
        DataError: if it cannot be decoded.
        MissingExtra: if it has to be resampled and soxr is not installed.
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
    """Set random time and frequency ranges of features to the mean, and return them.

    Args:
        features_MT: features, (bands, frames).
        count: number of time masks, and of frequency masks.
        num_frames: number of frames of the audio clip. The rest is padding.
        key: seed of the random numbers, as in `generator_of`.
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
