"""TPU slices: Google's names for them, such as v5p-16, and the arrangements of their chips.

Sources: the pages on v4, v5e, v5p and v6e in the documentation of Google Cloud TPU.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"((?:[0-9]{1,7}x)?)(v4|v5p|v5e|v5litepod|v6e)-([0-9]{1,5})")
#: Devices whose names count TensorCores, two for each chip. The other names count chips.
_COUNTS_CORES = ("v4", "v5p")
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
#: By device: the arrangement of the chips of a slice, by their number.
ARRANGEMENTS = {
    "tpu-v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
                512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"},
    "tpu-v5e": _FLAT,
    "tpu-v6e": _FLAT,
}  # fmt: skip


def in_chips(text: str) -> str:
    """Return a cluster text with the name of a slice replaced by its chips: "v5p-16" becomes "8xtpu-v5p".

    Other texts are returned unchanged, and so is an odd number of TensorCores.
    """
    match = _NAME.fullmatch(text.strip().lower())
    if match is None:
        return text
    slices, kind, count = match[1], match[2], int(match[3])
    if kind in _COUNTS_CORES:
        if count % 2:
            return text
        count //= 2
    return f"{slices}{count}x{'tpu-v5e' if kind == 'v5litepod' else f'tpu-{kind}'}"


def slice_name(device: str, num_chips: int) -> str:
    """Return Google's name of a slice: "v5p-16" for 8 chips of "tpu-v5p"."""
    kind = device.removeprefix("tpu-")
    return f"{kind}-{num_chips * 2 if kind in _COUNTS_CORES else num_chips}"
