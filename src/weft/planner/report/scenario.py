"""What-if queries: the same query with more devices, a faster network or longer sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft import units
from weft.config.cluster import ClusterSpec, DeviceSpec, capped, device, linked
from weft.errors import ConfigError, Problem, did_you_mean
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.model_source import read_model
from weft.planner.search.question import PACKED, RANK, TUNES, Question, tuned_question
from weft.planner.search.refine import estimated

#: Formats that can be estimated although no search chooses them, and the number of layouts to estimate.
_NARROW, _LAYOUTS = ("fp8", "fp4"), 10


@dataclass(frozen=True, slots=True)
class Scenario:
    """Changed query, with the text of the change and its answer."""

    text: str
    question: Question
    answer: Answer[Candidate]


def _devices(question: Question, value: float) -> Question:
    count, per_node = int(value), question.cluster.devices_per_node
    if count <= per_node:
        return _cluster(question, nodes=1, devices_per_node=count)
    if count % per_node:
        raise _error("gpus", f"gpus={count}: nodes have {per_node} devices. Use a multiple of {per_node}.")
    return _cluster(question, nodes=count // per_node)


def _cluster(question: Question, **changes: Any) -> Question:
    return replace(question, cluster=replace(question.cluster, **changes))


def _changed(spec: DeviceSpec, **changes: Any) -> DeviceSpec:
    return replace(spec, name=f"{spec.name.rstrip('*')}*", **changes)


def _flops(question: Question, value: float) -> Question:
    """Set the bf16 peak in TFLOP/s. Other precisions are scaled by the same factor."""
    spec = question.cluster.device
    factor = value * 1e12 / (spec.peak_flops("bf16") or spec.peak_flops("fp16") or 1.0)
    peaks = tuple((name, peak * factor) for name, peak in spec.peaks)
    measured = None if spec.measured_flops is None else spec.measured_flops * factor
    return _cluster(question, device=_changed(spec, peaks=peaks, measured_flops=measured))


def _watts(question: Question, value: float) -> Question:
    """Set a power cap, which lowers rates. Reject values above the device's power, since their effect is unknown."""
    spec = question.cluster.device
    if not spec.watts or value > spec.watts:
        rule = f"{spec.name} draws {spec.watts:g}" if spec.watts else f"what {spec.name} draws is not known"
        raise _error("watts", f"watts={value:g}: {rule}. {'Use less.' if spec.watts else 'Leave it out.'}")
    if not spec.measured_flops and value < spec.watts:
        raise _error(
            "watts", f"watts={value:g}: the speed of {spec.name} below {spec.watts:g} W is not known. Leave it out."
        )
    return _cluster(question, device=capped(_changed(spec, watts=value), spec.watts))


def _job(question: Question, field: str, value: float) -> Question:
    return replace(question, job=replace(question.job, **{field: int(value)}))


def _adapter(question: Question, rank: float, base: str = "stored") -> Question:
    size = question.model.adapter_of(int(rank), base)
    if not size.width:
        rule = f"{question.model.name} has no linear layer that an adapter fits"
        raise _error("adapter", f"adapter={rank:g}: {rule}. Leave it out.")
    return replace(question, job=replace(question.job, adapter=size))


@dataclass(frozen=True, slots=True)
class Lever:
    """A condition that can be changed: its unit, its current value, and a function that sets it.

    Attributes:
        whole: True if values are whole numbers.
        parse: parser of a value with a unit, such as "300GB/s".
        example: an example value.
    """

    unit: str
    now: Callable[[Question], float]
    set: Callable[[Question, float], Question]
    whole: bool = False
    parse: Callable[[str], float] = units.parse_count
    example: str = ""


def _of_device(
    unit: str, field: str, scale: float, parse: Callable[[str], float], example: str, whole: bool = False
) -> Lever:  # fmt: skip
    """Return the lever that changes a field of the device. One `unit` has `scale` base units."""

    def set_value(question: Question, value: float) -> Question:
        number = value * scale
        changes = {field: int(number) if field in ("memory_bytes", "scale_up_domain") else number}
        return _cluster(question, device=_changed(question.cluster.device, **changes))

    return Lever(
        unit,
        lambda question: (getattr(question.cluster.device, field) or 0.0) / scale,
        set_value,
        whole=whole,
        parse=lambda text: parse(text) / scale,
        example=example,
    )


