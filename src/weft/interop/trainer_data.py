"""Data sets in configs of axolotl, LLaMA-Factory and TRL, as sources of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from weft.interop.deepspeed_keys import BECAME, NOT_BUILT
from weft.interop.trainer_keys import TrainerReading, setting_problem

#: Names of the readers of `datasets`: the path of a data set whose files are in data_files.
_READERS = ("json", "csv", "parquet", "text", "arrow")
_PREFERENCE_COLUMNS = {"preference": ("prompt", "chosen", "rejected"), "feedback": ("prompt", "completion", "label")}


def read_data(reading: TrainerReading) -> None:
    """Read the keys that name data sets."""
    {"axolotl": _axolotl_data, "llamafactory": _llamafactory_data, "trl": _trl_data}[reading.tool.name](reading)


def listed(value: object) -> list[object]:
    """Return a list, a single value as a list, or [] for a missing value."""
    return cast(list[object], value) if isinstance(value, list) else [] if value in (None, "") else [value]


def _add(reading: TrainerReading, key: str, sources: list[dict[str, object]], part: str = "train") -> None:
    if problem := setting_problem(f"data.{part}", sources) if sources else "":
        reading.note(key, NOT_BUILT, f"{problem}. Write data.{part}")
    elif sources:
        reading.settings[f"data.{part}"] = [*reading.settings.get(f"data.{part}", ()), *sources]
        names = ", ".join(str(source["path"]) for source in sources)
        reading.note(key, BECAME, f"data.{part}={names}", (f"data.{part}",))


def _paths(reading: TrainerReading, where: str, table: Mapping[str, Any]) -> list[str]:
    """Return the paths of a data set: its files, a local path, or its name on the Hub as hf://NAME?split=..."""
    given, files = table.get("path") or "", listed(table.get("data_files"))
    if not isinstance(given, str):
        reading.note(f"{where}.path", NOT_BUILT, "a path is text. Set data.train", (), given)
        return []
    name = given
    if files and (name in _READERS or Path(name).is_dir()):
        return [str(one) for one in files]
    is_local = name.startswith((".", "/", "~")) or Path(name).exists() or Path(name).suffix in (".json", ".jsonl")
    if not name or is_local or "://" in name:
        return [name] if name else []
    if files:
        return [f"hf://{name}/{one}" for one in files]
    split, slice_, _ = str(table.get("split") or "train").partition("[")
    if slice_:
        reading.note(f"{where}.split", NOT_BUILT, "all of the split is read. Cut the data before", (), table["split"])
    parts = {"split": split, "config": table.get("name"), "revision": table.get("revision")}
    return [f"hf://{name}?" + urlencode({part: value for part, value in parts.items() if value})]


def _sources(
    reading: TrainerReading, paths: Sequence[str], schema: str | None, columns: Mapping[str, object]
) -> list[dict[str, object]]:
    """Return sources of data. The task reward reads columns that its options name."""
    if reading.settings.get("task.name") == "reward":
        named = {f"task.options.{name}": columns[name] for name in ("prompt", "chosen", "rejected") if name in columns}
        reading.settings |= named
        schema, columns = None, {}
    names = _PREFERENCE_COLUMNS.get(schema or "", tuple(columns))
    own = {"schema": schema, "columns": {name: columns[name] for name in names if name in columns}}
    return [{"path": path, **{key: value for key, value in own.items() if value}} for path in paths]


def _preference_schema(reading: TrainerReading) -> str | None:
    """Return the schema of the preference data, or None if the config does not train on preferences."""
    is_kto = reading.settings.get("task.options.objective") == "kto"
    return None if "task.name" not in reading.settings else "feedback" if is_kto else "preference"


def _axolotl_data(reading: TrainerReading) -> None:
    for key, part in (("datasets", "train"), ("pretraining_dataset", "train"), ("test_datasets", "eval")):
        sources: list[dict[str, object]] = []
        for number, item in enumerate(listed(reading.values.get(key))):
            table = cast(dict[str, Any], item) if isinstance(item, dict) else {"path": item}
            if key == "pretraining_dataset":
                table = {"type": "pretrain", **table}
            sources += _axolotl_source(reading, f"{key}.{number}", table)
        _add(reading, key, sources, part)


def _axolotl_source(reading: TrainerReading, where: str, table: Mapping[str, Any]) -> list[dict[str, object]]:
    tool, columns = reading.tool, dict[str, object]()
    kind: Any = table.get("type")
    fields = {**table, **(cast(dict[str, Any], kind) if isinstance(kind, dict) else {})}
    renamed: Any = table.get("message_property_mappings")
    if isinstance(renamed, dict):
        fields |= {f"message_field_{name}": value for name, value in cast(dict[str, Any], renamed).items()}
    elif renamed:
        reading.note(f"{where}.message_property_mappings", NOT_BUILT, "it has names by property", (), renamed)
    for key, value in fields.items():
        if tool.columns.get(key) and value:
            columns[tool.columns[key]] = value
        elif key not in tool.columns and value:
            reading.note(f"{where}.{key}", NOT_BUILT, "a source has no such setting. Change the records", (), value)
    schema = _preference_schema(reading)
    if schema is None and isinstance(kind, dict):
        schema = "instruction"
    elif schema is None and kind:
        word = str(cast(object, kind))
        schema = tool.types.get(re.split(r"[.:]", word)[0])
        if schema is None:
            reading.note(f"{where}.type", NOT_BUILT, "Weft detects the schema. Set data.train.N.schema", (), word)
    return _sources(reading, _paths(reading, where, table), schema, columns)


