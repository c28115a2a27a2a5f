"""Import of the keys of a DeepSpeed config that become settings of the run: optimizer, schedule, clipping, printing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from weft.interop.deepspeed_keys import Reading, default_text, is_number, known_keys, number_text

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
#: By DeepSpeed's optimizer name in lower case: Weft's name, and DeepSpeed's defaults of its parameters.
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "adam": ("adamw", _ADAM),
    "adamw": ("adamw", _ADAM),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
}
#: Optimizers of DeepSpeed or torch that DeepSpeed supports and Weft's config does not.
OTHER_OPTIMIZERS = (
    *("Lion", "Lamb", "Adagrad", "Muon", "MuAdam", "MuAdamW", "MuSGD"),
    *("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS", "Adafactor", "SparseAdam"),
)
REMOVED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Conversion of a schedule.

    Attributes:
        kind: Weft's schedule.
        final: its last factor of the learning rate.
        params: DeepSpeed's parameters.
        near: description of DeepSpeed's schedule if Weft's is only similar, else "".
    """

    kind: str
    final: float
    params: tuple[str, ...]
    near: str = ""


_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
_PEAK = ("warmup_min_lr", "warmup_max_lr")
SCHEDULES: Mapping[str, _Schedule] = {
    "WarmupLR": _Schedule("constant", 1.0, (*_WARMUP, *_PEAK)),
    "WarmupDecayLR": _Schedule("linear", 0.0, (*_WARMUP, *_PEAK, "total_num_steps")),
    "WarmupCosineLR": _Schedule("cosine", 1e-4, (*_WARMUP, "warmup_min_ratio", "cos_min_ratio", "total_num_steps")),
    "OneCycle": _Schedule(
        "linear",
        0.0,
        tuple(key.rpartition(".")[2] for key in known_keys() if ".params.cycle_" in key or ".params.decay_" in key),
        near="one cycle of learning rate and momentum",
    ),
}
#: Schedules of DeepSpeed or torch that Weft has no similar schedule for.
OTHER_SCHEDULES = (
    *("LRRangeTest", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR"),
    *("ExponentialLR", "PolynomialLR", "CosineAnnealingLR", "CyclicLR", "OneCycleLR", "CosineAnnealingWarmRestarts"),
)
_OPTIMIZER, _SCHEDULER = "optimizer.params", "scheduler.params"


def read_clipping(reading: Reading) -> None:
    """Read gradient_clipping into optimizer.max_grad_norm, and steps_per_print into log.every."""
    key, inner = "gradient_clipping", f"{_OPTIMIZER}.max_grad_norm"
    norm, other = reading.number(key), reading.number(inner)
    if norm is not None:
        reading.set(key, "optimizer.max_grad_norm", norm)
    elif key not in reading.values and inner not in reading.values:
        reading.notes.append(
            "gradient_clipping is not in the file: DeepSpeed has clipped at 1 since June 2026 and did not clip before; "
            f"Weft clips at optimizer.max_grad_norm={default_text('optimizer.max_grad_norm')}."
        )
    if key in reading.values and inner in reading.values:
        reading.follows(inner, key)
    elif other is not None:
        reading.set(inner, "optimizer.max_grad_norm", other)
    key = "steps_per_print"
    if reading.values.get(key) in ("inf", math.inf, 0):
        reading.nothing(key, f"DeepSpeed never prints with this value; log.every stays {default_text('log.every')}")
    elif (steps := reading.read_int(key)) is not None:
        reading.set(key, "log.every", steps)


def read_optimizer(reading: Reading) -> str:
    """Read the optimizer and its parameters. Return its name in Weft, or '' if the file has no supported optimizer."""
    key = "optimizer.type"
    named = reading.choice(key, (*_TITLES.values(), *OTHER_OPTIMIZERS, *REMOVED_OPTIMIZERS))
    if named is None:
        broken = key in reading.values
        _report_params(reading, _OPTIMIZER, "optimizer.type" if broken else "optimizer.type, which the file lacks")
        return ""
    name, defaults = OPTIMIZERS.get(named.lower(), ("", {}))
    if not name:
        remedy = "Weft's config has adamw, sgd, muon, and any torch optimizer as optimizer.name=package.module:Class"
        if named in REMOVED_OPTIMIZERS:
            less = "to send less, add plan.compress=int8, which works with any optimizer and ZeRO stage"
            reading.removed(key, f"{named}. {remedy}; {less}")
        else:
            reading.missing(key, f"{named}. {remedy}")
        _report_params(reading, _OPTIMIZER, f"optimizer.type: Weft does not translate {named}")
        reading.open += ["optimizer.name", "optimizer.lr"]
        return ""
    _read_params(reading, named, name, defaults)
    return name


_TITLES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


def _read_params(reading: Reading, named: str, name: str, defaults: Mapping[str, object]) -> None:
    reading.set("optimizer.type", "optimizer.name", name)
    filled: list[str] = []
    taken = tuple(defaults) or ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    for part in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov"):
        key, setting = f"{_OPTIMIZER}.{part}", f"optimizer.{part}"
        if key in reading.values and part not in taken:
            reading.nothing(key, f"{named} has no such parameter")
            continue
        value = _param(reading, key, part)
        if value is not None:
            reading.set(key, setting, value)
        elif part in defaults and key not in reading.values:
            reading.settings[setting] = defaults[part]
            filled.append(f"{setting}={number_text(defaults[part])}")
    if filled:
        text = f"optimizer.name={name}, with DeepSpeed's own {', '.join(filled)}"
        reading.became("optimizer.type", text, "optimizer.name")
    _read_adam_mode(reading, named)


def _param(reading: Reading, key: str, part: str) -> object:
    if part == "betas":
        return _betas(reading, key)
    if part == "nesterov":
        return reading.switch(key)
    if part == "momentum":
        return reading.number(key, below=1)
    return reading.number(key, above_zero=part in ("lr", "eps"))


def _betas(reading: Reading, key: str) -> tuple[float, float] | None:
    value = reading.values.get(key)
    if reading.is_auto(key):
        reading.leave_open(key)
        return None
    if value is None:
        return None
    pair = cast(list[object], value) if isinstance(value, list | tuple) else []
    if len(pair) == 2 and all(is_number(part, below=1) for part in pair):
        first, second = cast(tuple[float, float], pair)
        return float(first), float(second)
    reading.wrong(key, "the value must be two numbers from 0 and below 1", f"Use e.g. {key}=[0.9, 0.999]")
    return None


def _read_adam_mode(reading: Reading, named: str) -> None:
    key = f"{_OPTIMIZER}.adam_w_mode"
    decoupled = reading.switch(key)
    if decoupled is None:
        return
    if named not in ("Adam", "AdamW"):
        reading.nothing(key, f"{named} has no such parameter")
    elif decoupled or named == "AdamW":
        reading.follows(key, "optimizer.name=adamw: weight decay is decoupled from the gradient")
    elif reading.settings.get("optimizer.weight_decay") == 0:
        reading.follows(key, "optimizer.name=adamw: without weight decay the two are the same")
    else:
        reading.missing(key, "weight decay inside the gradient; adamw decouples it")


def _report_params(reading: Reading, section: str, source: str) -> None:
    for key in reading.values:
        if key.startswith(f"{section}.") and key not in reading.lines:
            reading.follows(key, source)


def read_scheduler(reading: Reading, optimizer: str) -> None:
    """Read the scheduler into schedule.*, train.steps and, as in DeepSpeed, the peak learning rate."""
    key = "scheduler.type"
    named = reading.choice(key, (*SCHEDULES, *OTHER_SCHEDULES))
    schedule = SCHEDULES.get(named or "")
    if named is None and key not in reading.values and optimizer:
        reading.notes.append(
            f"The file has no scheduler: Weft uses its default ({default_text('schedule.kind')}, after a warm-up); "
            f"schedule.kind=constant with schedule.warmup_steps=0 keeps the learning rate constant."
        )
    if named is not None and schedule is None:
        reading.missing(key, f"{named}. Weft has constant, linear, cosine and wsd; schedule.* keeps its defaults")
    if schedule is None or named is None:
        missing = "" if key in reading.values else ", which the file lacks"
        _report_params(reading, _SCHEDULER, f"scheduler.type{missing}")
        return
    for param in [other for other in reading.values if other.startswith(f"{_SCHEDULER}.")]:
        if param.rpartition(".")[2] not in schedule.params:
            reading.nothing(param, f"{named} has no such parameter")
    _read_shape(reading, named, schedule)
    _read_peak(reading, named, optimizer)


def _read_shape(reading: Reading, named: str, schedule: _Schedule) -> None:
    text = f"schedule.kind={schedule.kind}"
    reading.settings["schedule.kind"] = schedule.kind
    if schedule.near:
        reading.missing("scheduler.type", f"{schedule.near}; the nearest is {text}", "schedule.kind")
        warmup = f"{_SCHEDULER}.cycle_first_step_size"
        default = 2000
    else:
        reading.became("scheduler.type", text, "schedule.kind")
        warmup, default = f"{_SCHEDULER}.warmup_num_steps", 1000
    steps = reading.read_int(warmup, low=0)
    if steps is not None:
        reading.set(warmup, "schedule.warmup_steps", steps)
    elif warmup not in reading.values:
        reading.settings["schedule.warmup_steps"] = default
        reading.notes.append(f"schedule.warmup_steps={default} is {named}'s default; the file leaves it out.")
    _read_end(reading, schedule)
    _read_warmup_type(reading, named, schedule)


def _read_end(reading: Reading, schedule: _Schedule) -> None:
    key = f"{_SCHEDULER}.total_num_steps"
    if "total_num_steps" in schedule.params:
        total = reading.read_int(key)
        if total is not None:
            reading.set(key, "train.steps", total)
    if schedule.kind == "constant":
        return
    final: float | None = schedule.final
    key = f"{_SCHEDULER}.cos_min_ratio"
    if "cos_min_ratio" in schedule.params and key in reading.values:
        final = reading.number(key, below=1.0000001)
        if final is not None:
            reading.set(key, "schedule.final", final)
    if final is not None:
        reading.settings["schedule.final"] = final


def _read_warmup_type(reading: Reading, named: str, schedule: _Schedule) -> None:
    key = f"{_SCHEDULER}.warmup_type"
    if "warmup_type" not in schedule.params:
        return
    if reading.values.get(key) == "linear":
        reading.follows(key, "schedule.warmup_steps: the rate rises linearly")
    elif key in reading.values:
        reading.missing(key, "a logarithmic warm-up; here the rate rises linearly")
    else:
        reading.notes.append(
            f"{named} warms up logarithmically where the file has no warmup_type; Weft warms up linearly."
        )


def _read_peak(reading: Reading, named: str, optimizer: str) -> None:
    """Read warmup_max_lr (or cycle_max_lr), which replaces the optimizer's lr, as in DeepSpeed."""
    lr, cycle = f"{_OPTIMIZER}.lr", named == "OneCycle"
    key = f"{_SCHEDULER}.{'cycle_max_lr' if cycle else 'warmup_max_lr'}"
    if key.rpartition(".")[2] not in SCHEDULES[named].params:
        return
    low_key = f"{_SCHEDULER}.cycle_min_lr"
    low = reading.number(low_key) if cycle else None
    peak = reading.number(key, above_zero=True)
    if "optimizer.type" in reading.values and not optimizer:
        for other in (key, low_key):
            if other in reading.values:
                reading.follows(other, "optimizer.type: its learning rates do not suit adamw")
        return
    if peak is None and key not in reading.values and named == "WarmupDecayLR":
        reading.settings["optimizer.lr"] = 1e-3  # replaces the optimizer's value
        reading.notes.append("optimizer.lr=0.001 is WarmupDecayLR's default warmup_max_lr; the file leaves it out.")
        if lr in reading.values:
            reading.follows(lr, "scheduler.type: WarmupDecayLR's default warmup_max_lr=0.001 replaces it")
        return
    if peak is None:
        return
    reading.set(key, "optimizer.lr", peak)
    if lr in reading.values:
        reading.follows(lr, f"{key}, which replaces it in DeepSpeed too")
    if low is not None and low <= peak:
        reading.settings["schedule.final"] = low / peak
        reading.became(low_key, f"schedule.final={number_text(low / peak)}", "schedule.final")
    elif low is not None:
        reading.wrong(low_key, f"the value is above cycle_max_lr={number_text(peak)}", "Swap the two")
