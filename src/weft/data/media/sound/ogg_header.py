"""The length of an Ogg Vorbis file from its first and last pages (RFC 3533; Vorbis I specification, 4.2.2).

libsndfile unpacks the codec's tables to open a file, which takes longer than all else that an index asks. What is not
quite plain is left to it: another codec, several streams, a start that is not 0, few bytes for its length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weft.data.media.encoded import Encoded

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