def _llamafactory_data(reading: TrainerReading) -> None:
    folder = str(reading.values.get("dataset_dir") or "data")
    roots = [Path(folder), *(parent / folder for parent in (reading.folder, *reading.folder.resolve().parents[:4]))]
    root = next((one for one in roots if (one / "dataset_info.json").is_file()), roots[0])
    try:
        table = cast(dict[str, Any], json.loads((root / "dataset_info.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        table = {}
    for key, part in (("dataset", "train"), ("eval_dataset", "eval")):
        named = [one for each in listed(reading.values.get(key)) for one in str(each).split(",")]
        names = [name for one in named if (name := one.strip())]
        entries = [table[name] for name in names if name in table]
        if reading.values.get("stage", "sft") == "sft" and any(_media_columns(one) for one in entries):
            _media_data(reading, key, entries, root)
            continue
        sources = [source for name in names if name in table for source in _of_info(reading, table[name], root)]
        _add(reading, key, sources, part)
        if lost := [name for name in names if name not in table]:
            rule = f"{', '.join(lost)}: not in {folder}/dataset_info.json. Set data.{part} to its file"
            reading.note(key, NOT_BUILT, rule, (f"data.{part}",) if sources else ())


def _media_columns(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of media of an entry of dataset_info.json, by option of the task `chat`."""
    names = entry.get("columns", {})
    return {option: names[name] for name, option in (("images", "picture"), ("audios", "audio")) if names.get(name)}


def _media_data(reading: TrainerReading, key: str, entries: Sequence[Mapping[str, Any]], root: Path) -> None:
    """Read conversations with images or audio clips as data of the task `chat`, as LLaMA-Factory trains on them."""
    entry, settings, values = entries[0], reading.settings, reading.values
    if len(entries) > 1 or not entry.get("file_name"):
        reading.note(key, NOT_BUILT, "task=chat reads one local path. Put the records into one file or folder")
        return
    options: dict[str, object] = {
        "data" if key == "dataset" else "eval": str(root / entry["file_name"]),
        **_media_columns(entry),
    }
    if entry.get("formatting") in ("sharegpt", "openai"):
        options["text"] = entry.get("columns", {}).get("messages", "conversations")
    options["max_pixels"] = reading.count("image_max_pixels", 768 * 768)
    frozen = [("vision", "freeze_vision_tower"), ("projector", "freeze_multi_modal_projector")]
    parts = [part for part, name in frozen if values.get(name, True)]
    if not reading.has_adapter and parts:
        options["freeze"] = parts
    elif parts:
        settings.setdefault("adapter.targets", ["language_model.*"])
    if (holdout := settings.pop("data.holdout", 0)) and not reading.is_on("eval_dataset"):
        options["holdout"] = holdout
    settings.pop("data.borders", None)
    if settings.get("data.packing") != "fit":
        settings.pop("data.packing", None)
    settings |= {"task.name": "chat", **{f"task.options.{name}": value for name, value in options.items()}}
    reading.note(key, BECAME, ", ".join(["task=chat", *(f"{name}={value}" for name, value in options.items())]))
    for name in ("image_max_pixels", *(name for _, name in frozen)):
        if name in values:
            reading.note(name, BECAME, "task.options.max_pixels" if "pixels" in name else "the frozen parts")


def _of_info(reading: TrainerReading, entry: Mapping[str, Any], root: Path) -> list[dict[str, object]]:
    """Return the sources of an entry of dataset_info.json."""
    names = {**entry.get("columns", {}), **entry.get("tags", {})}
    columns = {own: names[key] for key, own in reading.tool.columns.items() if names.get(key)}
    is_chat = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    schema = _preference_schema(reading)
    if schema is not None:
        columns["prompt"] = names.get("messages", "conversations") if is_chat else names.get("prompt", "instruction")
    elif reading.values.get("stage") == "pt":
        schema, columns = "text", {"text": names.get("prompt", "text")}
        if reading.values.get("packing") is not False:  # blocks of joined documents, without borders
            reading.settings |= {"data.packing": "concat", "data.borders": False}
    else:
        schema = "messages" if is_chat else "instruction"
    hub = {"path": entry.get("hf_hub_url"), "split": entry.get("split"), "name": entry.get("subset")}
    paths = _paths(reading, "dataset", hub) if hub["path"] else [str(root / str(entry.get("file_name", "")))]
    return _sources(reading, paths, schema, columns)


def _trl_data(reading: TrainerReading) -> None:
    values, columns = reading.values, dict[str, object]()
    if text := values.get("dataset_text_field"):
        columns["text"] = text
    schema = _preference_schema(reading) or ("text" if columns else None)
    named = {"path": values.get("dataset_name"), "name": values.get("dataset_config")}
    tables: list[object] = [{**named, "split": values.get("dataset_train_split")}] if named["path"] else []
    for key, items in (("datasets", listed(values.get("datasets"))), ("dataset_name", tables)):
        found = [cast(dict[str, Any], one) for one in items if isinstance(one, dict)]
        paths = [path for one in found for path in _paths(reading, key, one)]
        _add(reading, key, _sources(reading, paths, schema, columns))
        if any(one.get("fraction") for one in found):
            reading.note("datasets.fraction", NOT_BUILT, "cut the data before, or set train.steps", (), "below 1")
    if reading.is_on("test_split_size"):
        reading.assign("test_split_size", {"data.holdout": values["test_split_size"]})
    if reading.is_on("dataset_test_split") and named["path"]:
        paths = _paths(reading, "dataset", {**named, "split": values["dataset_test_split"]})
        _add(reading, "dataset_test_split", _sources(reading, paths, schema, columns), "eval")
