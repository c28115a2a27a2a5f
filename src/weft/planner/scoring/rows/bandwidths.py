"""Rates and sizes as people write them: "8x50GB/s", "400 Gb/s per GPU", "3.2 Tbps", "80 GB", "128k", "4M tokens".

A small b is a bit and a large B a byte, so the letters' case decides. What is written without a unit of time is a size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_RATE = re.compile(
    rf"(?:(?P<count>\d+)\s?[x×*]\s?)?(?P<value>{_NUMBER})[\s-]?(?P<scale>[kKMGTP]|[gmt](?=b))(?P<binary>i?)"
    r"(?P<unit>[bB]its?|[bB]ytes?|[bB]|[bB]i)(?P<time>/\s?s(?:ec)?\b|ps\b|it/s)?",
)
_SIZE = re.compile(rf"(?P<value>{_NUMBER})[\s-]?(?P<scale>[kmgtp])(?P<binary>i?)(?:b|\b)", re.IGNORECASE)
#: A part of a text that speaks of one thing ends at these.
_BREAKS = re.compile(r"[;,()+]|\band\b|\bwith\b")
#: What the words of a part are about, the first that is found.
_ABOUT = (
    ("memory", r"\bhbm|\bdram\b|\bgddr|\bvram\b|memory"),
    ("links", r"nvlink|nvswitch|\bxgmi\b|infinity fabric|\bici\b|scale[- ]up|\bnvl\d+"),
    ("disk", r"\bnvme\b|\bssd\b|storage|lustre|filesystem"),
    ("host", r"\bpcie\b|\bc2c\b|host link|\bd2h\b|\bh2d\b"),
    (
        "network",
        r"infiniband|\bib\b|\broce\b|\befa\b|ethernet|\bnics?\b|network|inter-?node|node-?node|omni-?path|slingshot|"
        r"\b[enhx]dr\b|\brdma\b|adapter|\brail|interconnect|between nodes",
    ),
)
_EACH = re.compile(r"(?:per|each|/|a)\s?(?:gpu|device|accelerator|chip|rank)\b|gpu (?:nic|adapter)", re.IGNORECASE)
_NODE = re.compile(r"(?:per|each|/|a)\s?(?:node|machine|server|host|vm)\b|node[- ]node|between nodes", re.IGNORECASE)
#: No single adapter of a node is faster, in bytes/s: a larger figure is all of the node's.
_FASTEST_ADAPTER = 100e9


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate of a text: bytes/s of all that it counts. about: memory, links, disk, host, network, or "" (not said).
    per: "device", "node" or "" (not said). count: as in 8x; 0 where there is none."""

    bytes_per_s: float
    about: str
    per: str
    count: int


def rates(text: str) -> Iterator[Rate]:
    """Yield every rate of a text, in its order, in the case in which its author wrote it."""
    for part in _BREAKS.split(text):
        lower = part.lower()
        about = next((name for name, words in _ABOUT if re.search(words, lower)), "")
        per = "device" if _EACH.search(part) else "node" if _NODE.search(part) else ""
        for match in _RATE.finditer(part):
            ends_bits = match["unit"].startswith("b")
            if not match["time"] and not (ends_bits and about == "network"):  # "8x200Gb HDR": bits are always rates
                continue
            count = int(match["count"] or 0)
            bits = match["unit"][0] == "b" or match["time"] in ("ps", "it/s")
            if match["unit"] == "B" or match["unit"].lower().startswith("byte"):
                bits = False
            value = _value(match["value"], match["scale"], match["binary"]) * max(1, count)
            yield Rate(value / 8 if bits else value, about, per, count)


def network_bytes_per_s(text: str, devices_per_node: int) -> float | None:
    """Bytes a second that the network gives one device, where a text says so; None where it does not.

    A rate that is counted ("8x50GB/s") or for a node is divided by the devices; one for a device is not. A bare rate of
    a network is one adapter's, and each device has one, unless no adapter is as fast.
    """
    for each in rates(text):
        if each.about not in ("network", "") or (each.about == "" and not (each.per or each.count)):
            continue
        if each.per == "device":
            return each.bytes_per_s
        if each.per == "node" or each.count or each.bytes_per_s > _FASTEST_ADAPTER:
            return each.bytes_per_s / max(1, devices_per_node)
        return each.bytes_per_s
    return None


def memory_bytes_per_s(text: str) -> float | None:
    """Bytes a second of a device's memory, where a text says so; None where it does not."""
    return next((each.bytes_per_s for each in rates(text) if each.about == "memory"), None)


def gibibytes(text: str) -> float | None:
    """The first size of a text in GiB: "47.6 GB" is decimal, "47.6GiB" binary, a bare number is GiB; None for none."""
    bare = re.fullmatch(_NUMBER, text.strip())
    if bare:
        return float(text.replace(",", ""))
    match = _SIZE.search(text)
    return _value(match["value"], match["scale"], match["binary"]) / 2**30 if match else None


def device_gib(name: str) -> int | None:
    """The memory in a device's name: vendors write GB and mean GiB ("a100-80gb", "H100 80G", "H200 141GiB")."""
    match = re.search(r"(?<![\d.])(\d+)\s?g(?:i?b)?(?![a-z])", name.lower())
    return int(match[1]) if match else None


def tokens(text: str) -> float | None:
    """A length: "8192", "8,192", "8k" and "128K" (1024 each), "131k" (131,072), "1M"; None for what is none.

    k stands for 1024 after a multiple of 8 or a power of two, else for thousands, cut or rounded, of the nearest
    length that models are trained with: a multiple of 1024, of 4096 from 16k on.
    """
    match = re.fullmatch(rf"({_NUMBER})\s?([kKmM]?)(?:\s?(?:tokens|tok))?", text.strip())
    if match is None:
        return None
    value, suffix = float(match[1].replace(",", "")), match[2].lower()
    if not suffix:
        return value
    binary, decimal = (1024.0, 1e3) if suffix == "k" else (2.0**20, 1e6)
    if value % 8 == 0 or math.log2(value).is_integer():
        return value * binary
    unit = 1024.0 if value < 16 else 4096.0
    return round(value * decimal / unit) * unit


def sequences(text: str, seq_len: float) -> float | None:
    """A batch: "1024", "1,024", "1024 sequences", or in tokens ("4M tokens", "16M"); None for what is none."""
    plain = re.fullmatch(rf"({_NUMBER})\s?(?:sequences|seqs?|samples)?", text.strip())
    if plain:
        return float(plain[1].replace(",", ""))
    whole = tokens(text)
    return max(1.0, float(round(whole / seq_len))) if whole else None


def _value(number: str, scale: str, binary: str) -> float:
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}[scale.lower()]
    factor = 1024.0**power if binary else _SCALES[scale.lower()]
    return float(number.replace(",", "")) * factor
