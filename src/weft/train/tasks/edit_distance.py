"""Edit distance of two texts: the number of letters to change, add or remove."""

from __future__ import annotations

import numpy as np


def edit_distance(one: str, other: str) -> int:
    """Return the minimum number of letters to change, add or remove to turn one text into the other."""
    target = np.frombuffer(other.encode("utf-32-le"), np.uint32)
    places = np.arange(len(target) + 1)
    row = places
    for done, letter in enumerate(one, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (target != ord(letter)))
        # Insertions: the minimum over all earlier columns, plus one for each inserted letter.
        row = np.minimum.accumulate(np.concatenate(([done], best)) - places) + places
    return int(row[-1])
