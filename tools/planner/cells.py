"""Parsing of table cells: rates, sizes and lengths ("8x50GB/s", "400 Gb/s per GPU", "80 GB", "128k", "4M tokens").

A lower-case b is a bit and an upper-case B is a byte, so that case matters. A value without a unit of time is a size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.config.cluster import ClusterSpec, DeviceSpec, capped, device, devices
from weft.errors import ConfigError, Problem
from weft.planner.space.shape import Shape

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_RATE = re.compile(
    rf"(?:(?P<count>\d+)\s?[x×*]\s?)?(?P<value>{_NUMBER})[\s-]?(?P<scale>[kKMGTP]|[gmt](?=b))(?P<binary>i?)"
    r"(?P<unit>[bB]its?|[bB]ytes?|[bB]|[bB]i)(?P<time>/\s?s(?:ec)?\b|ps\b|it/s)?",
)
_SIZE = re.compile(rf"(?P<value>{_NUMBER})[\s-]?(?P<scale>[kmgtp])(?P<binary>i?)(?:b|\b)", re.IGNORECASE)
#: Separators between parts of a text about different things.
_BREAKS = re.compile(r"[;,()+]|\band\b|\bwith\b")
#: Subject of a part by patterns. The first match wins.
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
#: Maximum bytes/s of a single adapter. A larger value is the total of a node.
_FASTEST_ADAPTER = 100e9


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate of a text.

    Attributes:
        bytes_per_s: bytes/s of all counted links.
        about: memory, links, disk, host, network, or "" (unspecified).
        per: "device", "node" or "" (unspecified).
        count: count as in 8x; 0 without one.
    """

    bytes_per_s: float
    about: str
    per: str
    count: int


def rates(text: str) -> Iterator[Rate]:
    """Yield every rate of a text in order. The text must keep its original case."""
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
    """Return the network bytes/s of one device from a text, or None.

    A rate with a count ("8x50GB/s") or for a node is divided by the devices. A rate for a device is not. A network rate
    without both belongs to one adapter, and each device has one, unless no adapter is that fast.
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
    """Return the bytes/s of a device's memory from a text, or None."""
    return next((each.bytes_per_s for each in rates(text) if each.about == "memory"), None)


def gibibytes(text: str) -> float | None:
    """Return the first size of a text in GiB, or None.

    "47.6 GB" is decimal, "47.6GiB" is binary, and a plain number is GiB.
    """
    bare = re.fullmatch(_NUMBER, text.strip())
    if bare:
        return float(text.replace(",", ""))
    match = _SIZE.search(text)
    return _value(match["value"], match["scale"], match["binary"]) / 2**30 if match else None


def device_gib(name: str) -> int | None:
    """Return the memory in a device's name. Vendors write GB and mean GiB ("a100-80gb", "H100 80G", "H200 141GiB")."""
    match = re.search(r"(?<![a-z\d.])(\d+)\s?g(?:i?b)?(?![a-z])", name.lower())
    return int(match[1]) if match else None


