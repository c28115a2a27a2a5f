"""Import of DeepSpeed configs: conversion to a plan and settings of a run.

Batch sizes satisfy train_batch_size = micro batch x accumulation x data-parallel ranks, and any of them may be omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from weft import env
from weft.config.files import by_line
from weft.config.plan import Plan
from weft.config.rules.plan_rules import NOT_BUILT as NOT_BUILT_RULES
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts, Rule
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, PlanError, Problem
from weft.interop.deepspeed_keys import BECAME, MOST, NOT_BUILT, TYPO, Outcome, Reading, Source, read_source
from weft.interop.deepspeed_training import read_clipping, read_optimizer, read_scheduler

TOTAL, MICRO, PASSES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(slots=True)
class _Batch:
    """The four batch numbers: total, micro batch, accumulation steps and data-parallel ranks. None if unknown."""

    total: int | None
    micro: int | None
    passes: int | None
    ranks: int | None


def read_batch(reading: Reading, world_size: int | None) -> int | None:
    """Read the batch sizes into train.global_batch and microbatches per step.

    Return the number of data-parallel ranks, or None if it is unknown. The three batch sizes together determine it.
    world_size: number of all ranks, or None.
    """
    batch = _Batch(
        reading.read_int(TOTAL), reading.read_int(MICRO), reading.read_int(PASSES), _data_ranks(reading, world_size)
    )
    broken = any(problem.field in (TOTAL, MICRO, PASSES) for problem in reading.problems)
    if broken:
        return batch.ranks
    if batch.passes is None and PASSES not in reading.values and (batch.total is None or batch.micro is None):
        batch.passes = 1  # DeepSpeed's default; "auto" stays undetermined
    _complete(reading, batch)
    _report_passes(reading, batch)
    _report_total(reading, batch)
    _report_micro(reading, batch)
    return batch.ranks


def _data_ranks(reading: Reading, world_size: int | None) -> int | None:
    others = 1
    for axis in ("tp", "cp", "pp"):
        size = reading.plan.get(axis, 1)
        others *= size if isinstance(size, int) else 1
    if world_size is None:
        return None
    if world_size % others:
        key = next(line.key for line in reading.lines.values() if {"plan.tp", "plan.cp", "plan.pp"} & {*line.fields})
        rule = f"tensor, sequence and pipeline groups need a multiple of {others} ranks, and there are {world_size}"
        reading.wrong(key, rule, f"Use a multiple of {others} ranks")
        return None
    return world_size // others


def _complete(reading: Reading, batch: _Batch) -> None:
    """Compute the number that the others determine. Report an error if they contradict each other."""
    total, micro, passes, ranks = batch.total, batch.micro, batch.passes, batch.ranks
    if total is None:
        if micro and passes and ranks and micro * passes * ranks <= MOST:
            batch.total = micro * passes * ranks
        elif micro and passes and micro * passes * (ranks or 1) > MOST:
            reading.wrong(
                MICRO, f"with {PASSES}={passes} and {ranks or 1} ranks the batch is above {MOST}", "Lower one"
            )
        return
    unit = (micro or 1) * (passes or 1) * (ranks or 1)
    if total % unit or (micro and passes and ranks and total != unit):
        known = (("micro batch", micro), ("accumulation", passes), ("ranks", ranks))
        product = " x ".join(f"{number} ({name})" for name, number in known if number)
        fits = f"{product} = {unit}"
        rule = f"it must be {fits}" if micro and passes and ranks else f"it must be a multiple of {fits}"
        below = unit if micro and passes and ranks else max(1, total // unit) * unit
        reading.wrong(TOTAL, rule, f"Use {TOTAL}={below}, or change the others")
    elif micro and passes and not ranks:
        batch.ranks = total // unit
        reading.notes.append(f"The three numbers of the batch imply {batch.ranks} data-parallel ranks.")
    elif micro and ranks and not passes:
        batch.passes = total // unit
    elif ranks and not micro:
        batch.micro = total // unit if passes else None


def _report_passes(reading: Reading, batch: _Batch) -> None:
    pp = reading.plan.get("pp", 1)
    field = "microbatches" if isinstance(pp, int) and pp > 1 else "accumulation"
    if batch.passes is not None and batch.passes > 1:
        reading.plan[field] = batch.passes
    if PASSES not in reading.values or (batch.passes is None and reading.is_auto(PASSES)):
        return
    if not reading.is_auto(PASSES):
        reading.became(PASSES, f"plan {field}={batch.passes}", f"plan.{field}")
    else:
        reading.open.remove("plan.accumulation")
        reading.follows(PASSES, f"the batch and the ranks: plan {field}={batch.passes}")


def _report_total(reading: Reading, batch: _Batch) -> None:
    setting = "train.global_batch"
    if batch.total is not None:
        reading.settings[setting] = batch.total
        if reading.is_auto(TOTAL):
            reading.follows(TOTAL, f"micro batch x accumulation x ranks: {setting}={batch.total}")
        elif TOTAL in reading.values:
            reading.became(TOTAL, f"{setting}={batch.total}", setting)
        while setting in reading.open:
            reading.open.remove(setting)
    elif batch.micro is not None:
        passes = "" if batch.passes == 1 else f" x {batch.passes or 'accumulation'}"
        reading.notes.append(
            f"{setting} is {batch.micro}{passes} x the data-parallel ranks; "
            f"give the number of ranks (--world-size), or set it."
        )
        if setting not in reading.open:
            reading.open.append(setting)


def _report_micro(reading: Reading, batch: _Batch) -> None:
    if MICRO not in reading.values:
        return
    total_typed = TOTAL in reading.values and not reading.is_auto(TOTAL)
    if total_typed and batch.passes is None and batch.micro is not None:
        reading.open.append("plan.accumulation")
        reading.notes.append(
            f"plan.accumulation is {batch.total} / ({batch.micro} x the data-parallel ranks); "
            f"give the number of ranks (--world-size), or set it."
        )
        reading.follows(MICRO, "the batch and the ranks: it decides plan.accumulation once the ranks are known")
    elif total_typed and PASSES not in reading.values and batch.micro is not None:
        reading.became(MICRO, f"plan accumulation={batch.passes}", "plan.accumulation")
    elif total_typed:
        reading.follows(MICRO, "the batch, its passes and the ranks")
    elif reading.is_auto(MICRO):
        return  # reported with the default of train.global_batch
    elif batch.total is not None:
        reading.became(MICRO, f"train.global_batch={batch.total}", "train.global_batch")
    else:
        reading.follows(MICRO, "train.global_batch, once the ranks are known")


# The keys of a DeepSpeed config that become the plan, except the batch: precision, axes, ZeRO, offload, recompute.

_ZERO = "zero_optimization"
_DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
}


def read_precision(reading: Reading) -> None:
    """Read bf16, fp16 and torch_autocast into plan.precision, and the settings of fp16's loss scale that Weft has."""
    given = {key: reading.switch(key) for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")}
    on = [key for key, value in given.items() if value]
    if "fp16.enabled" in on and len(on) > 1:
        reading.wrong("fp16.enabled", f"{on[0]} is true too, and a model has one precision", "Switch one of them off")
    for key, value in given.items():
        if value:
            reading.set_plan_field(key, precision="fp16" if key == "fp16.enabled" else "bf16")
        elif value is False:
            reading.nothing(key, "switched off")
        elif on and reading.is_auto(key):
            reading.nothing(key, f"off, because {on[0]} is true")
            reading.open.remove("plan.precision")
    key = "communication_data_type"
    dtype = reading.choice(key, tuple(_DTYPES))
    if dtype and _DTYPES[dtype] == "fp16":
        reading.missing(key, "Weft sends gradients in fp32 or bf16, which have the same range; fp16 overflows")
    elif dtype:
        reading.set_plan_field(key, reduce=_DTYPES[dtype])
    _read_loss_scale(reading, of_fp16=given["fp16.enabled"] or (reading.is_auto("fp16.enabled") and not on))
    _read_autocast(reading, on)


def _read_loss_scale(reading: Reading, of_fp16: bool | None) -> None:
    key = "fp16.loss_scale"
    scale = reading.number(key)
    if scale:
        reading.missing(key, "a fixed loss scale; Weft's loss scale is dynamic")
    elif scale is not None:
        reading.follows(key, "plan.precision=fp16: the loss scale is dynamic")
    if not of_fp16:
        for other in reading.lines.keys() & set(_SCALING):
            reading.nothing(other, "fp16 is off")


_SCALING = tuple(
    f"fp16.{name}"
    for name in (
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "auto_cast",
    )
)


def _read_autocast(reading: Reading, on: list[str]) -> None:
    enabled = reading.switch("torch_autocast.enabled")
    dtype = reading.choice("torch_autocast.dtype", tuple(_DTYPES))
    if "torch_autocast.dtype" in reading.values:
        reading.follows("torch_autocast.dtype", "torch_autocast.enabled")
    if enabled and on:
        reading.follows("torch_autocast.enabled", on[0])
    elif enabled:
        reading.set_plan_field("torch_autocast.enabled", precision=_DTYPES[dtype] if dtype else "fp16")
    elif enabled is False:
        reading.nothing("torch_autocast.enabled", "switched off")


def read_axes(reading: Reading) -> None:
    """Read tensor, sequence, pipeline and expert parallelism into plan.tp, cp, pp and ep."""
    for key, axis in (
        ("tensor_parallel.tp.tp_size", "tp"),
        ("tensor_parallel.autotp_size", "tp"),
        ("sequence_parallel_size", "cp"),
        ("pipeline.stages", "pp"),
    ):
        if key == "pipeline.stages" and reading.is_auto(key):
            reading.nothing(key, "PipelineModule sets it in code; set plan.pp")
            continue
        size = reading.read_int(key, low=0)
        if size is not None and size > 1:
            reading.set_plan_field(key, **{axis: size})
        elif size is not None:
            reading.nothing(key, f"plan.{axis} is 1")
    _read_experts(reading)


def _read_experts(reading: Reading) -> None:
    enabled_key, size_key = "expert_parallel.enabled", "expert_parallel.autoep_size"
    enabled, size = reading.switch(enabled_key), reading.read_int(size_key)
    if enabled and size is not None:
        reading.follows(enabled_key, size_key)
    elif enabled is not None:
        reading.nothing(enabled_key, "plan.ep is 1")
    if size is not None and enabled and size > 1:
        reading.set_plan_field(size_key, ep=size)
    elif size is not None:
        reading.nothing(size_key, "plan.ep is 1")


def read_zero(reading: Reading, dp: int | None) -> None:
    """Read the ZeRO stage and groups into zero, dp_shard and dp_replicate, and other ZeRO options into their fields.

    These are int8 communication (compress, gather), secondary shards (reshard) and offload. dp: data-parallel size, or
    None.
    """
    stage_key = _ZERO if _ZERO in reading.values else f"{_ZERO}.stage"
    if stage_key == _ZERO:
        old = reading.switch(_ZERO)
        stage = None if old is None else int(old)
    else:
        stage = reading.read_int(stage_key, low=0, high=3)
    shards = _shard_group(reading, stage, dp)
    ranks: object = "*" if dp is None else dp
    if not stage:
        reading.plan["dp_replicate"] = ranks
        if stage is not None:
            reading.became(stage_key, f"plan dp_replicate={ranks}", "plan.dp_replicate")
    elif dp == 1 or shards == 1:
        reading.plan["dp_replicate"] = ranks
        whose = "there is one rank" if dp == 1 else "mics_shard_size is 1"
        reading.became(stage_key, f"plan zero=0: {whose}, so there is nothing to shard", "plan.zero")
    elif shards is None:
        reading.set_plan_field(stage_key, zero=stage, dp_shard=ranks)
    else:
        reading.set_plan_field(stage_key, zero=stage)
        groups: object = "*" if dp is None else dp // shards
        reading.set_plan_field(f"{_ZERO}.mics_shard_size", dp_shard=shards, dp_replicate=groups)
    _read_quantized(reading, stage, dp)
    _read_second_shards(reading, stage, dp)
    _read_offload(reading, stage or 0)


def _read_second_shards(reading: Reading, stage: int | None, dp: int | None) -> None:
    """Read the number of ranks among which stage 3 shards a secondary copy of gathered weights."""
    key = f"{_ZERO}.zero_hpz_partition_size"
    size = reading.read_int(key, low=0)
    if size is None:
        return
    if size < 2:
        reading.nothing(key, "switched off")
    elif stage != 3:
        reading.nothing(key, "it needs stage 3")
    elif dp is not None and (dp % size or dp == size):
        reading.nothing(key, f"{dp} data-parallel ranks are not 2 or more groups of {size}")
    else:
        reading.set_plan_field(key, reshard=f"after_forward:{size}")


def _read_quantized(reading: Reading, stage: int | None, dp: int | None) -> None:
    """Read int8 communication of gradients and weights, which DeepSpeed supports at stage 3."""
    for what, field in (("gradients", "compress"), ("weights", "gather")):
        key = f"{_ZERO}.zero_quantized_{what}"
        wanted = reading.switch(key)
        if wanted is None:
            continue
        if not wanted:
            reading.nothing(key, "switched off")
        elif stage != 3:
            reading.nothing(key, "it needs stage 3")
        elif dp == 1:
            reading.nothing(key, f"one data-parallel rank sends no {what}")
        else:
            reading.set_plan_field(key, **{field: "int8"})


def _shard_group(reading: Reading, stage: int | None, dp: int | None) -> int | None:
    """Return the number of ranks of a MiCS shard group, or None if all data-parallel ranks are one group."""
    key = f"{_ZERO}.mics_shard_size"
    if reading.values.get(key) == -1:
        reading.nothing(key, "switched off")
        return None
    size = reading.read_int(key)
    if size is None:
        return None
    if stage != 3:
        reading.nothing(key, "it needs stage 3")
        return None
    if dp is not None and dp % size:
        reading.wrong(key, f"there are {dp} data-parallel ranks, and {dp} is not a multiple of {size}", "Use a divisor")
        return None
    reading.became(key, f"plan dp_shard={size}", "plan.dp_shard")
    return size


def _read_offload(reading: Reading, stage: int) -> None:
    parts: list[str] = []
    for key, part, needs in (
        (f"{_ZERO}.cpu_offload", "optimizer", 1),
        (f"{_ZERO}.cpu_offload_param", "params", 3),
        (f"{_ZERO}.cpu_offload_params", "params", 3),
        (f"{_ZERO}.offload_optimizer.device", "optimizer", 1),
        (f"{_ZERO}.offload_param.device", "params", 3),
    ):
        if key.endswith("device"):
            device = reading.choice(key, ("cpu", "nvme", "none"))
        else:
            switched = reading.switch(key)
            device = None if switched is None else ("cpu" if switched else "none")
        if device == "none":
            reading.nothing(key, "nothing is offloaded")
        elif device is not None and stage < needs:
            reading.nothing(key, f"DeepSpeed reads it from stage {needs} on, and this is stage {stage}")
        elif device is not None:
            parts.append(part)
            field = "plan.offload"
            if device == "nvme":
                reading.missing(key, f"NVMe; the nearest is host memory: plan offload={part}", field)
            else:
                reading.became(key, f"plan offload={part}", field)
    _add_offload(reading, *parts)


def _add_offload(reading: Reading, *parts: str) -> None:
    have = reading.plan.get("offload", "none")
    if parts:
        reading.plan["offload"] = "+".join(dict.fromkeys([*str(have).split("+"), *parts]))


def read_recompute(reading: Reading) -> None:
    """Read enabled activation checkpointing into recompute=full, and compile into compile=on."""
    for key in (
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
        "activation_checkpointing.number_checkpoints",
        "pipeline.activation_checkpoint_interval",
    ):
        counted = key.endswith(("number_checkpoints", "interval"))
        off = reading.values.get(key) is False
        wanted = False if off else (reading.read_int(key, low=0) if counted else reading.switch(key))
        if wanted is None:
            continue
        if not wanted:
            reading.nothing(key, "switched off; plan recompute=full switches it on")
        elif key.endswith("cpu_checkpointing"):
            reading.set_plan_field(key, recompute="full")
            _add_offload(reading, "activations")
            reading.became(key, "plan recompute=full offload=activations", "plan.recompute", "plan.offload")
        else:
            reading.set_plan_field(key, recompute="full")
    for key in ("compile.deepcompile", "compile.enabled"):
        compiled = reading.switch(key)
        if compiled:
            reading.set_plan_field(key, compile=True)
        elif compiled is not None:
            reading.nothing(key, "switched off")


# Conversion of a DeepSpeed config to Weft's plan and settings, with one outcome for each of its keys.


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of importing a config of another tool.

    Attributes:
        name: file name.
        plan: plan text; one axis is `*` if the file does not fix the number of ranks.
        overrides: dotted setting of a RunConfig -> value.
        lines: one outcome for each key, in the file's order.
        open: settings that are "auto" in the file, or depend on the number of ranks. They keep Weft's defaults.
        notes: differences between the two frameworks that do not belong to a key.
        tool: the tool that the file belongs to.
    """

    name: str
    plan: str
    overrides: Mapping[str, object]
    lines: tuple[Outcome, ...]
    open: tuple[str, ...]
    notes: tuple[str, ...]
    tool: str = "DeepSpeed"

    @property
    def typos(self) -> tuple[Outcome, ...]:
        """The keys that the tool does not have."""
        return tuple(line for line in self.lines if line.kind == TYPO)

    def config(self) -> RunConfig:
        """Return the run that the file describes, with Weft's defaults for all other settings.

        No rules are checked. `config_rules.config_problems` returns the rules that it breaks.
        """
        return RunConfig.model_validate({"plan": self.plan, **nested(self.overrides)})


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted name as nested tables."""
    tables: dict[str, object] = {}
    for setting, value in settings.items():
        *sections, name = setting.split(".")
        table = tables
        for section in sections:
            table = cast(dict[str, object], table.setdefault(section, {}))
        table[name] = value
    return tables


def import_deepspeed(
    source: Path | str | Mapping[str, object],
    world_size: int | None = None,
    *,
    not_built: Sequence[Rule] = NOT_BUILT_RULES,
) -> Imported:
    """Import a DeepSpeed config.

    Args:
        source: a path, JSON text, or a dict.
        world_size: number of ranks that will be started, or None.
        not_built: rules of valid plans that Weft does not support yet. A key that such a rule rejects is converted, and
            its outcome gets the kind NOT_BUILT.

    Raises:
        ConfigError: with every mistake found, each with its file and line.
    """
    read = read_source(source)
    reading = Reading(read)
    if world_size is not None and not 1 <= world_size <= MOST:
        rule = (
            f"world_size={world_size}: the number of ranks must be a whole number from 1 to {MOST}. "
            f"Give the number of ranks that you start."
        )
        reading.problems.append(Problem("world_size", rule))
        world_size = None
    read_precision(reading)
    read_axes(reading)
    read_recompute(reading)
    data_ranks = read_batch(reading, world_size)
    read_zero(reading, data_ranks)
    read_clipping(reading)
    read_scheduler(reading, read_optimizer(reading))
    if reading.problems:
        raise ConfigError(sorted(dict.fromkeys(reading.problems), key=by_line))
    plan, open_axis = Plan.read_open(reading.plan)
    lines = _mark_not_built(reading, plan, open_axis, not_built)
    return Imported(
        name=_name(read),
        plan=plan.format(open_axis) or str(plan),
        overrides=reading.settings,
        lines=lines,
        open=tuple(setting for setting in dict.fromkeys(reading.open) if setting not in reading.settings),
        notes=tuple(reading.notes),
    )


def _name(source: Source) -> str:
    return source.name or "ds_config"


def _mark_not_built(
    reading: Reading, plan: Plan, open_axis: str | None, not_built: Sequence[Rule]
) -> tuple[Outcome, ...]:
    """Return the outcome of each key, in the file's order.

    Keys whose plan field Weft does not support yet get the kind NOT_BUILT.
    """
    refused = {f"plan.{violation.field}" for violation in check(plan, Facts(open_axis=open_axis), not_built)}
    lines = [reading.lines[key] for key in reading.order if key in reading.lines]
    return tuple(
        replace(line, kind=NOT_BUILT, text=f"{line.text}; the plan contains it, and Weft refuses the plan until then")
        if line.kind == BECAME and refused & {*line.fields}
        else line
        for line in lines
    )


def plan_from_deepspeed(source: Path | str | Mapping[str, object], world_size: int | None = None) -> Plan:
    """Return the plan of a DeepSpeed config. `import_deepspeed` also returns the settings and the outcome of each key.

    Args:
        source: a path to ds_config.json, its text, or its dict.
        world_size: number of ranks; by default the number that torchrun, srun or `weft train` started, or the number
            that follows from the file's batch sizes.

    Raises:
        ConfigError: with every mistake in the file.
        PlanError: if the number of ranks cannot be determined.
    """
    place = env.rank_env() if world_size is None else None
    plan, open_axis = Plan.read_open(import_deepspeed(source, place.world_size if place else world_size).plan)
    if open_axis is not None:
        rule = "the file leaves the number of ranks open. Give world_size=, or start the ranks with torchrun."
        raise PlanError(f"{open_axis}=*: {rule}")
    return plan
