"""What of a DeepSpeed config becomes the plan, apart from its batch: precision, axes, ZeRO, offload, recompute."""

from __future__ import annotations

from weft.deepspeed.reading import Reading

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
    """bf16, fp16 and torch_autocast become plan.precision; of fp16's loss scale, what is the same here."""
    given = {key: reading.switch(key) for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")}
    on = [key for key, value in given.items() if value]
    if "fp16.enabled" in on and len(on) > 1:
        reading.wrong("fp16.enabled", f"{on[0]} is true too, and a model has one precision", "Switch one of them off")
    for key, value in given.items():
        if value:
            reading.plan_word(key, precision="fp16" if key == "fp16.enabled" else "bf16")
        elif value is False:
            reading.nothing(key, "switched off")
        elif on and reading.is_auto(key):
            reading.nothing(key, f"off, because {on[0]} is true")
            reading.open.remove("plan.precision")
    _read_reduction(reading)
    _read_loss_scale(reading, of_fp16=given["fp16.enabled"] or (reading.is_auto("fp16.enabled") and not on))
    _read_autocast(reading, on)


def _read_reduction(reading: Reading) -> None:
    key = "communication_data_type"
    dtype = reading.choice(key, tuple(_DTYPES))
    if dtype and _DTYPES[dtype] == "fp16":
        reading.missing(key, "Weft sends gradients in fp32 or bf16, which have the same range; fp16 overflows")
    elif dtype:
        reading.plan_word(key, reduce=_DTYPES[dtype])


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
        reading.plan_word("torch_autocast.enabled", precision=_DTYPES[dtype] if dtype else "fp16")
    elif enabled is False:
        reading.nothing("torch_autocast.enabled", "switched off")


def read_axes(reading: Reading) -> None:
    """Tensor, sequence, pipeline and expert parallelism become plan.tp, cp, pp and ep."""
    for key, axis in (
        ("tensor_parallel.tp.tp_size", "tp"),
        ("tensor_parallel.autotp_size", "tp"),
        ("sequence_parallel_size", "cp"),
        ("pipeline.stages", "pp"),
    ):
        if key == "pipeline.stages" and reading.is_auto(key):
            reading.nothing(key, "PipelineModule sets it in code; set plan.pp")
            continue
        size = reading.whole(key, low=0)
        if size is not None and size > 1:
            reading.plan_word(key, **{axis: size})
        elif size is not None:
            reading.nothing(key, f"plan.{axis} is 1")
    _read_experts(reading)


def _read_experts(reading: Reading) -> None:
    enabled_key, size_key = "expert_parallel.enabled", "expert_parallel.autoep_size"
    enabled, size = reading.switch(enabled_key), reading.whole(size_key)
    if enabled and size is not None:
        reading.follows(enabled_key, size_key)
    elif enabled is not None:
        reading.nothing(enabled_key, "plan.ep is 1")
    if size is not None and enabled and size > 1:
        reading.plan_word(size_key, ep=size)
    elif size is not None:
        reading.nothing(size_key, "plan.ep is 1")


def read_zero(reading: Reading, dp: int | None) -> None:
    """The stage and its groups become zero, dp_shard and dp_replicate. dp: data-parallel ranks; None: not known."""
    stage_key = _ZERO if _ZERO in reading.values else f"{_ZERO}.stage"
    if stage_key == _ZERO:
        old = reading.switch(_ZERO)
        stage = None if old is None else int(old)
    else:
        stage = reading.whole(stage_key, low=0, high=3)
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
        reading.plan_word(stage_key, zero=stage, dp_shard=ranks)
    else:
        reading.plan_word(stage_key, zero=stage)
        groups: object = "*" if dp is None else dp // shards
        reading.plan_word(f"{_ZERO}.mics_shard_size", dp_shard=shards, dp_replicate=groups)
    _read_quantized(reading, stage, dp)
    _read_second_shards(reading, stage, dp)
    _read_offload(reading, stage or 0)


def _read_second_shards(reading: Reading, stage: int | None, dp: int | None) -> None:
    """Ranks among which stage 3 keeps what forward gathered."""
    key = f"{_ZERO}.zero_hpz_partition_size"
    size = reading.whole(key, low=0)
    if size is None:
        return
    if size < 2:
        reading.nothing(key, "switched off")
    elif stage != 3:
        reading.nothing(key, "it needs stage 3")
    elif dp is not None and (dp % size or dp == size):
        reading.nothing(key, f"{dp} data-parallel ranks are not 2 or more groups of {size}")
    else:
        reading.plan_word(key, reshard=f"after_forward:{size}")


def _read_quantized(reading: Reading, stage: int | None, dp: int | None) -> None:
    """Gradients and weights as int8, which DeepSpeed has at stage 3."""
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
            reading.plan_word(key, **{field: "int8"})


def _shard_group(reading: Reading, stage: int | None, dp: int | None) -> int | None:
    """Ranks of one shard group under MiCS; None where all data-parallel ranks are one group."""
    key = f"{_ZERO}.mics_shard_size"
    if reading.values.get(key) == -1:
        reading.nothing(key, "switched off")
        return None
    size = reading.whole(key)
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
            _say_offload(reading, key, part, device)
    _add_offload(reading, *parts)


def _say_offload(reading: Reading, key: str, part: str, device: str) -> None:
    field = "plan.offload"
    if device == "nvme":
        reading.missing(key, f"NVMe; the nearest is host memory: plan offload={part}", field)
    else:
        reading.became(key, f"plan offload={part}", field)


def _add_offload(reading: Reading, *parts: str) -> None:
    have = reading.plan.get("offload", "none")
    if parts:
        reading.plan["offload"] = "+".join(dict.fromkeys([*str(have).split("+"), *parts]))


def read_recompute(reading: Reading) -> None:
    """Activation checkpointing that is switched on becomes recompute=full; compile becomes compile=on."""
    for key in (
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
        "activation_checkpointing.number_checkpoints",
        "pipeline.activation_checkpoint_interval",
    ):
        counted = key.endswith(("number_checkpoints", "interval"))
        off = reading.values.get(key) is False
        wanted = False if off else (reading.whole(key, low=0) if counted else reading.switch(key))
        if wanted is None:
            continue
        if not wanted:
            reading.nothing(key, "switched off; plan recompute=full switches it on")
        elif key.endswith("cpu_checkpointing"):
            reading.plan_word(key, recompute="full")
            _add_offload(reading, "activations")
            reading.became(key, "plan recompute=full offload=activations", "plan.recompute", "plan.offload")
        else:
            reading.plan_word(key, recompute="full")
    for key in ("compile.deepcompile", "compile.enabled"):
        compiled = reading.switch(key)
        if compiled:
            reading.plan_word(key, compile=True)
        elif compiled is not None:
            reading.nothing(key, "switched off")