def tokens(text: str) -> float | None:
    """Return a length, or None: "8192", "8,192", "8k" and "128K" (1024 each), "131k" (131,072), "1M".

    k means 1024 after a multiple of 8 or a power of two. Otherwise it means thousands, truncated or rounded, of the
    nearest usual length: a multiple of 1024, or of 4096 from 16k on.
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
    """Return a batch in sequences, or None: "1024", "1,024", "1024 sequences", or in tokens ("4M tokens", "16M")."""
    plain = re.fullmatch(rf"({_NUMBER})\s?(?:sequences|seqs?|samples)?", text.strip())
    if plain:
        return float(plain[1].replace(",", ""))
    whole = tokens(text)
    return max(1.0, float(round(whole / seq_len))) if whole else None


def _value(number: str, scale: str, binary: str) -> float:
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}[scale.lower()]
    factor = 1024.0**power if binary else _SCALES[scale.lower()]
    return float(number.replace(",", "")) * factor


# Numbers from the cells of a row. A row with an invalid number is refused.

Row = Mapping[str, str]


def number(row: Row, key: str) -> float | None:
    """Return a non-negative number, or None if the cell is empty or missing.

    Raises:
        ConfigError: for any other text.
    """
    text = row.get(key, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise refused(row, f"{key}={text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise refused(row, f"{key}={text} must be finite and at least 0")
    return value


def count(row: Row, key: str, default: int) -> int:
    """Return a non-negative integer, or `default` if the cell is empty or missing.

    Raises:
        ConfigError: for any other text.
    """
    value = number(row, key)
    if value is None:
        return default
    if value != int(value):
        raise refused(row, f"{key}={row[key]} is not a whole number")
    return int(value)


def size(row: Row, key: str, default: int = 1) -> int:
    """Return an integer of at least 1, or `default` if the cell is empty or missing.

    Raises:
        ConfigError: for any other text.
    """
    value = count(row, key, default)
    if value < 1:
        raise refused(row, f"{key}={value} must be at least 1")
    return value


def in_numbers(row: Row) -> Row:
    """Return the row with lengths, batches and memory sizes as plain numbers ("8k", "4M tokens", "47.6 GB").

    Cells that cannot be parsed stay unchanged.
    """
    plain = dict(row)
    length = tokens(row.get("seq_len", ""))
    found = {
        "seq_len": length,
        "global_batch": sequences(row.get("global_batch", ""), length or 1.0),
        "vocab": tokens(row.get("vocab", "")),
        "measured_mem_gib": gibibytes(row.get("measured_mem_gib", "")),
    }
    return plain | {key: repr(value) for key, value in found.items() if value is not None}


def refused(row: Row, reason: str) -> ConfigError:
    """Return the error for a row that cannot be predicted."""
    return ConfigError([Problem(row.get("id", ""), reason)])


# Devices and networks by the names in published tables.

_WATTS = re.compile(r"(\d+)\s?w\b")
#: Power of a device that a row calls power-limited, over its data sheet's (750 of 1,000 W on B200).
_LIMITED = 0.75
#: Memory rate in GB/s for the memory type in a name, by device.
_MEMORY_TYPES = {("h100", "hbm2e"): 2400.0}


def device_named(name: str) -> DeviceSpec:
    """Return the device for a table's name such as "a100-80gb-sxm" or "h100-96gb-hbm2e-500w".

    Raises:
        ConfigError: for an unknown device.
    """
    text = name.strip().lower().replace("_", "-").replace("nvidia-", "").replace("amd-", "")
    spec = _base(text)
    changes: dict[str, object] = {}
    memory, watts = device_gib(text), _WATTS.search(text)
    if memory and abs(memory * 2**30 - spec.memory_bytes) > 0.02 * spec.memory_bytes:
        changes["memory_bytes"] = memory * 2**30
    for (family, kind), rate in _MEMORY_TYPES.items():
        if spec.name == family and kind in text:
            changes["memory_bytes_per_s"] = rate * 1e9
    if watts and spec.watts and spec.measured_flops and int(watts[1]) < spec.watts:
        limited = capped(replace(spec, watts=float(watts[1])), spec.watts)
        changes |= {"watts": limited.watts, "measured_flops": limited.measured_flops}
    if "limited" in text and spec.watts and spec.measured_flops:
        limited = capped(replace(spec, watts=_LIMITED * spec.watts), spec.watts)
        changes |= {"watts": limited.watts, "measured_flops": limited.measured_flops}
    if "sxm3" in text:  # switches connect the 16 GPUs of a DGX-2
        changes |= {"scale_up_domain": 16, "scale_up_topology": "switch"}
    return replace(spec, name=f"{spec.name}*", **changes) if changes else spec  # pyright: ignore[reportArgumentType]  # checked when it is made


def _base(text: str) -> DeviceSpec:
    for candidate in (text, *_shortened(text)):
        known = {alias: spec for spec in devices().values() for alias in (spec.name, *spec.aliases)}
        if candidate in known:
            return known[candidate]
    return device(text)  # raises, with a hint


def _shortened(text: str) -> list[str]:
    words = text.split("-")
    family = words[0]
    memory = device_gib(text)
    found: list[str] = []
    if "pcie" in words:
        found.append(f"{family}-pcie")
    if "nvl" in words or "nvl72" in words:
        found.append(f"{family}-nvl")
    if memory:
        found.append(f"{family}-{memory}")
    return [*found, "-".join(words[:2]), family]


def cluster_of(name: str, num_devices: int, per_node: int, text: str) -> ClusterSpec:
    """Return the cluster of a run.

    Args:
        name: name of the device.
        num_devices: devices of the run.
        per_node: devices of a node.
        text: notes in their original case, which may contain rates of network and memory.

    Raises:
        ConfigError: for an unknown device.
    """
    spec = device_named(name)
    rate, memory = network_bytes_per_s(text, per_node), memory_bytes_per_s(text)
    if rate is not None:
        spec = replace(spec, nic_bytes_per_s=rate)
    if memory is not None:
        spec = replace(spec, memory_bytes_per_s=memory)
    per_node = max(1, min(per_node, num_devices))
    return ClusterSpec(nodes=max(1, -(-num_devices // per_node)), devices_per_node=per_node, device=spec)


__all__ = ["ConfigError", "cluster_of", "device_named"]


# Shapes of models from rows of a table, and iteration times from the TFLOP/s that some tables print instead.

#: Families whose heads are not hidden / heads wide, or with windowed attention in a part of their layers.
_HEAD_DIMS = (("qwen3", 128), ("gpt-oss", 64), ("gpt_oss", 64), ("gemma", 256), ("nemotron-h", 128))
_WINDOWS = (("gpt-oss", 128), ("gpt_oss", 128))
#: Families with latent attention: hidden width -> ranks of queries and of keys and values, width of rotary positions.
_LATENT = {7168: (1536, 512, 64), 5120: (1536, 512, 64), 2048: (0, 512, 64)}
#: Width of shared experts, and layers without experts, by family name and hidden width.
_SHARED = {
    ("deepseek", 7168): (2048, 3),
    ("deepseek", 5120): (3072, 1),
    ("deepseek", 2048): (2816, 1),
    ("qwen2", 3584): (20_480, 0),
    ("llama4", 5120): (8192, 0),
}
_GPT_VOCAB = 50_257


def shape_of(row: Row) -> Shape:
    """Return the shape of a row's model. Missing values are taken from its family."""
    have = {key: size(row, key) for key in _COUNTS if count(row, key, 0)}
    hidden, heads = have["hidden"], have["heads"]
    family = f"{row.get('model_family', '')} {row.get('table', '')}".lower()
    notes = row.get("notes", "").lower()
    ffn = have.get("ffn_hidden", 4 * hidden)
    gated = row["gated_mlp"] in ("1", "true", "True") if row.get("gated_mlp") else ffn != 4 * hidden
    experts = have.get("experts", 0)
    mixture = experts > 1
    head_dim = 128 if "deepseek" in family else max(1, hidden // heads)
    head_dim = next((width for word, width in _HEAD_DIMS if word in family), head_dim)
    head_dim = int(said[1]) if (said := re.search(r"head_dim[ =](\d+)", notes)) else head_dim
    window, windowed = _windows(family, notes, have["layers"])
    gpt = not gated and have.get("kv_heads", heads) == heads
    return Shape(
        vocab=have.get("vocab", _GPT_VOCAB),
        hidden=hidden,
        layers=have["layers"],
        heads=heads,
        kv_heads=have.get("kv_heads", heads),
        head_dim=head_dim,
        gated=gated,
        tied=_tied(row, gpt),
        biases=gpt and "no bias" not in row.get("notes", "").lower(),
        layer_norm=not gated,
        learned_positions=have["seq_len"] if gpt else 0,
        **_latent(family, notes, hidden),
        **_shared(f"{family} {notes}", hidden, have["layers"], mixture, ffn),
        num_experts=experts if mixture else 0,
        top_k=have.get("top_k", 1) if mixture else 0,
        expert_ffn=ffn if mixture else 0,
        window=window,
        windowed_layers=windowed,
    )


_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "experts", "top_k")


