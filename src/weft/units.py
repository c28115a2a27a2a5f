"""Parsing and formatting of bytes, seconds and counts.

GiB is 2**30 bytes and GB is 10**9. A number without a suffix is in bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# At most 18 digits: a longer number is a typing error. With a unit, the value stays far below the limits of a float.
_NUMBER = re.compile(r"^\s*([0-9][0-9_]{0,17}(?:\.[0-9]{1,18})?|\.[0-9]{1,18})\s*([A-Za-z]*)\s*$", re.ASCII)
_SCIENTIFIC = re.compile(r"\s*[0-9]{1,18}(?:\.[0-9]{1,18})?[eE]\+?[0-9]{1,2}\s*", re.ASCII)
_MEASURED = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z/]*)\s*", re.ASCII)
_RATE = re.compile(r"([kKMGTP]?)(i?)(?:(B)|(b|bit))(?:/s|ps)")
_FLOPS = re.compile(r"([kKMGTP]?)(?:FLOPS|FLOP/s|OPS|flops)")
_PRICE = re.compile(
    r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?|\.[0-9]{1,18})\s*([A-Za-z]{3}|[$€£¥])(?:\s*/\s*([A-Za-z]{1,3}))?\s*", re.ASCII
)
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
# Several numbers, each with its unit: 3h30m.
_PART = re.compile(r"[0-9]{1,9}(?:d|h|min|ms|m|s)", re.ASCII)
_SEVERAL = re.compile(rf"{_PART.pattern}(?:{_PART.pattern})+", re.ASCII)


def _split(text: str, units: Mapping[str, float], kind: str, example: str) -> tuple[Fraction, float]:
    match = _NUMBER.match(text)
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {kind}. Write a number and a unit, such as {example!r}")
    return Fraction(match.group(1).replace("_", "")), factor


def _parse_int(number: int, kind: str) -> int:
    if isinstance(number, bool) or number < 0:
        raise ValueError(f"{number} is not {kind}. Write a whole number of at least 0")
    return number


def parse_bytes(text: str | int) -> int:
    """Parse a size: '80GiB' -> 85899345920; '1.5 GB' -> 1500000000; 4096 -> 4096.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(text, int):
        return _parse_int(text, "a size")
    number, unit = _split(text, _BYTE_UNITS, "a size", "12GiB")
    return round(number * int(unit))


def parse_count(text: str | int) -> int:
    """Parse a count: '4M' -> 4000000; '1_000' -> 1000; '1.5e12' -> 1500000000000; 7 -> 7.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(text, int):
        return _parse_int(text, "a count")
    if _SCIENTIFIC.fullmatch(text):
        return round(Fraction(text.strip()))
    number, unit = _split(text, _COUNT_UNITS, "a count", "4M")
    return round(number * int(unit))


def parse_rate(text: str) -> float:
    """Parse bytes per second: '300GB/s' -> 3e11; '400Gb/s' and '400Gbps' -> 5e10 (b is a bit, B a byte).

    Raises:
        ValueError: for any other text.
    """
    number, unit = _measured(text, _RATE, "a rate", "'300GB/s' (bytes) or '400Gb/s'")
    scale = _BYTE_UNITS[f"{unit[1].lower()}ib"] if unit[1] and unit[2] else _PREFIXES[unit[1]]
    return number * scale / (1 if unit[3] else 8)


def parse_flops(text: str) -> float:
    """Parse operations per second: '120TFLOPS' or '120TFLOP/s' -> 1.2e14.

    Raises:
        ValueError: for any other text.
    """
    number, unit = _measured(text, _FLOPS, "a number of operations per second", "'120TFLOPS'")
    return number * _PREFIXES[unit[1]]


def _measured(text: str, unit: re.Pattern[str], what: str, example: str) -> tuple[float, re.Match[str]]:
    """Return the number and the unit's match of a quantity. Raise ValueError for other text."""
    number = _MEASURED.fullmatch(text)
    found = unit.fullmatch(number[2]) if number else None
    if number is None or found is None:
        raise ValueError(f"{text!r} is not {what}. Write a number and a unit, such as {example}")
    return float(number[1]), found


def parse_seconds(text: str | float) -> float:
    """Parse a duration: '15min' -> 900.0; '3h30m' -> 12600.0; 3 -> 3.0.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(text, int | float):
        if isinstance(text, bool) or not 0 <= text < math.inf:
            raise ValueError(f"{text} is not a duration. Write a number of seconds of at least 0")
        return float(text)
    if _SEVERAL.fullmatch(text):
        return sum(parse_seconds(part) for part in _PART.findall(text))
    number, unit = _split(text, _SECOND_UNITS, "a duration", "15min")
    return float(number) * unit


def parse_price(text: str) -> tuple[float, str, str] | None:
    """Parse a price: "$2.50/h" -> (2.5, "USD", "h"); "0.25eur" -> (0.25, "EUR", ""). Return None for other texts."""
    number_first = re.sub(r"^\s*([$€£¥])\s*([0-9.]+)", r"\2\1", text)
    match = _PRICE.fullmatch(number_first)
    return None if match is None else (float(match[1]), _SIGNS.get(match[2], match[2].upper()), match[3] or "")


def format_bytes(num_bytes: float) -> str:
    """Return a size in binary units with three digits: 13314398617 -> '12.4 GiB'."""
    size = float(num_bytes)
    if abs(size) < 1023.5:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1023.5:
            return f"{_three_digits(size)} {unit}"
    return f"{_three_digits(size / 1024)} PiB"


def format_count(count: float) -> str:
    """Return a count in decimal units with three digits: 8030261248 -> '8.03 B'; 512 -> '512'."""
    size = float(count)
    if abs(size) < 999.5:
        return f"{size:.0f}" if size == round(size) else _three_digits(size)
    for unit in ("k", "M", "B"):
        size /= 1000
        if abs(size) < 999.5:
            return f"{_three_digits(size)} {unit}"
    return f"{_three_digits(size / 1000)} T"


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun: (1, "file") -> '1 file'; (2, "file") -> '2 files'.

    Args:
        number, one, more: the number, the singular, and the plural if it is not the singular with an "s".
    """
    return f"{number} {one if number == 1 else more or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a duration: 0.0123 -> '12.3 ms'; 75 -> '1:15'; 7322 -> '2:02:02'; '?' for inf or nan."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 59.95:
        for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
            if seconds * scale >= 0.9995 or unit == "us":
                return f"{_three_digits(seconds * scale)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
