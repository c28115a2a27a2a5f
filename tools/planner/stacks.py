"""Facts of published runs by a closed vocabulary, and the software stack that they describe."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem
from weft.planner.space.shape import Stack

Row = Mapping[str, str]
#: Fields of a row that are searched for a column's phrases, in order.
_FIELDS = ("notes", "table", "source")
_OTHER_FIELDS = {"software": ("source", "table", "notes"), "publisher": ("source",)}
#: Assumed year of the software of a row that states none.
_YEAR = 2025
#: Host operations per kernel of an eager program, relative to the calls that the model counts: a layer of 12 eager
#: modules takes about 0.8 ms of host time, of which 22 kernel calls of 8 us are a quarter.
_HOST_OPS = 4.0
#: First devices on which FlashAttention 2 is slower than a kernel made for them.
_HOPPER_ON = ("h100", "h200", "h800", "h20", "gh200", "b200", "b300", "gb200", "gb300")


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("vocabulary.toml").read_text(encoding="utf-8"))


@functools.cache
def vocabulary() -> dict[str, dict[str, tuple[tuple[str, ...], ...]]]:
    """Return the phrases of each value by column, as tuples of words."""
    columns = {name: table for name, table in _file().items() if name not in ("source", "stack", "before_2023")}
    return {
        name: {value: tuple(_words(phrase) for phrase in phrases) for value, phrases in table.items()}
        for name, table in columns.items()
    }


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[^\w.=-]+", text.lower()) if word.strip(".=-"))


@functools.cache
def value_in(column: str, text: str) -> str | None:
    """Return the value of a column that a text states by one of its phrases, or None.

    Of several, the value that the vocabulary lists first.
    """
    words, found = _words(text), set[str]()
    place = 0
    while place < len(words):
        longest = ("", 0)
        for value, phrases in vocabulary()[column].items():
            for phrase in phrases:
                if len(phrase) > longest[1] and words[place : place + len(phrase)] == phrase:
                    longest = (value, len(phrase))
        found |= {longest[0]} if longest[1] else set()
        place += max(1, longest[1])
    return next((value for value in vocabulary()[column] if value in found), None)


def facts_of(row: Row) -> dict[str, str]:
    """Return the facts of a row by column: from the column itself, or from the phrases of notes, table and source.

    Raises:
        ConfigError: for a cell that is not one of its column's values.
    """
    found: dict[str, str] = {}
    for column, values in vocabulary().items():
        cell = row.get(column, "").lower()
        if cell and cell not in values:
            known = ", ".join(values)
            raise ConfigError([Problem(row.get("id", ""), f"{column}={cell}: not one of {known}")])
        texts = (row.get(field, "") for field in _OTHER_FIELDS.get(column, _FIELDS))
        stated = cell or next((value for text in texts if (value := value_in(column, text))), "")
        if stated:
            found[column] = stated
    return found


def unread(row: Row) -> list[str]:
    """Return the parts of a row's notes that no column's vocabulary understands."""
    parts = [part.strip() for part in row.get("notes", "").split(";")]
    return [
        part
        for part in parts
        if part and "=" not in part.split()[0] and not any(value_in(column, part) for column in vocabulary())
    ]


def year_of(row: Row) -> int:
    """Return the year of a row's software: of the column, of a known source, or as source or table state it."""
    if row.get("year"):
        return int(row["year"])
    text = f"{row.get('source', '')} {row.get('table', '')}"
    known = known_facts(text).get("year")
    years = [int(each) for each in re.findall(r"\b(20[12]\d)\b", text)]
    years += [2000 + int(each) for each in re.findall(r"\b(2\d)\.(?:0[1-9]|1[0-2])\b", text)]  # releases by month
    papers = [2000 + int(each) for each in re.findall(r"\barxiv:(\d\d)\d\d\.", text.lower())]
    return known or min([*years, *papers], default=_YEAR)


def known_network(text: str) -> str:
    """Return the network of a known source as text, or "" if unknown."""
    return str(known_facts(text).get("network", ""))


def known_facts(text: str) -> dict[str, Any]:
    """Return the facts of a known source that its rows leave out."""
    words = " ".join(_words(text))
    sources: list[dict[str, Any]] = _file()["source"]
    for source in sources:
        if source["words"] in words:
            return source
    return {}


def counts_causal_half(text: str) -> bool:
    """Return True if a text states that only the causal half of attention's FLOPs is counted."""
    for part in re.split(r"[;,]", text):
        words = {word.removesuffix("ly") for word in _words(part)}
        if {"causal", "attention"} <= words and words & {"flop", "flops"} and not words & {"not", "no"}:
            return True
    return False


def stack_of(row: Row) -> Stack:
    """Return the software stack of a row.

    Raises:
        ConfigError: for a cell that is not one of its column's values.
    """
    facts, year, gpu = facts_of(row), year_of(row), row["gpu"].lower()
    software = facts.get("software", "other")
    values: dict[str, Any] = {"name": software, "vocab_multiple": 128, "eager_pieces": False, "cut_loss": False,
              "replay_stops": False, "host_ops": _HOST_OPS,
              "torch_grouped": software == "torch", "bucket_params_per_rank": 1e6}  # fmt: skip
    values |= _file()["stack"][software]
    if year < 2023 and not gpu.startswith(_HOPPER_ON):
        values |= _file()["before_2023"].get(software, {})
    values["attention"] = facts.get("attention") or _attention(software, year, gpu)
    values |= {"dispatch": facts.get("dispatch", "each"), "balanced_experts": facts.get("routing") == "balanced"}
    if "v100" in gpu:  # FlashAttention needs Ampere or later
        values["attention"] = "unfused"
    stated: dict[tuple[str, str], dict[str, Any]] = {
        ("fused", "yes"): {"fused": True},
        ("fused", "no"): {"fused": False},
        ("loss", "chunked"): {"cut_loss": True},
        ("ep_overlap", "yes"): {"overlap_ep": 0.8},
        ("dispatch_format", "fp8"): {"dispatch_bytes": 1.0},
        ("tp_overlap", "no"): {"overlap_tp": False},
        ("states", "bf16"): {"main_bytes": 4.0, "grad_bytes": 2.0, "master": False},
        ("reduce", "fp32"): {"reduce_bytes": 4.0, "grad_bytes": 4.0},
        ("reduce", "bf16"): {"reduce_bytes": 2.0, "grad_bytes": 2.0},
        ("fp8_scales", "row"): {"row_scales": True},
        ("fp8_wgrad", "bf16"): {"half_wgrad": True},
        ("selective", "norms"): {"selective_kernels": True},
    }
    for fact, changes in stated.items():
        if facts.get(fact[0]) == fact[1]:
            values |= changes
    return Stack(**values, fused_norm=values.get("fused", False))


def _attention(software: str, year: int, gpu: str) -> str:
    """Return the attention kernel of a row that names none, by the year of its software and the device."""
    if year < 2023 and not gpu.startswith(_HOPPER_ON):
        return "unfused"
    # Kernels for Hopper came into use in 2025. Torch's own attention is FlashAttention 2 before release 2.11.
    before = year < 2025 or software == "torch"
    return "flash2" if before and gpu.startswith(_HOPPER_ON) else "best"
