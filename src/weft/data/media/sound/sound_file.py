"""One recording: its length from its header, and some of its samples.

libsndfile decodes (soundfile, extra `media`): WAV, FLAC, Ogg, MP3 and others, known by what is in them.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.encoded import Encoded
from weft.data.media.sound.ogg_header import PAGE_BYTES, vorbis_size
from weft.errors import DataError, MissingExtra, WeftError

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
        if _is_cut_off(encoded, sound):
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


def _is_cut_off(encoded: Encoded, sound: Any) -> bool:
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