def _windows(family: str, notes: str, layers: int) -> tuple[int, int]:
    """Return the attention window and its layers, from notes ("5:1 with 1024 window") or the model's family."""
    said = re.search(r"(\d+):(\d+) with (\d+) window", notes)
    if said:
        local, whole, width = (int(each) for each in said.groups())
        return width, layers * local // (local + whole)
    window = next((width for word, width in _WINDOWS if word in family), 0)
    return window, layers // 2 if window else 0


def _latent(family: str, notes: str, hidden: int) -> dict[str, int]:
    if ("deepseek" not in family and not re.search(r"\bmla\b", notes)) or hidden not in _LATENT:
        return {}
    return dict(zip(("q_rank", "kv_rank", "rope_dim"), _LATENT[hidden], strict=True))


def _shared(family: str, hidden: int, layers: int, mixture: bool, ffn: int) -> dict[str, int]:
    """Return the widths of the feed-forward layer and of the shared experts, and the layers without experts."""
    if not mixture:
        return {"ffn": ffn}
    if "every other layer" in family:
        return {"ffn": 2 * ffn, "shared_ffn": ffn, "dense_layers": layers // 2}
    for (word, width), (shared, dense) in _SHARED.items():
        if word in family and width == hidden:
            return {"ffn": 9 * ffn if dense else 0, "shared_ffn": shared, "dense_layers": dense}
    return {"ffn": 0}


def _tied(row: Row, gpt: bool) -> bool:
    notes = row.get("notes", "").lower()
    if "untied" in notes:
        return False
    return gpt


def iteration_s(row: Row, shape: Shape, gpus: int, causal: bool = False) -> float | None:
    """Return the measured seconds of a step: printed, or from tokens/s, or from TFLOP/s; None if the row has neither.

    Args:
        row: the row.
        shape: shape of the model.
        gpus: devices of the run.
        causal: True if the TFLOP/s count the causal half of attention.
    """
    seconds, rate = number(row, "measured_iter_s"), number(row, "measured_tokens_per_s_per_gpu")
    if seconds:
        return seconds
    if not count(row, "global_batch", 0):
        return None
    tokens = float(size(row, "global_batch") * size(row, "seq_len"))
    if rate:
        return tokens / (rate * gpus)
    notes = row.get("notes", "")
    stated = re.search(r"\bd_iter=([0-9.]+)", notes)
    if stated:
        return float(stated[1])
    teraflops = number(row, "measured_tflops_per_gpu")
    if not teraflops:
        return None
    seq_len = size(row, "seq_len") / (2 if causal else 1)
    return step_flops(shape, seq_len, tokens, "flops=hw" in notes) / (teraflops * 1e12 * gpus)


def step_flops(shape: Shape, seq_len: float, tokens: float, with_recompute: bool = False) -> float:
    """Return the FLOPs of a step as most tables count them: three times forward, with the full square of attention.

    Args:
        shape: shape of the model.
        seq_len: tokens of a sequence.
        tokens: tokens of a step.
        with_recompute: count layers four times (Narayanan et al. 2021, arXiv 2104.04473, and later papers).
    """
    width = shape.heads * shape.head_dim
    ups = 3 if shape.gated else 2
    dense = shape.layers - shape.moe_layers
    ffn = dense * shape.ffn + shape.moe_layers * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    seen = seq_len * (width + shape.heads * shape.rope_dim / 2)
    attention = shape.layers * (2.0 * shape.attention_params + 4.0 * seen)
    layers = attention + 2.0 * ups * shape.hidden * ffn
    head = 2.0 * shape.hidden * shape.vocab
    return tokens * ((4 if with_recompute else 3) * layers + 3 * head)