def _rank_now(question: Question) -> float:
    return question.job.adapter.rank if question.job.adapter else RANK


LEVERS: dict[str, Lever] = {
    "gpus": Lever("devices", lambda q: q.cluster.num_devices, _devices, whole=True),
    "nodes": Lever("nodes", lambda q: q.cluster.nodes, lambda q, v: _cluster(q, nodes=int(v)), whole=True),
    "seq": Lever("tokens", lambda q: q.job.seq_len, lambda q, v: _job(q, "seq_len", v), whole=True),
    "batch": Lever("sequences", lambda q: q.job.global_batch, lambda q, v: _job(q, "global_batch", v), whole=True),
    "adapter": Lever("ranks", _rank_now, _adapter, whole=True),
    "qlora": Lever("ranks", _rank_now, lambda q, v: _adapter(q, v, "nf4"), whole=True),
    "nic": _of_device("GB/s for each device", "nic_bytes_per_s", 1e9, units.parse_rate, "400Gb/s"),
    "link": _of_device("GB/s for each device", "scale_up_bytes_per_s", 1e9, units.parse_rate, "300GB/s"),
    "domain": _of_device("devices", "scale_up_domain", 1, units.parse_count, "", whole=True),
    "hbm": _of_device("GiB", "memory_bytes", 2**30, units.parse_bytes, "96GiB"),
    "bandwidth": _of_device("GB/s", "memory_bytes_per_s", 1e9, units.parse_rate, "800GB/s"),
    "tflops": Lever(
        "bf16 TFLOP/s",
        lambda q: (q.cluster.device.peak_flops("bf16") or q.cluster.device.peak_flops("fp16") or 0.0) / 1e12,
        _flops,
        parse=lambda text: units.parse_flops(text) / 1e12,
        example="120TFLOPS",
    ),
}
#: Power cap of each device, under either name.
LEVERS["watts"] = LEVERS["power"] = Lever(
    "watts",
    lambda q: q.cluster.device.watts or 0.0,
    _watts,
    parse=lambda text: float(text.removesuffix("W")),
    example="300W",
)


#: Conditions with a fixed set of values.
_WORDS = {"optimizer": ("adamw", "sgd", "muon"), "states": ("fp32", "bf16", "fp8", "pure_bf16")}
#: Changes of the stack by the format of AdamW's moments: bytes per parameter of master weight and moments. With
#: pure_bf16, as libraries for fine-tuning train all weights, there is no master weight, and gradients are bf16 too.
_STATES: dict[str, dict[str, Any]] = {
    "fp32": {"main_bytes": 12.0},
    "bf16": {"main_bytes": 8.0},
    "fp8": {"main_bytes": 6.0},
    "pure_bf16": {"main_bytes": 4.0, "master": False, "grad_bytes": 2.0, "reduce_bytes": 2.0, "step_bytes": 2.0},
}


def _worded(question: Question, name: str, value: str) -> Question:
    if value not in _WORDS[name]:
        rule = f"it is {', '.join(_WORDS[name][:-1])} or {_WORDS[name][-1]}"
        raise _error(name, f"{name}={value}: {rule}. Write e.g. {name}={_WORDS[name][1]}.")
    job = question.job
    if name == "optimizer":
        return replace(question, job=replace(job, optimizer=value))
    if job.optimizer != "adamw":
        raise _error(name, f"states={value}: these are formats of AdamW's means. Use it with optimizer=adamw.")
    return replace(question, job=replace(job, stack=replace(job.stack, **_STATES[value])))


