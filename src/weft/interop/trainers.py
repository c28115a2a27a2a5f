"""Import of configs of axolotl, LLaMA-Factory and TRL as a plan and settings of a run.

Most keys need only the tables of `trainer_keys.py`. The functions here read adapter, batch, steps, plan and data.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.sections import OPTIMIZER_NAMES
from weft.errors import ConfigError, PlanError
from weft.files import open_regular
from weft.interop.deepspeed import Imported, import_deepspeed
from weft.interop.deepspeed_keys import BECAME, NOT_BUILT, NOTHING, known_keys, number_text
from weft.interop.trainer_data import listed, read_data
from weft.interop.trainer_keys import TrainerReading, tools

#: Largest config file, in bytes.
_MOST_BYTES = 2**20
#: Largest number of values in a config. An alias counts as often as it is used.
_MOST_VALUES = 100_000
_SINKS = ("wandb", "tensorboard", "trackio")
_FSDP: dict[str, dict[str, object]] = {
    "full_shard": {"zero": 3}, "hybrid_shard": {"zero": 3}, "shard_grad_op": {"zero": 2},
    "offload": {"offload": ("params",)}, "auto_wrap": {}, "no_shard": {},
}  # fmt: skip
#: Fields of the plan that a DeepSpeed config may set; ranks, batch and precision are in the trainer's own file.
_OF_DEEPSPEED = ("zero", "offload", "reshard", "compress", "gather", "recompute", "tp", "cp", "pp")


def read_parts(reading: TrainerReading) -> None:
    """Read all keys of a file, and fill in the tool's defaults."""
    _read_adapter(reading)
    reading.read_tables()
    _read_sharding(reading)
    _read_batch(reading)
    _read_steps(reading)
    _read_interval(reading, "eval", "eval.every")
    _read_interval(reading, "save", "checkpoint.every")
    _read_logging(reading)
    _choose_task(reading)
    read_data(reading)
    _fill(reading)
    for key in [key for key in reading.values if key not in reading.lines]:
        reading.note(key, NOTHING, "another key decides it")


