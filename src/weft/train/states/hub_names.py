"""Names on the Hugging Face hub in a run's config: their files, and the commit that the run's first command fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from weft import hub
from weft.config.run_config import RunConfig, SourceSection
from weft.config.sections import ColumnPart
from weft.errors import did_you_mean
from weft.train.folder import RunFolder

#: Settings that name a model: its folder, or a name on the hub.
_MODELS = ("model.path", hub.TOKENIZER, "task.options.teacher", "grpo.teacher")


def _model_at(config: RunConfig, key: str) -> hub.HubName | None:
    """Return the name on the hub at one of `_MODELS`, or None if there is a path or nothing."""
    found: Any = config if not key.startswith("task.") or config.task.name == "distill" else {}
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part)
        if found is None:
            return None
    return hub.model_name(found, key) if isinstance(found, str) else None


def _with_value(section: Any, path: Sequence[str], value: str) -> Any:
    """Return a section, or the options of a task, with another value at a path of keys."""
    key, *rest = path
    if isinstance(section, Mapping):
        return {**section, key: value}
    return section.model_copy(update={key: _with_value(getattr(section, key), rest, value) if rest else value})


def resolved_config(config: RunConfig, folder: RunFolder | None = None) -> RunConfig:
    """Return the config with the commit of each name on the hub.

    A name that the run in `folder` was started with has that run's commit. Others are resolved.

    Raises:
        ConfigError: if the hub does not have a name, a column is unknown or set twice, or a name has no commit although
            replicas on several machines need the same one (`launch.replica`).
    """
    before: list[hub.HubName] | None = None

    def commit_of(name: hub.HubName) -> hub.HubName:
        nonlocal before
        if name.commit:
            return name
        if before is None:
            started = folder is not None and (folder.path / "config.toml").exists()
            before = [*_names(RunFolder(folder.path).config())] if folder is not None and started else []
        same = [old for old in before if (old.kind, old.repo) == (name.kind, name.repo)]
        for old in same:
            if name.revision in ("", old.revision):
                return replace(name, revision=old.revision, commit=old.commit)
        if config.launch.replica is not None:
            raise name.error("replicas on several machines need the same commit. Use @COMMIT after the name.")
        found = hub.resolve(name)
        # Another revision of the same commit is the same run.
        equal = next((old.revision for old in same if old.commit == found.commit), found.revision)
        return replace(found, revision=equal)

    for key in _MODELS:
        if (name := _model_at(config, key)) is not None:
            config = _with_value(config, key.split("."), commit_of(name).format())
    data: dict[str, Any] = {}
    for split in ("train", "eval"):
        sources: tuple[SourceSection, ...] = getattr(config.data, split)
        found = [_with_commit(one, f"data.{split}.{index}.path", commit_of) for index, one in enumerate(sources)]
        if any(new is not old for new, old in zip(found, sources, strict=True)):
            data[split] = tuple(found)
    return config.model_copy(update={"data": config.data.model_copy(update=data)}) if data else config


def _with_commit(source: SourceSection, key: str, commit_of: Callable[[hub.HubName], hub.HubName]) -> SourceSection:
    if not hub.is_hub_text(source.path):
        return source
    name = hub.parse(source.path, "dataset", key)
    for part in name.columns:
        if part not in get_args(ColumnPart):
            raise name.error(f"columns has no part {part!r}.{did_you_mean(part, get_args(ColumnPart))} Use text.")
        if part in source.columns:
            raise name.error(f"the column of {part} is also set by {key.removesuffix('path')}columns. Keep one.")
    return source.model_copy(update={"path": commit_of(name).format(), "columns": {**source.columns, **name.columns}})


def _names(config: RunConfig) -> Iterator[hub.HubName]:
    """Yield the names on the hub in a config."""
    for key in _MODELS:
        if (name := _model_at(config, key)) is not None:
            yield name
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            if hub.is_hub_text(source.path):
                yield hub.parse(source.path, "dataset", f"data.{split}.{index}.path")


def download_all(
    config: RunConfig, show: Callable[[str], None] = lambda _: None, *, weights: bool = True, data: bool = True
) -> None:
    """Download the files of each name in the config that this machine's cache lacks.

    Args:
        config: the result of `resolved_config`.
        show: called with a line for the user about each name.
        weights: also download the weights of models.
        data: also download data sets.

    Raises:
        ConfigError: for a name whose files cannot be downloaded or used.
    """
    for name in _names(config):
        if data or name.kind == "model":
            lazy = config.data.stream and name.key.startswith("data.train")
            folder = hub.download(name, weights=weights, lazy=lazy)
            show(f"{name.key}: {name.repo} at commit {name.commit[:12]} of the hub, in {folder}")


def without_commits(received: RunConfig, config: RunConfig) -> RunConfig:
    """Return `received` without the commits that it adds to names of models in `config`."""
    for key in _MODELS:
        asked, found = _model_at(config, key), _model_at(received, key)
        if asked is None or found is None:
            continue
        if asked.repo == found.repo and asked.commit in ("", found.commit):
            received = _with_value(received, key.split("."), asked.text)
    return received
