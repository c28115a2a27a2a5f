"""Values of a plan's fields: what may be written, in its normal form. `plan.py` has the fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import cast

from weft import units
from weft.errors import PlanError, Problem, did_you_mean

LARGEST = 999_999_999
_BLOCKS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_FRACTION = re.compile(r"0?\.0*[1-9][0-9]*|[1-9][0-9]?%")
_SHARE = re.compile(r"[01]|[01]?\.[0-9]{1,6}|[0-9]{1,3}%", re.ASCII)


def refused(field: str, message: str) -> PlanError:
    """The error of one field."""
    return PlanError([Problem(field, message)])


def shown(value: object) -> str:
    """The value in an error: on one line, and short."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "(a huge number)"  # str() of an int refuses thousands of digits
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def choice(name: str, value: object, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(str(value), known) if isinstance(value, str) else ""
        rule = f"not one of {', '.join(known)}.{hint or f' Use {name}={known[0]}.'}"
        raise refused(name, f"{name}={shown(value)}: {rule}")
    return value


def offload_words(value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """What lives on the host, in the order of `known`, with shares."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, tuple):
        rule = "name what is kept on the host. Use e.g. offload=optimizer+activations."
        raise refused("offload", f"offload={shown(value)}: {rule}")
    chosen: dict[str, str] = {}
    for part in cast(tuple[object, ...], value):
        name, word = _offload_part(part, known)
        if chosen.setdefault(name, word) != word:
            raise refused("offload", f"offload={shown(part)}: {name} has another share already. Keep one.")
    return tuple(chosen[name] for name in known if name in chosen)


def split_counts(value: object) -> tuple[int, ...]:
    """The blocks of each stage."""
    counts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
    if all(isinstance(count, int) and not isinstance(count, bool) and 0 < count <= LARGEST for count in counts):
        return cast(tuple[int, ...], counts)
    rule = "the blocks of each stage are whole numbers from 1. Use e.g. split=3+4+4+3, or leave it out."
    raise refused("split", f"split={shown(cast(object, value))}: {rule}")


def axis_names(value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Axes, each once."""
    names = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    for name in names:
        choice("order", name, known)
    if len(set(names)) < len(names):
        rule = "each axis appears in it once. Use e.g. order=tp+dp_shard, or leave it out."
        raise refused("order", f"order={'+'.join(map(str, names))}: {rule}")
    return cast(tuple[str, ...], names)


def _offload_part(part: object, known: tuple[str, ...]) -> tuple[str, str]:
    """ "optimizer", and "optimizer" or "optimizer:0.5": what lives on the host, and the word with its share."""
    if not isinstance(part, str):
        return choice("offload", part, known), ""
    name, colon, share = part.partition(":")
    choice("offload", name, known)
    if not colon:
        return name, name
    fraction = Decimal(share.rstrip("%")) / (100 if "%" in share else 1) if _SHARE.fullmatch(share) else Decimal(0)
    if not 0 < fraction <= 1:
        rule = f"a share is a number above 0 and at most 1. Use e.g. offload={name}:0.5."
        raise refused("offload", f"offload={shown(part)}: {rule}")
    return name, name if fraction == 1 else f"{name}:{fraction.normalize():f}"


def recompute_word(value: object, known: tuple[str, ...]) -> str:
    """A policy, one of some blocks, or a budget."""
    if isinstance(value, str):
        if value in known or _of_some_blocks(value, known) or _FRACTION.fullmatch(value):
            return value
        try:
            if not value.isdigit() and units.parse_bytes(value) > 0:
                return "".join(value.split())
        except ValueError:
            pass  # neither a name nor a size: refused below with what it may be
    raise refused(
        "recompute",
        f"recompute={shown(value)}: not one of {', '.join(known)}, nor a budget. "
        f"Use one of them, or e.g. recompute=full:8, recompute=12GiB or recompute=50%.",
    )


def _of_some_blocks(value: str, known: tuple[str, ...]) -> bool:
    name, colon, count = value.partition(":")
    return bool(colon) and name in known and name != "none" and _BLOCKS.fullmatch(count) is not None