def _read_adapter(reading: TrainerReading) -> None:
    key, default = {"axolotl": ("adapter", None), "llamafactory": ("finetuning_type", "lora"),
                    "trl": ("use_peft", False)}[reading.tool.name]  # fmt: skip
    kind = reading.values.get(key, default)
    reading.has_adapter = kind in ("lora", "qlora", True)
    if reading.has_adapter:
        reading.settings |= {
            "llamafactory": {"adapter.rank": 8},
            "trl": {"adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.05},
            "axolotl": {"adapter.base": "nf4"} if kind == "qlora" else {},
        }[reading.tool.name]
        reading.note(key, BECAME, "[adapter]" + (" with base=nf4" if kind == "qlora" else ""))
    elif kind in (None, False, "full"):
        reading.note(key, NOTHING, "all weights are trained")
    else:
        reading.note(key, NOT_BUILT, "adapters are lora, rslora and dora. Use one of them, or train all weights")
    if key not in reading.values:
        del reading.lines[key]
    if reading.values.get("add_tokens"):
        names = [name for one in listed(reading.values["add_tokens"]) for name in _patterns(str(one), "llamafactory")]
        reading.assign("add_tokens", {"tokenizer.add_tokens": names})
    for key in ("lora_target_modules", "lora_target", "additional_target", "lora_target_linear"):
        value = reading.values.get(key)
        if not value or key not in reading.tool.code:
            continue
        if value in (True, "all", "all-linear", ["all-linear"]):
            reading.note(key, BECAME, "adapter.targets: all linear layers but the head and the routers of experts")
        elif names := [name for one in listed(value) for name in _patterns(str(one), reading.tool.name)]:
            reading.assign(key, {f"adapter.{'modules_to_save' if key == 'additional_target' else 'targets'}": names})
        else:
            reading.note(key, NOT_BUILT, "this expression has no patterns with *. Write adapter.targets")


def _patterns(text: str, tool: str) -> list[str]:
    """Return the patterns with * for names separated by commas (LLaMA-Factory) or for a regular expression.

    Return [] for an expression that such patterns cannot represent.
    """
    if tool == "llamafactory":
        return [name for part in text.split(",") if (name := part.strip())]
    text = re.sub(r"\.\*|(\[\\d\]|\\d|\[0-9\])\+", "*", text)
    choices = [
        [*one.strip("()?").split("|"), *([""] if one.endswith("?") else [])] if one.startswith("(") else [one]
        for one in re.split(r"(\([^()]*\)\??)", text.replace("\\.", "."))
    ]
    found = ["".join(parts) for parts in itertools.islice(itertools.product(*choices), 200)]
    return [] if any(re.search(r"[\[\]()|?+^$\\]", one) for one in found) else found


def _read_sharding(reading: TrainerReading) -> None:
    """Read DeepSpeed's and FSDP's parts into fields of the plan."""
    source, config = reading.values.get("deepspeed"), reading.values.get("fsdp_config")
    fsdp = cast(dict[str, object], config) if isinstance(config, dict) else {}
    if reading.is_on("deepspeed"):
        folders = (reading.folder, Path())
        path = next((one for folder in folders if (one := folder / str(source)).is_file()), None)
        try:
            given = cast(dict[str, object], source) if isinstance(source, dict) else path
            imported = None if given is None else import_deepspeed(given)
        except ConfigError as error:
            reading.note("deepspeed", NOT_BUILT, f"it cannot be read: {str(error).splitlines()[0]}")
        else:
            if imported is None:
                reading.note("deepspeed", NOT_BUILT, f"there is no file {source}. Put it there, or set plan.zero")
            else:
                plan, _ = Plan.read_open(imported.plan)
                _merge(reading, ["deepspeed"], {name: getattr(plan, name) for name in _OF_DEEPSPEED})
    options = {str(key).removeprefix("fsdp_"): value for key, value in fsdp.items()}
    if reading.is_on("fsdp") or (options and reading.tool.name == "axolotl"):
        words = " ".join(str(one) for one in listed(reading.values.get("fsdp"))).split() or ["full_shard"]
        found: dict[str, object] = {}
        for word in words:
            found |= _FSDP.get(word, {})
        found |= {"offload": ("params",)} if options.get("offload_params") else {}
        found |= {"reshard": "after_backward"} if options.get("reshard_after_forward") is False else {}
        found |= {"recompute": "full"} if options.get("activation_checkpointing") else {}
        _merge(reading, ["fsdp", "fsdp_config"], found)
        if unknown := [word for word in words if word not in _FSDP]:
            reading.note("fsdp", NOT_BUILT, f"{', '.join(unknown)}: write the plan with dp_shard and zero")


def _merge(reading: TrainerReading, keys: Sequence[str], fields: Mapping[str, object]) -> None:
    """Set fields of the plan that differ from their defaults, and record this for the keys."""
    found = {name: value for name, value in fields.items() if value != PLAN_FIELDS[name].default}
    reading.plan |= found
    words = " ".join(f"{name}={PLAN_FIELDS[name].kind.write(value)}" for name, value in found.items())
    for key in keys:
        if key in reading.values:
            reading.note(key, BECAME if found else NOTHING, f"plan {words}" if found else "nothing is sharded")


def _read_batch(reading: TrainerReading) -> None:
    """Read the batch sizes, and give the data-parallel axis the remaining ranks.

    Raises ConfigError if the number of ranks does not fit the plan, or the global batch is above 10**9.
    """
    is_axolotl, plan, world = reading.tool.name == "axolotl", reading.plan, reading.world_size
    key = "micro_batch_size" if is_axolotl else "per_device_train_batch_size"
    micro, passes = reading.count(key, 1 if is_axolotl else 8), reading.count("gradient_accumulation_steps", 1)
    total = reading.count("batch_size", 0) if is_axolotl else 0
    if total and "gradient_accumulation_steps" not in reading.values:
        passes = max(1, total // micro)
    if passes > 1:
        plan["microbatches" if cast(int, plan.get("pp", 1)) > 1 else "accumulation"] = passes
    if plan.get("dp_shard") == 1:
        del plan["dp_shard"]
    elif "dp_shard" in plan:
        plan["zero"] = 3  # axolotl's dp_shard_size is FSDP's
    axis = "dp_replicate" if "dp_shard" in plan or not (plan.get("zero") or plan.get("ep", 1) != 1) else "dp_shard"
    plan.setdefault(axis, "*")
    try:
        closed = Plan.from_mapping(plan, world or Plan.read_open(plan)[0].world_size)
    except PlanError as error:
        raise ConfigError(f"{'--world-size' if world else 'the plan'}: {error.problems[0].message}") from None
    if world and closed.world_size != world:
        raise ConfigError(f"--world-size={world}: the file has {closed.world_size} ranks. Use {closed.world_size}.")
    if world:
        plan |= {axis: getattr(closed, axis), "zero": closed.zero, "reshard": closed.reshard}
    batch = micro * passes * closed.dp_size
    if batch > 10**9:
        raise ConfigError(f"{key}={micro}: the global batch is above 10**9 sequences. Lower the batch sizes.")
    reading.settings["train.global_batch"] = batch
    for name in (key, "gradient_accumulation_steps", "batch_size"):
        if name in reading.values and name not in reading.lines and (name != "batch_size" or is_axolotl):
            parts = f"{micro} x {passes} x {closed.dp_size} data-parallel rank{'s' * (closed.dp_size > 1)}"
            reading.note(name, BECAME, f"train.global_batch={batch}: {parts}", ("train.global_batch",))
    if not world and plan[axis] == "*":
        reading.open.append("train.global_batch")
        reading.notes.append(
            f"train.global_batch={batch} is for {closed.dp_size} data-parallel rank{'s' * (closed.dp_size > 1)}. Give "
            "the number of ranks (--world-size), or multiply it."
        )


def _read_steps(reading: TrainerReading) -> None:
    """Read the length of the run, and the warm-up."""
    values, steps = reading.values, reading.number("max_steps")
    epochs = "num_epochs" if reading.tool.name == "axolotl" else "num_train_epochs"
    if steps and steps > 0:
        reading.assign("max_steps", {"train.steps": steps})
    elif reading.is_on(epochs):
        reading.assign(epochs, {"train.epochs": values[epochs]})
    is_constant = values.get("lr_scheduler_type", values.get("lr_scheduler")) == "constant"
    for key in ("warmup_ratio", "warmup_steps"):  # both: the steps decide it, as in transformers
        value = reading.number(key)
        if value is None:
            continue
        if is_constant:
            reading.note(key, NOTHING, "a constant schedule has no warm-up")
            continue
        for name in ("schedule.warmup_steps", "schedule.warmup_ratio"):
            reading.settings.pop(name, None)
        is_share = key == "warmup_ratio" or 0 < value < 1
        reading.assign(key, {f"schedule.warmup_{'ratio' if is_share else 'steps'}": value})


def _read_interval(reading: TrainerReading, verb: str, setting: str) -> None:
    """Read eval_strategy and eval_steps, or save_strategy and save_steps."""
    keys = ("eval_strategy", "evaluation_strategy") if verb == "eval" else ("save_strategy",)
    named = next((key for key in keys if key in reading.values), "")
    strategy, steps = reading.values.get(named, "steps"), reading.number(f"{verb}_steps")
    if named and strategy in ("no", False):
        reading.assign(named, {setting: 0})
        return
    if named and strategy == "steps":
        reading.note(named, BECAME, f"{setting}, in steps", (setting,))
    elif named:
        reading.note(named, NOT_BUILT, f"{setting} counts steps. Set it to the steps of an epoch")
    if steps is not None and 0 < steps < 1:
        reading.note(f"{verb}_steps", NOT_BUILT, f"{setting} counts steps. Set it to that share of the steps")
    elif steps is not None:
        reading.assign(f"{verb}_steps", {setting: steps})


def _read_logging(reading: TrainerReading) -> None:
    steps, count = reading.number("logging_steps"), reading.number("profiler_steps")
    if steps is not None and steps >= 1:
        reading.assign("logging_steps", {"log.every": steps})
    elif steps is not None:
        reading.note("logging_steps", NOT_BUILT, "log.every counts steps. Set it to that share of the steps")
    if count and "profiler_steps" in reading.tool.code:
        start = int(reading.number("profiler_steps_start") or 0)
        reading.assign("profiler_steps", {"train.profile": f"{start + 1}-{start + int(count)}"})
    named = {str(one): "report_to" for one in listed(reading.values.get("report_to"))}
    for kind in _SINKS:
        for key in (f"use_{kind}", f"{kind}_project"):
            if reading.is_on(key) and key in reading.tool.code:
                named[kind] = key
    sinks: list[dict[str, object]] = [{"kind": kind} for kind in _SINKS if kind in named]
    if reading.is_on("wandb_project") and sinks and sinks[0]["kind"] == "wandb":
        sinks[0]["project"] = str(reading.values["wandb_project"])
    if sinks:
        reading.settings["sink"] = sinks
    for kind, key in named.items():
        if kind in _SINKS:
            reading.note(key, BECAME, f"a [[sink]] of kind {kind}", ("sink",))
        elif kind not in ("none", "all"):
            reading.note(key, NOT_BUILT, f"{kind}: write a [[sink]] with its url")


# The task, and defaults


def _choose_task(reading: TrainerReading) -> None:
    """Set the task that the keys imply, and drop settings that the task does not have."""
    settings = reading.settings
    if reading.tool.name == "trl" and "task.name" not in settings:
        if any(reading.values.get(key) is not None for key in ("desirable_weight", "undesirable_weight")):
            settings |= {"task.name": "prefer", "task.options.objective": "kto"}
        elif reading.is_on("beta") or reading.is_on("label_smoothing"):
            settings |= {"task.name": "prefer", "task.options.objective": "dpo"}
        elif reading.is_on("center_rewards_coefficient"):
            settings["task.name"] = "reward"
        else:
            reading.notes.append(
                "A TRL config does not name its command. It is read as trl sft; task.name=prefer is dpo."
            )
    task, objective = settings.get("task.name"), settings.get("task.options.objective", "dpo")
    options = {"reward": {"center"}, "prefer": {"objective", "beta", "reference"}}.get(task or "", set[str]())
    if task == "prefer":
        options |= {"dpo": {"smoothing"}, "simpo": {"margin"}, "kto": {"wanted", "unwanted"}}.get(objective, set[str]())
    for name in [name for name in settings if name.startswith("task.options.")]:
        if name.rpartition(".")[2] not in options:
            del settings[name]
            for line in [line for line in reading.lines.values() if name in line.fields]:
                reading.note(line.key, NOTHING, f"task {task or 'text'} does not read it")
    if task:
        settings.pop("data.packing", None)
        settings.pop("data.borders", None)
    if task == "reward" and reading.has_adapter:
        settings.setdefault("adapter.modules_to_save", ["score"])


def _fill(reading: TrainerReading) -> None:
    """Set the tool's defaults for settings that the file leaves open."""
    settings, task = reading.settings, reading.settings.get("task.name")
    fills = dict(reading.tool.fills)
    if reading.tool.name == "trl":
        fills["optimizer.lr"] = {"prefer": 1e-6, "reward": 1e-4}.get(task or "", 2e-5)
    for name, other in (("train.epochs", "train.steps"), ("schedule.warmup_steps", "schedule.warmup_ratio")):
        if name in settings or other in settings:
            fills = {key: value for key, value in fills.items() if key not in (name, other)}
    if settings.get("optimizer.name") == "adafactor":
        reading.notes.append(
            "optimizer.name=adafactor is torch's, which scales updates by the size of each weight; transformers' does "
            "not. Choose optimizer.lr anew, such as 1e-2."
        )
    if task:
        fills.pop("data.packing", None)
    filled: list[str] = []
    for name, value in fills.items():
        section, _, rest = name.partition(".")
        target, key = (reading.plan, rest) if section == "plan" else (settings, name)
        if key not in target:
            target[key] = value
            filled.append(f"{name}={number_text(value)}")
    if filled:
        reading.notes.append(f"Defaults of {reading.tool.title}: {', '.join(filled)}.")
    _move_betas(settings)


def _move_betas(settings: dict[str, Any]) -> None:
    """Remove betas and eps if the optimizer is a class, and add the betas to the options of a class that takes them."""
    name: str = settings.get("optimizer.name", "")
    name = OPTIMIZER_NAMES.get(name, {}).get("name", name)
    if ":" in name:
        betas = settings.pop("optimizer.betas", None)
        settings.pop("optimizer.eps", None)
        if betas and name.rpartition(":")[2] in ("Lion", "SOAP", "ADOPT"):
            settings.setdefault("optimizer.options", {"betas": list(betas)})


# Reading a file, and finding the tool that wrote it.


def import_config(file: Path, world_size: int | None = None, tool: str | None = None) -> Imported:
    """Read a config of DeepSpeed, axolotl, LLaMA-Factory or TRL.

    Args:
        file: path of a JSON or YAML file.
        world_size: number of ranks that will be started, or None.
        tool: "deepspeed" or a name in `tools()`; None detects it from the keys.

    Raises:
        ConfigError: if the file cannot be read, or no tool has its keys.
    """
    is_json = file.suffix.lower() == ".json"
    if tool == "deepspeed":
        return import_deepspeed(file, world_size)
    try:
        values = _read_yaml(file)
    except ConfigError:
        if is_json and tool is None:
            return import_deepspeed(file, world_size)  # its own comments and errors
        raise
    found = tool or _detected(file, values)
    if found == "deepspeed":
        return import_deepspeed(file if is_json else values, world_size)
    return import_values(values, found, name=str(file), folder=file.parent, world_size=world_size)


def _read_yaml(file: Path) -> dict[str, object]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{file}: YAML is read by PyYAML. Install it: pip install pyyaml.") from None
    try:
        with open(open_regular(file), "rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{file}: a config has at most {_MOST_BYTES} bytes. Name a config file.")
        text = content.decode("utf-8-sig")
        tables: object = json.loads(text) if file.suffix.lower() == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: it cannot be read ({reason}). Check its path.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}: this is not YAML{line} ({getattr(error, 'problem', error)}). Correct it.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: it cannot be read ({error}). Correct it.") from None
    _check_values(file, tables)
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{file}: a config has keys and values, and this file has none. Name a config file.")
    return {str(key): value for key, value in cast(dict[object, object], tables).items()}


def _check_values(file: Path, tables: object) -> None:
    """Raise ConfigError if there are too many values, each alias counted, or a text that UTF-8 cannot represent."""
    open_values, num_values = [tables], 0
    while open_values:
        value = open_values.pop()
        num_values += 1
        if num_values > _MOST_VALUES:
            raise ConfigError(
                f"{file}: a config has at most {_MOST_VALUES} values, aliases counted. Name a config file."
            )
        if isinstance(value, dict):
            open_values += [one for pair in cast(dict[object, object], value).items() for one in pair]
        elif isinstance(value, list):
            open_values += cast(list[object], value)
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(f"{file}: a text in it is not valid Unicode (a lone surrogate). Correct it.")


def _detected(file: Path, values: Mapping[str, object]) -> str:
    """Return the tool that has the most keys that no other tool has.

    If this is undecided, it is "deepspeed" for a .json file. Raise ConfigError for other files.
    """
    known = {name: tool.keys for name, tool in tools().items()}
    known["deepspeed"] = frozenset(key.partition(".")[0] for key in known_keys())
    votes = dict.fromkeys(known, 0)
    for key in values:
        owners = [name for name, keys in known.items() if key in keys]
        if len(owners) == 1:
            votes[owners[0]] += 1
    best = sorted(votes, key=lambda name: -votes[name])
    if votes[best[0]] == 0 or votes[best[0]] == votes[best[1]]:
        if file.suffix == ".json":  # the others write YAML
            return "deepspeed"
        rule = "its keys do not show the tool: DeepSpeed, axolotl, LLaMA-Factory or TRL"
        raise ConfigError(f"{file}: {rule}. Name it: --from deepspeed, axolotl, llamafactory or trl.")
    return best[0]


def import_values(
    values: Mapping[str, object], tool: str, *, name: str = "", folder: Path = Path(), world_size: int | None = None
) -> Imported:
    """Import the values of a config, by key.

    `name` is used in reports, and files are looked up in `folder`. Raise ConfigError if the config names no model.
    """
    reading = TrainerReading(tools()[tool], values, folder, world_size)
    read_parts(reading)
    if "model.path" not in reading.settings:
        key = "base_model" if tool == "axolotl" else "model_name_or_path"
        raise ConfigError(f"{name or tool}: a config of {reading.tool.title} names its model. Add {key}.")
    plan, open_axis = Plan.read_open(reading.plan)
    return Imported(
        name=name or tool,
        plan=plan.format(open_axis) or str(plan),
        overrides=reading.settings,
        lines=tuple(reading.lines[key] for key in dict.fromkeys([*values, *reading.lines]) if key in reading.lines),
        open=tuple(dict.fromkeys(reading.open)),
        notes=tuple(reading.notes),
        tool=reading.tool.title,
    )
