"""Import of the config's task class, and checks of its options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from weft.config.run_config import RunConfig
from weft.config.sections import GrpoSection, changed_keys, value_at
from weft.errors import ConfigError, Problem, WeftError, did_you_mean
from weft.hub import local_folder
from weft.lazy import named_object
from weft.train.tasks.base import Task

#: Sections and settings of the text decoder. Other tasks must list those that they use in `sections`.
_OF_THE_DECODER = ("model", "tokenizer", "data", "sample", "train.seq_len")
#: Settings that are checked separately.
_OF_BATCHES = ("data.batching", "data.microbatch_cost", "data.cache_features")

#: Classes of tasks by name.
_CLASSES = {
    "chat": "weft.train.tasks.chat:ChatTask",
    "caption": "weft.train.tasks.captioning:CaptionTask",
    "classify_audio": "weft.train.tasks.media:AudioClassTask",
    "classify_images": "weft.train.tasks.media:ImageClassTask",
    "classify_text": "weft.train.tasks.classification:TextClassTask",
    "classify_tokens": "weft.train.tasks.classification:TokenClassTask",
    "contrast": "weft.train.tasks.captioning:ContrastTask",
    "embed": "weft.train.tasks.text_tasks:EmbedTask",
    "recommend": "weft.recommend.task:RecommendTask",
    "reward": "weft.train.tasks.text_tasks:RewardTask",
    "masked_lm": "weft.train.tasks.text_tasks:MaskedTask",
    "seq2seq": "weft.train.tasks.text_tasks:Seq2SeqTask",
    "transcribe": "weft.train.tasks.captioning:CaptionTask",
    "distill": "weft.train.tasks.distill:DistillTask",
    "prefer": "weft.train.tasks.preference:PreferTask",
    "grpo": "weft.rl.grpo:GrpoTask",
}


def find_task(config: RunConfig) -> Task:
    """Return the config's task, with its `config` set.

    Raises:
        ConfigError: if the class cannot be imported, is not a complete subclass of `Task` or rejects its options, or if
            the config has settings that the task does not read or support.
        WeftError: other errors of the class's constructor.
    """
    if config.task.name is None:
        from weft.train.tasks.decoder import DecoderTask

        task: Task = DecoderTask()
    else:
        name = classified(config) if config.task.name == "classify" else config.task.name
        where = _CLASSES.get(name, name)
        if name == "transcribe" and config.model.path:
            where = "weft.train.tasks.transcription:TranscribeTask"
        kind = _found(config.task.name, where)
        task = _made(kind, config.task.name, config.task.options)
        _refuse_unread(task, config)
    _check_batching(task, config)
    if config.data.workers is not None and "data.workers" not in task.sections:
        rule = f"data.workers={config.data.workers}: only tasks on images and audio read it. Leave it out."
        raise ConfigError([Problem("data.workers", rule)])
    if config.data.stream and getattr(task, "learns_preferences", False):
        rule = f"data.stream=true: {_named(config)} reads all of its data before the first step. Leave it out."
        raise ConfigError([Problem("data.stream", rule)])
    if config.grpo != GrpoSection() and "grpo" not in task.sections:
        rule = f"grpo: {_named(config)} does not read this section. Set task.name=grpo, or leave it out."
        raise ConfigError([Problem("grpo", rule)])
    if config.data.cache_features and "data.cache_features" not in task.sections:
        rule = f"data.cache_features=true: {_named(config)} has no encoder to keep anything of; caption and contrast do"
        raise ConfigError([Problem("data.cache_features", f"{rule}. Leave it out.")])
    task.config = config
    return task


def classified(config: RunConfig) -> str:
    """Return the name of the task that `task.name = "classify"` means.

    It depends on the class of the model in the folder model.path, or without a folder on the task option `model`.

    Raises:
        ConfigError: if the folder's config.json cannot be read, or its model does not classify texts.
    """
    path = config.model.path
    if not path:
        return "classify_audio" if str(config.task.options.get("model", "")).startswith("speech") else "classify_images"
    try:
        fields = json.loads((local_folder(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        rule = f"model.path={path}: its config.json cannot be read ({why}). Give the folder of a Hugging Face model."
        raise ConfigError([Problem("model.path", rule)]) from error
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as OF_TEXT

    if fields.get("model_type") not in OF_TEXT:
        rule = (
            f"model.path={path}: a {fields.get('model_type')!r} does not classify texts, and networks for classes of "
            "pictures and audio start from new weights. Leave model.path out, or give another folder."
        )
        raise ConfigError([Problem("model.path", rule)])
    return "classify_text"


def _check_batching(task: Task, config: RunConfig) -> None:
    """Check the settings of batching by cost.

    Raises ConfigError if the task or train.norm_group does not support batching by cost, or if a maximum cost is set
    without it.
    """
    cost, asked = config.data.microbatch_cost, config.data.batching == "cost"
    key, rule = "batching=cost", ""
    if asked and type(task).lengths is Task.lengths:
        rule = f"{_named(config)} does not report the length of its samples, or compares them. Leave it out"
        rule += "" if config.task.name is None else ", or write lengths in the task"
    elif asked and config.train.norm_group:
        rule = f"train.norm_group={config.train.norm_group} uses samples in their order. Leave one of the two out"
    elif cost != "auto" and not asked:
        key, rule = f"microbatch_cost={cost:g}", "only data.batching=cost reads it. Set that too, or leave it out"
    if not rule and not asked and (most := config.train.global_cost) is not None:
        rule = "only data.batching=cost uses costs. Set that too, or use train.global_batch"
        raise ConfigError([Problem("train.global_cost", f"train.global_cost={most:g}: {rule}.")])
    if rule:
        raise ConfigError([Problem(f"data.{key.split('=')[0]}", f"data.{key}: {rule}.")])


def _named(config: RunConfig) -> str:
    return "the text decoder" if config.task.name is None else f"task.name={config.task.name}"


def _found(name: str, where: str) -> type[Task]:
    try:
        made = named_object(where)
    except Exception as error:  # user code may raise anything
        why = f"{type(error).__name__}: {error}"
        _refuse("name", f"={name}: it cannot be imported ({why}). Name a class importable from this folder.")
    if not (isinstance(made, type) and issubclass(made, Task)):
        _refuse("name", f"={name}: it is not a subclass of weft.train.Task. Name one that is.")
    if missing := _left_out(made):
        _refuse("name", f"={name}: a task needs {' and '.join(missing)}. Define what is missing in the class.")
    return made


def _left_out(kind: type[Task]) -> list[str]:
    needed = ["build", "loss"] if kind.batches is not Task.batches else ["build", "samples", "loss"]
    return [name for name in needed if getattr(kind, name) is getattr(Task, name)]


def _made(kind: type[Task], name: str, options: Mapping[str, Any]) -> Task:
    takes = inspect.signature(kind).parameters
    free = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    problems = []
    for option in options:
        if not free and option not in takes:
            hint = did_you_mean(option, takes) or f" It takes {', '.join(takes) or 'none'}."
            problems.append(_problem(f"options.{option}", f": {name} has no such option.{hint}"))
    for option, each in takes.items():
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            if option not in options:
                problems.append(_problem(f"options.{option}", f": {name} needs this option. Give it a value."))
        elif option in options and (wanted := _other_kind(each.default, options[option])):
            value = options[option]
            problems.append(_problem(f"options.{option}", f"={value}: {name} takes {wanted}. Use such a value."))
    if problems:
        raise ConfigError(problems)
    try:
        return kind(**options)
    except WeftError:
        raise
    except Exception as error:
        _refuse("options", f": {name} refuses them: {type(error).__name__}: {error}. Change or leave them out.")


def _other_kind(default: Any, value: Any) -> str:
    """Return the name of the option's type if the value has a different type than the default, else "".

    An int is accepted instead of a float. Defaults of other types accept any value.
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if isinstance(default, float):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if isinstance(default, str):
        return "" if isinstance(value, str) else "a text"
    return ""


def _refuse_unread(task: Task, config: RunConfig) -> None:
    before, now = RunConfig().model_dump(by_alias=True), config.model_dump(by_alias=True)
    name = config.task.name
    problems = [
        Problem(key, f"{key}: only the text decoder reads it, not task.name={name}. Leave it out.")
        for section in _OF_THE_DECODER
        if section not in task.sections
        for key in changed_keys(section, value_at(before, section), value_at(now, section))
        if not any(f"{key}.".startswith(f"{read}.") for read in (*task.sections, *_OF_BATCHES))
    ]
    if problems:
        raise ConfigError(problems)


def _problem(key: str, rule: str) -> Problem:
    return Problem(f"task.{key}", f"task.{key}{rule}")


def _refuse(key: str, rule: str) -> NoReturn:
    raise ConfigError([_problem(key, rule)])
