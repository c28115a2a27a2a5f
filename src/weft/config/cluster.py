"""Specifications of devices and clusters.

Base units: bytes, FLOP/s, watts.
"""

from __future__ import annotations

import functools
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from weft import units
from weft.config.tpu_slices import in_chips
from weft.errors import ConfigError, Problem, did_you_mean, shown

#: fp32 FLOP/s of a CPU core, with vectors of eight values and fused multiply-add.
_CORE_FLOPS = 2.5e9 * 16
#: Fraction of host memory that all ranks of a host may pin; the default of `memory.pinned_limit`.
_PINNED_SHARE = 0.6
#: Device names of this machine's CPU cores: with rates measured by `weft calibrate`, and with rough estimates.
HERE, CPU = "here", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Specification of one device. None: unknown. Every rate is for one device and one direction.

    Attributes:
        peaks, measured_flops: dense peak FLOP/s by precision, and those of the fastest measured bf16 matmul.
        measured_spread: highest over lowest FLOP/s of measurements, which differ by software, clock and power.
        scale_up_bytes_per_s: rate of the fast links (such as NVLink) within a domain of `scale_up_domain` devices.
        nic_bytes_per_s: the device's share of the network between nodes.
        host_bytes_per_s, host_memory_bytes: rate of the link to host memory, and the device's share of this memory.
        sources: origin of each number: D data sheet, S published measurements, W press and web (uncertain).
    """

    name: str
    title: str = ""
    peaks: tuple[tuple[str, float], ...] = ()
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    scale_up_bytes_per_s: float = 0.0
    scale_up_domain: int = 1
    scale_up_topology: str = "switch"
    nic_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    host_memory_bytes: float | None = None
    watts: float | None = None
    measured_flops: float | None = None
    measured_spread: float = 1.0
    aliases: tuple[str, ...] = ()
    torch_names: tuple[str, ...] = ()
    sources: str = ""
    note: str = ""

    @property
    def is_cpu(self) -> bool:
        """True for a CPU rank, whose device is its share of a host's cores."""
        return self.name in (HERE, CPU)

    @property
    def pinnable_bytes(self) -> float:
        """Host memory (bytes) that a rank may pin. Unknown host memory is assumed to be twice the device memory."""
        return _PINNED_SHARE * (2.0 * self.memory_bytes if self.host_memory_bytes is None else self.host_memory_bytes)

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak FLOP/s of a precision such as "bf16", or None if the device does not support it."""
        return dict(self.peaks).get(precision)


def slowest_of(kinds: Sequence[tuple[DeviceSpec, int]]) -> DeviceSpec:
    """Return a device with the lowest rates and the least memory of all `kinds`, named after the slowest.

    Collectives, pipeline stages and barriers always wait for the slowest device. The power is the average. The result
    supports only the precisions that all kinds support.

    Args:
        kinds: (device, number of these devices).
    """
    specs = [spec for spec, _ in kinds]
    base = min(specs, key=lambda spec: spec.measured_flops or spec.peak_flops("bf16") or spec.peak_flops("fp16") or 0.0)
    peaks = [dict(spec.peaks) for spec in specs]
    shared = {name: min(each[name] for each in peaks) for name in peaks[0] if all(name in each for each in peaks)}
    drawn = [spec.watts for spec in specs]
    count = sum(number for _, number in kinds)
    mean = None if None in drawn else sum((spec.watts or 0.0) * number for spec, number in kinds) / count
    return replace(
        base,
        name=f"{base.name.rstrip('*')}*",
        peaks=tuple(shared.items()),
        memory_bytes=min(spec.memory_bytes for spec in specs),
        memory_bytes_per_s=min(spec.memory_bytes_per_s for spec in specs),
        scale_up_bytes_per_s=min(spec.scale_up_bytes_per_s for spec in specs),
        scale_up_domain=min(spec.scale_up_domain for spec in specs),
        nic_bytes_per_s=_least(spec.nic_bytes_per_s for spec in specs),
        host_bytes_per_s=_least(spec.host_bytes_per_s for spec in specs),
        host_memory_bytes=_least(spec.host_memory_bytes for spec in specs),
        watts=mean,
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# Clusters: nodes, devices per node, and their description in text or TOML.

#: Topologies of the fast links within a scale-up domain.
TOPOLOGIES = ("switch", "mesh", "pcie", "torus2d", "torus3d")

_SHORTHAND = re.compile(r"(?:([0-9]{1,7})x)?(?:([0-9]{1,7})x)?([a-z0-9][a-z0-9._-]*)")
#: Exponent of the clock rate as a function of the power cap: matmuls at 500 of 700 W keep about 0.75 of their rate.
_POWER_EXPONENT = 0.85
#: A memory size after a device name, as in "a100-40gb"; sizes are GB or GiB, so they may differ by 7 %.
_MEMORY_SUFFIX, _MEMORY_TOLERANCE = re.compile(r"(.+?)-?([0-9]{1,3})-?gi?b"), 0.07
#: Numbers and multiplication signs around a device name.
_BESIDE = re.compile(r"[0-9]{1,7}")
_BEFORE, _AFTER = re.compile(r"[0-9x*:\s]*"), re.compile(r"([x*:\s][0-9x*:\s]*)?")
#: Key of a device file -> (field of DeviceSpec, factor to its base unit, parser of text with a unit, example).
_NUMBERS: dict[str, tuple[str, float, Callable[[str], float], str]] = {
    "memory_gib": ("memory_bytes", 2**30, units.parse_bytes, "24GiB"),
    "memory_gb_s": ("memory_bytes_per_s", 1e9, units.parse_rate, "800GB/s"),
    "scale_up_gb_s": ("scale_up_bytes_per_s", 1e9, units.parse_rate, "25GB/s"),
    "scale_up_domain": ("scale_up_domain", 1, int, "8"),
    "nic_gb_s": ("nic_bytes_per_s", 1e9, units.parse_rate, "400Gb/s"),
    "host_gb_s": ("host_bytes_per_s", 1e9, units.parse_rate, "25GB/s"),
    "host_memory_gib": ("host_memory_bytes", 2**30, units.parse_bytes, "128GiB"),
    "watts": ("watts", 1, lambda text: float(text.removesuffix("W")), "300W"),
    "measured_tflops": ("measured_flops", 1e12, units.parse_flops, "90TFLOPS"),
    "measured_spread": ("measured_spread", 1, float, "1.06"),
}
#: Field of a device's description in text -> key of a device file.
_FIELDS = {
    "memory": "memory_gib", "bandwidth": "memory_gb_s", "link": "scale_up_gb_s", "domain": "scale_up_domain",
    "topology": "scale_up_topology", "nic": "nic_gb_s", "host": "host_gb_s", "host_memory": "host_memory_gib",
    "watts": "watts", "measured": "measured_tflops", "like": "like",
}  # fmt: skip
_INTEGERS = ("memory_bytes", "scale_up_domain")
_DESCRIPTION = "npu memory=24GiB bf16=120TFLOPS bandwidth=800GB/s"
_COUNTS, _NAME = re.compile(r"((?:[0-9]{1,7}x){0,2})(.*)", re.DOTALL), re.compile(r"[a-z0-9][a-z0-9._-]*")
_TEXTS, _LISTS = ("title", "scale_up_topology", "sources", "note"), ("aliases", "torch_names")
_MAKERS = ("NVIDIA", "Tesla", "AMD", "Instinct")
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
#: Peak rates of which the description of a device needs at least one.
_PEAKS = ("bf16", "fp16", "fp32")
_DEVICE_KEYS = (*_NUMBERS, *_TEXTS, *_LISTS, "tflops")
_CLUSTER_KEYS = ("nodes", "devices_per_node", "device", "devices_per_host_link", "rack_nodes", "oversubscription")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`nodes` equal machines with `devices_per_node` devices each. Hashable; `str()` returns the shorthand.

    Attributes:
        rack_nodes: nodes per rack (one leaf switch of the network), or 0 for a flat network.
        oversubscription: ratio of the bandwidth of a rack's adapters to its links to other racks.
        kinds, specs: name and count of each kind of a mixed cluster, and the kinds; `device` has the lowest rates.
    """

    nodes: int
    devices_per_node: int
    device: DeviceSpec
    rack_nodes: int = 0
    oversubscription: float = 1.0
    kinds: tuple[tuple[str, int], ...] = ()
    specs: tuple[DeviceSpec, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Read the shorthand: "h100" (one device), "8xh100" (one node) or "2048x8xh100" (nodes x devices).

        A single count larger than the device's largest node is divided into nodes of that size: "64xh100" is
        "8x8xh100". "8xh100+2x8xa100" has nodes of several kinds; `device` is the slowest. "4xcpu" is four
        ranks on this machine's cores. A device may be described: "8xnpu memory=24GiB bf16=120TFLOPS bandwidth=800GB/s
        link=25GB/s".

        Raises:
            ConfigError: for text that cannot be read, and for an unknown device.
        """
        if "+" in text:
            return _of_kinds(text, [cls.parse(part) for part in text.split("+")])
        shorthand = text = in_chips(text)
        description = ""
        if "=" in text and (parts := _COUNTS.fullmatch(text.strip())):
            description = parts[2]
            shorthand = f"{parts[1]}{_split_description(description)[0]}"
        match = _SHORTHAND.fullmatch(re.sub(r"\s+", "-", shorthand.strip().lower()))
        if "," in text:
            rule = "a list of clusters is for --run and --tune all"
            raise _error(f"cluster={text!r}: {rule}. For one job on all of them write '{text.replace(',', '+')}'.")
        first, second, name = match.groups() if match else ("", "", "")
        if not description and name != CPU and _known_device(name or "") is None:
            _expect_order(text)
        if match is None:
            raise _error(f"cluster={text!r}: a cluster is [nodes x] devices x name. Write e.g. '2x8xh100'.")
        nodes, devices = (first, second) if second else ("1", first or "1")
        if int(nodes) < 1 or int(devices) < 1:
            raise _error(f"cluster={text}: a cluster has at least one device. Write e.g. '8x{name}'.")
        if name == CPU and not description:
            return cls(nodes=int(nodes), devices_per_node=int(devices), device=this_cpu(int(devices)))
        spec = device(description or name)
        if not second:
            nodes, devices = _largest_nodes(text, int(devices), spec)
        spec = linked(spec, int(devices))
        return cls(nodes=int(nodes), devices_per_node=int(devices), device=spec)

    @classmethod
    def from_mapping(cls, table: Mapping[str, object], origin: str = "") -> ClusterSpec:
        """Read a table with nodes (default 1), devices_per_node, and device, which is a name or a table of numbers.

        rack_nodes and oversubscription describe racks that share slow links. devices_per_host_link is the number of
        devices that share one link to their host, such as behind one PCIe switch.

        A device table with `like = "h100"` changes single numbers of that device.

        Raises:
            ConfigError: if the table has mistakes; the message lists each with `origin`.
        """
        problems = _unknown_keys(table, _CLUSTER_KEYS, "cluster")
        counts: dict[str, int] = {}
        for key in ("nodes", "devices_per_node"):
            count = table.get(key, 1 if key == "nodes" else None)
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 9_999_999:
                problems.append(Problem(key, f"{key}={shown(count)}: a whole number from 1 is needed. Use e.g. 8."))
            else:
                counts[key] = count
        racks = _racks_of(table, problems)
        spec: DeviceSpec | None = None
        try:
            spec = _device_of(table.get("device"))
        except ConfigError as error:
            problems += error.problems
        spec = _sharing_host_link(spec, table.get("devices_per_host_link", 1), problems)
        if spec is None or problems:
            raise ConfigError(replace(problem, origin=problem.origin or origin) for problem in problems)
        nodes, devices = counts["nodes"], counts["devices_per_node"]
        found = cls(nodes=nodes, devices_per_node=devices, device=linked(spec, devices))
        return replace(found, rack_nodes=racks[0], oversubscription=racks[1])

    @classmethod
    def load(cls, path: Path | str) -> ClusterSpec:
        """Read a TOML file in the form of `from_mapping`.

        Raises:
            ConfigError: if the file cannot be read or is not valid TOML, or as in `from_mapping`.
        """
        try:
            table = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
        except OSError as error:
            raise _error(f"cluster={path}: the file cannot be read ({error.strerror}). Check its path.") from None
        except (ValueError, RecursionError) as error:
            raise _error(f"{path}: this is not valid TOML ({error}). Correct it there.") from None
        return cls.from_mapping(table, str(path))

    def __str__(self) -> str:
        if self.kinds and sum(count for _, count in self.kinds) == self.num_devices:
            return "+".join(f"{count}x{name}" for name, count in self.kinds)
        size = f"{self.devices_per_node}x{self.device.name}"
        return size if self.nodes == 1 else f"{self.nodes}x{size}"


@functools.cache
def devices() -> Mapping[str, DeviceSpec]:
    """Return the built-in devices by name."""
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    tables = cast(dict[str, dict[str, object]], tomllib.loads(text))
    return {name: _changed(DeviceSpec(name=name), table) for name, table in tables.items()}


def device(name: str) -> DeviceSpec:
    """Return a device by its name or an alias, or by a description such as "npu memory=24GiB bf16=120TFLOPS ...".

    Numbers after the name of a built-in device replace that device's numbers.

    Raises:
        ConfigError: for an unknown name (the message lists the built-in ones), or a description with mistakes.
    """
    if "=" in name:
        return _described(name)
    found = this_cpu(1) if name.strip().lower() == CPU else _known_device(name)
    if found is not None:
        return found
    wanted = name.strip().lower()
    sized = _MEMORY_SUFFIX.fullmatch(wanted)
    if sized and (base := _known_device(sized[1])) is not None:
        rule = f"there are data for the {base.name} with {base.memory_bytes / 2**30:.0f} GiB"
        remedy = f"'{base.name} memory={sized[2]}GiB'"
        raise _error(f"device={shown(name)}: {rule}. For another size write {remedy}.", "device")
    known = [*devices(), CPU, *(alias for spec in devices().values() for alias in spec.aliases)]
    hint = did_you_mean(wanted, known)
    rule = f"unknown device.{hint} Known: {', '.join((*devices(), CPU))}"
    raise _error(f"device={shown(name)}: {rule}. Describe another one: '{_DESCRIPTION}'.", "device")


def _split_description(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the fields of a device's description.

    Raises:
        ConfigError: for text that is not name=value, or a repeated field.
    """
    start = re.search(r"(?:^|\s)\S+\s*=", text)
    name = re.sub(r"[\s_]+", "-", text[: start.start()].strip().lower()) if start else ""
    if start is None or not _NAME.fullmatch(name):
        raise _error(f"device={shown(text)}: a description begins with a name. Write e.g. '{_DESCRIPTION}'.", "device")
    found: dict[str, str] = {}
    joined = re.sub(r"\s*=\s*", "=", text[start.start() :].strip())
    for part in re.sub(r"(?<=[0-9])\s+(?=[A-Za-z/]+(?:\s|$))", "", joined).split():  # "800 GB/s"
        key, equals, value = part.partition("=")
        if not equals or not value or key in found:
            rule = "it is repeated" if key in found else "not name=value"
            raise _error(f"device={name} {shown(part)}: {rule}. Write e.g. '{_DESCRIPTION}'.", "device")
        found[key] = value
    return name, found


def _described(text: str) -> DeviceSpec:
    """Return the described device. Raise ConfigError for an invalid description; it names all unknown fields."""
    name, fields = _split_description(text)
    known, problems = [*_FIELDS, *_DTYPES], list[Problem]()
    table: dict[str, object] = {_FIELDS[field]: value for field, value in fields.items() if field in _FIELDS}
    for field in (each for each in fields if each not in known):
        hint = did_you_mean(field, known) or f" Known: {', '.join(known)}."
        problems.append(Problem("device", f"device={name} {field}={shown(fields[field])}: unknown field.{hint}"))
    if base := _known_device(name):
        table.setdefault("like", base.name)
    is_complete = {"memory", "bandwidth"} <= fields.keys() and any(dtype in fields for dtype in _PEAKS)
    if "like" not in table and not is_complete and not problems:
        rule = "a device that is not built in needs memory=, bandwidth= and a peak such as bf16="
        hint = did_you_mean(name, devices())
        problems.append(Problem("device", f"device={name}: {rule}.{hint} Write e.g. '{_DESCRIPTION}'."))
    if problems:
        raise ConfigError(problems)
    if peaks := {field: value for field, value in fields.items() if field in _DTYPES}:
        table["tflops"] = peaks
    found = _device_of(table, fields)
    return found if base else replace(found, name=name)


def described_clusters(description: str, clusters: str | None) -> str:
    """Return `clusters` with the described device's name replaced by its description; None means one such device.

    Raises:
        ConfigError: if the description cannot be read, or no cluster uses it.
    """
    name = _split_description(description)[0]
    parts = re.split(r"([,+])", name if clusters is None else clusters)
    read = [_COUNTS.fullmatch(part.strip()) for part in parts]
    named = [match is not None and re.sub(r"[\s_]+", "-", match[2].strip().lower()) == name for match in read]
    if not any(named):
        raise _error(f"cluster={clusters}: --device describes {name}. Write e.g. '8x{name}'.")
    return "".join(
        f"{match[1]}{description.strip()}" if match and is_named else part
        for part, match, is_named in zip(parts, read, named, strict=True)
    )


def this_cpu(num_ranks: int) -> DeviceSpec:
    """Return one rank's share of this machine's cores and memory, estimated roughly. `weft calibrate` measures them."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // num_ranks)
    return DeviceSpec(
        name=CPU,
        title="CPU",
        peaks=(("fp32", _CORE_FLOPS * share),),
        memory_bytes=psutil.virtual_memory().available // num_ranks,
        memory_bytes_per_s=5e9 * share,
        scale_up_bytes_per_s=2e9,
        scale_up_domain=num_ranks,
        host_bytes_per_s=5e9,
        host_memory_bytes=0,  # a CPU has no other memory to offload to
        note="rough figures for any CPU",
    )


def device_by_torch_name(name: str) -> DeviceSpec | None:
    """Return the device that torch reports as `name`, such as "NVIDIA H100 80GB HBM3", or None if unknown."""
    wanted = " ".join(word for word in name.split() if word not in _MAKERS)
    return next((spec for spec in devices().values() if wanted in spec.torch_names), None)


def _of_kinds(text: str, parts: Sequence[ClusterSpec]) -> ClusterSpec:
    """Return one cluster with the nodes of all parts. Raise ConfigError if their nodes differ in size."""
    size = math.gcd(*(part.devices_per_node for part in parts))
    if any(part.devices_per_node != size for part in parts):
        written = "+".join(f"{part.num_devices // size}x{size}x{part.device.name}" for part in parts)
        raise _error(f"cluster={text}: all nodes have one number of devices. Write e.g. '{written}'.")
    specs = dict.fromkeys(part.device for part in parts)
    counts = {spec: sum(part.num_devices for part in parts if part.device == spec) for spec in specs}
    nodes, kinds = sum(part.nodes for part in parts), tuple((spec.name, count) for spec, count in counts.items())
    if len(counts) == 1:
        return replace(parts[0], nodes=nodes)
    found = slowest_of([*counts.items()])
    return ClusterSpec(nodes=nodes, devices_per_node=size, device=found, kinds=kinds, specs=(*counts,))


def linked(spec: DeviceSpec, count: int) -> DeviceSpec:
    """Return the device, with a scale-up domain of `count` devices if it has fast links but no given domain size."""
    is_open = spec.scale_up_bytes_per_s > 0 and spec.scale_up_domain == 1
    return replace(spec, scale_up_domain=count) if is_open else spec


def _known_device(name: str) -> DeviceSpec | None:
    """Return the device with this name or alias, or None. A memory size in the name ("h100-80gb") must match it."""
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    sized = _MEMORY_SUFFIX.fullmatch(wanted)
    for candidate in [wanted, *([f"{sized[1]}-{sized[2]}", sized[1]] if sized else [])]:
        for spec in devices().values():
            if candidate != spec.name and candidate not in spec.aliases:
                continue
            gib = (spec.memory_bytes or 0) / 2**30
            if sized is None or abs(float(sized[2]) - gib) <= _MEMORY_TOLERANCE * gib:
                return spec
    return None


def _largest_nodes(text: str, count: int, spec: DeviceSpec) -> tuple[int, int]:
    """Return (nodes, devices per node) for a count. Raise ConfigError if full nodes do not have that many devices."""
    most = spec.scale_up_domain
    if most <= 1 or count <= most:
        return 1, count
    if count % most:
        size = next(size for size in range(most, 0, -1) if count % size == 0)
        rule = f"a node has at most {most} {spec.name}, and {count} is not a multiple of {most}"
        raise _error(f"cluster={text}: {rule}. Write nodes x devices, such as '{count // size}x{size}x{spec.name}'.")
    return count // most, most


def _sharing_host_link(spec: DeviceSpec | None, count: object, problems: list[Problem]) -> DeviceSpec | None:
    """Return the device with 1 / count of its host link, which `count` devices share. Append mistakes to `problems`."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 64:
        rule = "a whole number from 1 to 64 is needed"
        problems.append(Problem("devices_per_host_link", f"devices_per_host_link={shown(count)}: {rule}. Use e.g. 2."))
        return spec
    if spec is None or count == 1:
        return spec
    if not spec.host_bytes_per_s:
        rule = "the rate of the device's link to its host is not known"
        remedy = "Give host_gb_s in [device]"
        problems.append(Problem("devices_per_host_link", f"devices_per_host_link={count}: {rule}. {remedy}."))
        return spec
    name = spec.name if spec.name.endswith("*") else f"{spec.name}*"
    return replace(spec, name=name, host_bytes_per_s=spec.host_bytes_per_s / count)


def _racks_of(table: Mapping[str, object], problems: list[Problem]) -> tuple[int, float]:
    """Return (nodes per rack, oversubscription) from a cluster table. Append mistakes to `problems`."""
    nodes, factor = table.get("rack_nodes", 0), table.get("oversubscription", 1.0)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 0:
        problems.append(Problem("rack_nodes", f"rack_nodes={shown(nodes)}: a whole number is needed. Use e.g. 16."))
        nodes = 0
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1000:
        rule = "a number from 1 to 1000 is needed"
        problems.append(Problem("oversubscription", f"oversubscription={shown(factor)}: {rule}. Use e.g. 2."))
        factor = 1.0
    elif factor > 1 and not nodes:
        rule = "it sets the speed of links between racks, and rack_nodes is not set"
        problems.append(Problem("oversubscription", f"oversubscription={factor:g}: {rule}. Give rack_nodes too."))
    return nodes, float(factor)


def _expect_order(text: str) -> None:
    """Raise ConfigError if a supported device and its counts are in the wrong order, such as "h100x8" or "8h100"."""
    low = text.strip().lower()
    names = [each for one in devices().values() for each in (one.name, *one.aliases)]
    for name in sorted(names, key=len, reverse=True):
        before, found, after = low.partition(name)
        if not found:
            continue
        numbers = _BESIDE.findall(before + " " + after)
        if _BEFORE.fullmatch(before) and _AFTER.fullmatch(after) and 1 <= len(numbers) <= 2:
            written = "x".join([*numbers, name])
            rule = "the number comes before the device" if after else "a cluster is [nodes x] devices x name"
            raise _error(f"cluster={text}: {rule}. Write '{written}'.")
        return


def _device_of(value: object, described: Mapping[str, str] | None = None) -> DeviceSpec:
    if isinstance(value, str):
        return device(value)
    if not isinstance(value, dict):
        rule = 'a device is a name or a table. Use e.g. device = "h100" or device = {like = "h100", watts = 500}.'
        raise _error(f"device={shown(value)}: {rule}", "device")
    table = dict(cast(dict[str, object], value))
    like, name = table.pop("like", None), table.pop("name", "")
    if not isinstance(like, str | None) or not isinstance(name, str):
        raise _error(f'device.like={shown(like)}: like and name are strings. Use e.g. like = "h100".', "device")
    base = device(like) if like is not None else DeviceSpec(name="custom")
    changed = _changed(base, table, described)
    if "watts" in table and "measured_tflops" not in table:
        changed = capped(changed, base.watts)
    return replace(changed, name=name or (f"{base.name}*" if table else base.name))  # *: differs from the known device


def capped(spec: DeviceSpec, rated_watts: float | None) -> DeviceSpec:
    """Return a device with the matmul rate at its power cap; unchanged if not capped or not measured.

    Args:
        spec: the device, with the power cap as its power.
        rated_watts: rated power of the device.
    """
    if not rated_watts or not spec.watts or not spec.measured_flops or spec.watts >= rated_watts:
        return spec
    return replace(spec, measured_flops=spec.measured_flops * (spec.watts / rated_watts) ** _POWER_EXPONENT)


def _changed(base: DeviceSpec, table: Mapping[str, object], described: Mapping[str, str] | None = None) -> DeviceSpec:
    """Return `base` with the values of a device table, or raise ConfigError. described: fields of a description."""
    problems = _unknown_keys(table, (*_DEVICE_KEYS, "like", "name"), "device")
    values: dict[str, object] = {}
    for key, value in table.items():
        if key in _NUMBERS:
            field, factor, parse, example = _NUMBERS[key]
            number = _number(value, factor, parse)
            is_none = key == "host_memory_gib" and number == 0  # memory shared with the host
            if not (is_none or _is_positive(number)) or (key == "scale_up_domain" and number % 1):
                rule = "a whole number above 0" if key == "scale_up_domain" else "a number above 0 with its unit"
                label, used = f"device.{key}", f'{key} = "{example}"'
                if described is not None:
                    label = next((name for name in described if _FIELDS.get(name) == key), key)
                    used = f"{label}={example}"
                problems.append(Problem(key, f"{label}={shown(value)}: {rule} is needed. Use e.g. {used}."))
            else:
                values[field] = round(number) if field in _INTEGERS else number
        elif key == "tflops":
            values["peaks"] = tuple(_peaks(value, problems, described is not None))
        elif key in _TEXTS or key in _LISTS:
            values[key] = _text(key, value, problems)
    if problems:
        raise ConfigError(problems)
    return replace(base, **values)  # pyright: ignore[reportArgumentType]  # checked when it is made


def _number(value: object, factor: float, parse: Callable[[str], float]) -> float:
    """Return a number in its base unit, from a number in the file's unit or text with a unit; nan for others."""
    if isinstance(value, str):
        try:  # a size has a unit
            return math.nan if parse is units.parse_bytes and value[-1:].isdigit() else float(parse(value))
        except ValueError:
            return math.nan
    is_zero = value == 0 and not isinstance(value, bool)
    return cast(float, value) * factor if is_zero or _is_positive(value) else math.nan


def _peaks(value: object, problems: list[Problem], is_described: bool) -> list[tuple[str, float]]:
    table = cast(dict[str, object], value) if isinstance(value, dict) else {"": value}
    peaks = [(dtype, _number(peak, 1e12, units.parse_flops)) for dtype, peak in table.items()]
    wrong = [dtype for dtype, peak in peaks if dtype not in _DTYPES or not _is_positive(peak)]
    if wrong and is_described:
        rule = f"a dense peak with its unit is needed. Use e.g. {wrong[0]}=120TFLOPS."
        problems.append(Problem("tflops", f"{wrong[0]}={shown(table[wrong[0]])}: {rule}"))
    elif wrong:
        rule = f"peaks are numbers keyed by precision ({', '.join(_DTYPES)}). Use e.g. tflops = {{bf16 = 989}}."
        problems.append(Problem("tflops", f"device.tflops={shown(table)}: {rule}"))
    return [] if wrong else peaks


def _text(key: str, value: object, problems: list[Problem]) -> str | tuple[str, ...]:
    if key in _LISTS:
        parts = cast(list[object], value) if isinstance(value, list) else [None]
        texts = tuple(part for part in parts if isinstance(part, str))
        if len(texts) < len(parts):
            problems.append(Problem(key, f'device.{key}={shown(parts)}: a list of strings is needed. Use ["h100"].'))
        return texts
    if not isinstance(value, str):
        problems.append(Problem(key, f'device.{key}={shown(value)}: a string is needed. Use e.g. "h100".'))
        return ""
    if key == "scale_up_topology" and value not in TOPOLOGIES:
        hint = did_you_mean(value, TOPOLOGIES) or " Use switch."
        problems.append(Problem(key, f"device.{key}={shown(value)}: not one of {', '.join(TOPOLOGIES)}.{hint}"))
    return value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18 and math.isfinite(value)


def _unknown_keys(table: Mapping[str, object], known: tuple[str, ...], place: str) -> list[Problem]:
    every = f" Known: {', '.join(known)}."
    return [
        Problem(key, f"unknown {place} key {key!r}.{did_you_mean(key, known) or every}")
        for key in table
        if key not in known
    ]


def _error(message: str, field: str = "cluster") -> ConfigError:
    return ConfigError([Problem(field, message)])