def change(question: Question, text: str) -> Question:
    """Return the query changed by a text such as "gpus=16,nic=2x", which sets conditions to a value or multiplies them.

    `cluster=4x8xh200` or `device=h200` changes the cluster.

    Raises:
        ConfigError: for an unknown condition or an invalid value.
    """
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise _error("what-if", f"what-if={word!r}: a change is name=value. Write e.g. 'gpus=16,nic=2x,seq=16384'.")
        if name in ("cluster", "device"):
            machines = (
                ClusterSpec.parse(value)
                if name == "cluster"
                else replace(question.cluster, device=linked(device(value), question.cluster.devices_per_node))
            )
            question = replace(question, cluster=machines)
            continue
        if name == "graphs":  # no search tries graphs by itself
            if value not in ("on", "off"):
                raise _error("graphs", f"graphs={value}: it is on or off. Write graphs=on.")
            question = replace(question, fixed={**question.fixed, "graphs": value == "on"})
            continue
        if name in _WORDS:
            question = _worded(question, name, value)
            continue
        lever = LEVERS.get(name)
        if lever is None:
            known = ["cluster", "device", "precision", "graphs", *_WORDS, *LEVERS]
            hint = did_you_mean(name, known) or f" Known: {', '.join(known)}."
            raise _error("what-if", f"what-if={name}: not a quantity that can be changed.{hint}")
        question = lever.set(question, _number(name, value, lever, lever.now(question)))
    length, model = question.job.seq_len, question.model
    if length > 1 and not model.reads_sequence:
        raise _error("seq", f"seq={length}: {model.name} has no sequence dimension. Leave it out.")
    if length > model.spec.max_seq_len:
        raise _error("seq", f"seq={length}: {model.name} reads at most {model.spec.max_seq_len} tokens. Use less.")
    return question


def _number(name: str, text: str, lever: Lever, now: float) -> float:
    try:
        plain = text.replace(".", "", 1).isdigit()
        value = now * float(text[:-1]) if text.endswith("x") else float(text) if plain else lever.parse(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12 or (lever.whole and value != int(value)):
        kind = "whole number" if lever.whole else "number"
        rule = f"a {kind} of {lever.unit} above 0 is needed, or a multiple of today's {now:g}"
        written = lever.example or max(1, round(2 * now))
        raise _error(name, f"{name}={text}: {rule}. Write e.g. {name}={written} or {name}=2x.")
    return value


def what_if(text: str, question: Question) -> Scenario:
    """Apply a change to the query, and answer it.

    Raises:
        ConfigError: as in `change`, or for a format that the device or a traced model does not support.
    """
    words = [word.strip() for word in text.split(",")]
    narrow = [word.partition("=")[2].strip() for word in words if word.partition("=")[0].strip() == "precision"]
    rest = ",".join(word for word in words if word.partition("=")[0].strip() != "precision")
    changed = change(question, rest) if rest else question
    found = answer(changed)
    return Scenario(text, changed, _in_format(found, narrow[-1]) if narrow else found)


def _in_format(found: Answer[Candidate], narrow: str) -> Answer[Candidate]:
    """Return the answer with matmuls in fp8 or fp4, which no search chooses.

    Its plans are the best half-precision plans with only the format of matmuls changed. Without half-precision plans,
    the answer is not changed. Raises ConfigError if the device or a traced model does not support the format.
    """
    question = found.question
    has = [name for name in _NARROW if question.cluster.device.peak_flops(name)]
    if narrow not in has:
        rule = f"{question.cluster.device.name} multiplies in no format of that name"
        remedy = f"Use precision={' or '.join(has)}" if has else "Leave it out; only newer devices have fp8"
        raise _error("precision", f"precision={narrow}: {rule}. {remedy}.")
    if question.model.traced is not None:
        raise _error("precision", f"precision={narrow}: {question.model.name} was traced in one format. Leave it out.")
    plans = [one.plan for one in found.layouts(_LAYOUTS) if one.plan.precision in ("bf16", "fp16")]
    if not plans:
        return found
    ranked = sorted(estimated(plans, question, narrow), key=lambda one: one.step_s)
    return replace(found, ranked=tuple(ranked), pareto=())


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])


# Fine-tuning methods on clusters.


@dataclass(frozen=True, slots=True)
class Fit:
    """Best plans of one fine-tuning method on one cluster."""

    tune: str
    question: Question
    answer: Answer[Candidate]

    @property
    def smallest(self) -> Candidate | None:
        """Best plan that fits, or else the plan with the least memory, or None."""
        return self.answer.best or self.answer.nearest


def what_fits(model: Any, clusters: str, **options: Any) -> list[Fit]:
    """Return the best plans of each tuning method that the model supports, on each of the comma-separated clusters.

    Raises:
        ConfigError: as in `tuned_question`.
    """
    planned, found = read_model(model), list[Fit]()
    for cluster in filter(None, clusters.split(",")):
        for tune in TUNES:
            if planned.is_transposed and tune in PACKED:
                continue
            asked = tuned_question(planned, cluster, tune, **dict(options))
            found.append(Fit(tune, asked, answer(asked)))
    return found
