"""Models and data sets of the Hugging Face hub: their names, the commit of a revision, and their files in the cache.

A run resolves each name once, to a commit, and writes it into its config: `hf://OWNER/NAME@v1?commit=SHA`. From then on
a name is a folder of huggingface_hub's cache, which is found without network. No code of a repository is run.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote

from weft import env
from weft.errors import ConfigError, MissingExtra, Problem, WeftError, did_you_mean
from weft.files import COMPANIONS, locked

SCHEME = "hf://"
#: Key of the only setting that names a model for its tokenizer alone.
TOKENIZER = "tokenizer.path"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
#: Revisions with a slash that need no %2F.
_SPECIAL = r"refs/(?:convert/[A-Za-z0-9_.-]+|pr/[0-9]+)"
#: The part of a name before its question mark.
_PLACE = {
    "model": re.compile(rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>.+))?(?P<path>)"),
    "dataset": re.compile(
        rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>{_SPECIAL}|[^/@]+))?(?:/(?P<path>.*[^/]))?/?"
    ),
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./-]{0,250}")
_KEYS = {"model": ("revision", "commit"), "dataset": ("split", "config", "revision", "columns", "commit")}
_NOUN = {"model": "model", "dataset": "data set"}
_NOT_DOWNLOADED = "it has not been downloaded. Start the run with `weft train`, or give a folder."


@dataclass(frozen=True, slots=True)
class HubName:
    """A model or data set of the hub, as a config names it.

    Attributes:
        key, text: the config's key and value, for errors.
        kind: "model" or "dataset".
        repo: OWNER/NAME.
        revision: the branch, tag or commit in the config, or "" for main.
        commit: the commit of the revision, or "" until it is resolved.
        path: pattern of files of a data set, or "".
        config, split: name of a part of a data set, or "".
        columns: column names by part of the record, as in data.train.columns.
    """

    key: str = field(compare=False)
    text: str = field(compare=False)
    kind: Literal["model", "dataset"]
    repo: str
    revision: str = ""
    commit: str = ""
    path: str = ""
    config: str = ""
    split: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, compare=False)

    def format(self) -> str:
        """Return the name without its columns, as text that `parse` reads."""
        kind = "datasets/" if self.kind == "dataset" else ""
        special = re.fullmatch(_SPECIAL, self.revision)
        revision = f"@{self.revision if special else quote(self.revision, safe='')}" if self.revision else ""
        values = (("config", self.config), ("split", self.split), ("commit", self.commit))
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in values if value)
        path = f"/{quote(self.path, safe='/*[]!')}" if self.path else ""
        return f"{SCHEME}{kind}{self.repo}{revision}{path}{'?' if query else ''}{query}"

    def error(self, rule: str) -> ConfigError:
        """Return the error of this name: `key=value: rule`."""
        return ConfigError([Problem.of(self.key, self.text, rule)])

    @property
    def snapshot(self) -> Path:
        """The folder of the commit's files in the cache. It exists once `download` has returned.

        Raises:
            ConfigError: if the name has no commit.
        """
        if not self.commit:
            raise self.error(_NOT_DOWNLOADED)
        cache = Path(_module("huggingface_hub.constants").HF_HUB_CACHE).expanduser()
        return cache / f"{self.kind}s--{self.repo.replace('/', '--')}" / "snapshots" / self.commit


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtra("huggingface_hub", "hub", "a name on the Hugging Face hub") from None


def is_hub_text(text: str) -> bool:
    """Return True for text that can only be a name on the hub."""
    return text.startswith(SCHEME)


def model_name(text: str, key: str = "model.path") -> HubName | None:
    """Return the hub name that a model's path means, or None if the text is a path.

    Text that begins with hf:// is a name. Other text is a path if that path exists, or if it does not have the form
    OWNER/NAME[@REVISION].

    Raises:
        ConfigError: if the text is not a valid name, or if a folder OWNER exists, so that a path may be meant.
    """
    if is_hub_text(text):
        return parse(text, "model", key)
    place = _PLACE["model"].fullmatch(text)
    owner, slash, _ = place["repo"].partition("/") if place is not None else ("", "", "")
    # Owners have no dot, in contrast to folders such as ".." and files such as model.safetensors.
    if not slash or "." in owner or Path(text).suffix in (".json", ".toml") or Path(text).expanduser().exists():
        return None
    if Path(owner).is_dir():
        rule = f"the folder {owner} exists without it, and it is also a name on the Hugging Face hub."
        rule += f" Type ./{text} for the folder, or {SCHEME}{text} for the hub."
        raise ConfigError([Problem.of(key, text, rule)])
    return replace(parse(f"{SCHEME}{text}", "model", key), text=text)


def parse(text: str, kind: Literal["model", "dataset"], key: str) -> HubName:
    """Read `hf://[datasets/]OWNER/NAME[@REVISION][/PATTERN][?split=...&config=...&revision=...&columns=...]`.

    A model has neither PATTERN nor split, config and columns. A data set's REVISION has %2F instead of a slash.

    Raises:
        ConfigError: for other text.
    """

    def refuse(rule: str) -> ConfigError:
        return ConfigError([Problem.of(key, text, rule)])

    place, _, query = text.removeprefix(SCHEME).partition("?")
    noun, form = _NOUN[kind], f"{SCHEME}{'datasets/' if kind == 'dataset' else ''}OWNER/NAME[@REVISION]"
    first, _, rest = place.partition("/")
    if first in ("models", "datasets", "spaces", "buckets", "kernels"):
        if first != f"{kind}s":
            raise refuse(f"this names one of the hub's {first}, and a {noun} is needed. Use {form}.")
        place = rest
    elif kind == "dataset" and first == "dataset" and "/" in rest:
        name, _, inside = rest.partition("/")
        raise refuse(
            f"this is either the data set {rest}, or {inside} in the data set {name} of an owner named dataset. Type "
            f"{SCHEME}datasets/{rest} for the first, or {SCHEME}datasets/dataset/{rest} for the second."
        )
    found, values = _PLACE[kind].fullmatch(place), _query(query, kind, refuse)
    if found is None or "--" in found["repo"] or ".." in found["repo"]:
        raise refuse(f"{place!r} is not a name on the hub. Use {form}.")
    if found["revision"] and "revision" in values:
        raise refuse("the revision is given twice. Keep @REVISION or revision=REVISION.")
    revision = unquote(found["revision"] or "") or values.get("revision", "main")
    if not _REVISION.fullmatch(revision):
        raise refuse(f"{revision!r} is not a branch, tag or commit. Use one, such as @main.")
    commit, path = values.get("commit", ""), unquote(found["path"] or "")
    if commit and not _COMMIT.fullmatch(commit):
        raise refuse("the commit does not have 40 hexadecimal digits. Leave it out.")
    config, split = values.get("config", ""), values.get("split", "")
    if path and (config or split):
        raise refuse(f"it has the files {path} and a split or config. Keep one of them.")
    if any("**" in part and part != "**" for part in path.split("/")):
        raise refuse(f"in {path}, ** is only a part of a name. Use it alone, as in data/**/*.parquet.")
    if split and not re.fullmatch(r"\w[\w.-]*", split):
        raise refuse(f"split={split} is not the name of one split, and parts of a split are not read. Use split=train.")
    commit = commit or (revision if _COMMIT.fullmatch(revision) else "")
    columns = _columns(values["columns"], refuse) if "columns" in values else {}
    revision = "" if revision == "main" else revision
    return HubName(key, text, kind, found["repo"], revision, commit, path, config, split, columns)


def _query(query: str, kind: str, refuse: Callable[[str], ConfigError]) -> dict[str, str]:
    pairs, known = parse_qsl(query, keep_blank_values=True), _KEYS[kind]
    values = dict(pairs)
    for name, value in pairs:
        if name not in known:
            hint = did_you_mean(name, known) or f" Use {', '.join(known[:-1])}."
            raise refuse(f"a {_NOUN[kind]} has no {name!r} after the question mark.{hint}")
        if not value:
            raise refuse(f"{name} has no value. Give one, or leave it out.")
    if len(values) < len(pairs):
        raise refuse("a name after the question mark is given twice. Keep one of the two.")
    return values


def _columns(text: str, refuse: Callable[[str], ConfigError]) -> dict[str, str]:
    pairs = [pair.partition(":") for pair in text.split(",")]
    if not all(part and name for part, _, name in pairs) or len({part for part, *_ in pairs}) < len(pairs):
        raise refuse("columns are pairs of a part and a column. Use columns=text:body, or text:body,label:stars.")
    return {part: name for part, _, name in pairs}


# The hub: resolving a revision, and downloading the files of a commit into huggingface_hub's cache.


@contextmanager
def _one_sentence(name: HubName) -> Generator[Any]:
    """Yield the module huggingface_hub, and convert its errors to ConfigErrors with a short text and a remedy.

    The text does not contain the server's answer, a URL or a token.
    """
    hub = _module("huggingface_hub")
    errors, noun = _module("huggingface_hub.errors"), _NOUN[name.kind]
    try:
        yield hub
    except WeftError:
        raise
    except errors.GatedRepoError as error:
        rule = f"the hub gives this {noun} only to accounts that accepted its terms. Accept them on its page, and type"
        raise name.error(f"{rule} hf auth login, or set HF_TOKEN.") from error
    except errors.RevisionNotFoundError as error:
        rule = f"{name.repo} has no revision {name.revision or name.commit}. Use a branch, tag or commit of it."
        raise name.error(rule) from error
    except errors.RepositoryNotFoundError as error:
        rule = "" if is_hub_text(name.text) else "there is no such folder, and "
        rule += f"the hub has no {noun} {name.repo}, or it is private and your account may not read it. Check the name,"
        raise name.error(f"{rule} and for a private one type hf auth login, or set HF_TOKEN.") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        raise name.error(_not_cached(name) if env.hub_is_offline() else _failed(name, error)) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        rule = f"the hub answered with status {status}. Run the same command again later."
        if status in (401, 403):
            rule = f"the hub refuses it to your account (status {status}). Type hf auth login, or set HF_TOKEN."
        raise name.error(rule) from error
    except (errors.HTTPError, OSError) as error:
        raise name.error(_failed(name, error)) from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:  # the answer has another form
        raise name.error("the server's answer is not one of a Hugging Face hub. Check HF_ENDPOINT.") from error


def _not_cached(name: HubName) -> str:
    no_folder = "" if is_hub_text(name.text) else "there is no such folder, "
    return (
        f"{no_folder}HF_HUB_OFFLINE is set, and the cache does not have all files of {name.repo}"
        f"{f' at revision {name.revision}' if name.revision else ''}. Run the command once without HF_HUB_OFFLINE."
    )


def _failed(name: HubName, error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"its files cannot be written to the cache ({error.strerror}). Free space, or set HF_HOME."
    no_folder = "" if is_hub_text(name.text) else "there is no such folder, and "
    return (
        f"{no_folder}the download from the hub failed ({type(error.__cause__ or error).__name__}). Check the network "
        "and run the same command again, or set HF_HUB_OFFLINE=1 if the cache has the files."
    )


def resolve(name: HubName) -> HubName:
    """Return the name with the commit of its revision. Offline, this is the commit that the cache has for it.

    Raises:
        ConfigError: if the hub or the cache does not have it, or the hub cannot be reached.
    """
    if name.commit:
        return name
    with _one_sentence(name) as hub:
        asked = {"repo_type": name.kind, "revision": name.revision or None}
        if env.hub_is_offline():
            commit = hub.HfApi().resolve_revision(name.repo, local_files_only=True, **asked).resolved
        else:
            commit = hub.HfApi().repo_info(name.repo, **asked).sha
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise ValueError("a commit has 40 hexadecimal digits")
        if not env.hub_is_offline():
            hub.HfApi().resolve_revision(name.repo, **asked)  # writes the commit of the revision into the cache
    return replace(name, commit=commit)


def download(name: HubName, *, weights: bool = True, lazy: bool = False) -> Path:
    """Download the files of a resolved name that the cache lacks, and return their folder.

    Of concurrent calls on one machine, one downloads, and the others wait for it.

    Args:
        name: a name with a commit.
        weights: also download the weights of a model.
        lazy: download only the first file of a data set.

    Raises:
        ConfigError: if a file cannot be downloaded, or the repository has no usable ones.
    """
    folder = name.snapshot
    lock = env.cache_dir() / "hub" / f"{name.kind}s--{name.repo.replace('/', '--')}.lock"
    with locked(lock), _one_sentence(name) as hub:
        own = {"repo_type": name.kind, "revision": name.commit}
        # Download one small file, which also writes the list of all files into the cache. All repositories have
        # .gitattributes.
        small = "config.json" if name.kind == "model" else "README.md"
        bar: Any = _module("huggingface_hub.utils").tqdm

        class Hidden(bar):
            __init__ = partialmethod(bar.__init__, disable=True)

        hub.snapshot_download(name.repo, allow_patterns=[small, ".gitattributes"], tqdm_class=Hidden, **own)
        try:
            sizes = _listed(name, hub)
        except _module("huggingface_hub.errors").CachedRepoTreeNotFoundError as error:
            if env.hub_is_offline() and name.kind == "model":
                return folder  # of an older huggingface_hub; reading the folder checks that its weights are complete
            raise name.error(_not_cached(name) if env.hub_is_offline() else _failed(name, error)) from error
        names = _model_files(name, sizes) if name.kind == "model" else data_files(name, sizes)
        names = [file for file in names if weights or not file.endswith(".safetensors")]
        names = sorted(names)[:1] if lazy else names
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda file: hub.hf_hub_download(name.repo, file, **own), names))
        for file in names:
            if (size := (folder / file).stat().st_size) != sizes[file]:
                raise name.error(
                    f"{folder / file} has {size} bytes, and {sizes[file]} on the hub. Remove it and the file that it "
                    "links to, and run the same command again."
                )
    return folder


def _listed(name: HubName, hub: Any) -> dict[str, int]:
    """Return the sizes of the commit's files by name, from the cache.

    Raise ConfigError for names that leave the folder.
    """
    files = hub.get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.commit)
    sizes = {str(file.path): int(file.size) for file in files}
    for path in sizes:
        if path.startswith("/") or "\\" in path or not path.isprintable() or {"", ".", ".."} & {*path.split("/")}:
            raise name.error(f"the repository has a file {path[:200]!r}, whose name leaves its folder. Do not use it.")
    return sizes


def _model_files(name: HubName, listed: Iterable[str]) -> list[str]:
    """Return the files to download: config, tokenizer and safetensors weights in the first level of the repository.

    For tokenizer.path there are no weights.
    """
    top = [PurePosixPath(path) for path in listed if "/" not in path]
    names = [path.name for path in top if any(map(path.match, (*COMPANIONS, "*.safetensors")))]
    # Mistral's repositories have the weights a second time under this name.
    names = [file for file in names if not file.startswith("consolidated")]
    if name.key == TOKENIZER:
        if "tokenizer.json" not in names:
            raise name.error("the repository has no tokenizer.json. Name the repository of a model that has one.")
        return [file for file in names if not file.endswith(".safetensors")]
    if "config.json" not in names:
        raise name.error("the repository has no config.json. Name the repository of a transformers model.")
    if not any(file.endswith(".safetensors") for file in names):
        rule = "the repository has no safetensors weights, and other formats may run code when they are read."
        raise name.error(f"{rule} Name a repository or a revision with safetensors.")
    if rule := needed_code((name.snapshot / "config.json").read_bytes()):
        raise name.error(rule)
    return names


def needed_code(config: bytes) -> str:
    """Return the reason and the remedy if only code of the folder can build the model of a config.json, or ""."""
    try:
        fields = json.loads(config)
        if "auto_map" not in fields:
            return ""
        family = fields.get("model_type")
        known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    except (ValueError, TypeError, AttributeError, ImportError, RecursionError):
        return ""  # reading the model reports it
    if family in known:
        return ""
    rule = f"its model_type={family} needs code of the folder (trust_remote_code), which Weft does not run."
    return f"{rule} Use a model of a family that transformers has."


def downloaded_folder(text: str, key: str, *, weights: bool = True) -> str:
    """Return the folder of a model's name on the hub, after downloading the files that the cache lacks.

    For commands without a run, which would fix the commit. Other text is returned unchanged. Raises ConfigError as
    `model_name`, `resolve` and `download` do.
    """
    name = model_name(text, key)
    return text if name is None else str(download(resolve(name), weights=weights))


def local_folder(path: str, key: str = "model.path") -> Path:
    """Return the folder that a model's path in a run's config refers to. It may not exist. Uses no network.

    Raises:
        ConfigError: if the path is a name on the hub that is invalid or has no commit.
    """
    return parse(path, "model", key).snapshot if is_hub_text(path) else Path(path).expanduser()


# Files of a data set's config and split, by the rules of the `datasets` package: README.md lists them, or their names
# have the name of the split.

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_TABLES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_NAME_FILES = "Name the files: hf://datasets/OWNER/NAME/PATTERN."
_SHARD = re.compile(r"(?:^|/)data/(\w[\w.-]*)-[0-9]{5}-of-[0-9]{5}[^/]*")


def fetch(path: str, key: str, file: Path) -> None:
    """Download a file of a data set that `download` left out, unless the cache has it.

    Args:
        path: the data set's name in a run's config.
        key: the config key, for errors.
        file: the file in the folder of `local_data`.

    Raises:
        ConfigError: if the file cannot be downloaded.
    """
    if file.is_file():
        return
    name = parse(path, "dataset", key)
    with _one_sentence(name) as hub:
        own = {"repo_type": name.kind, "revision": name.commit}
        hub.hf_hub_download(name.repo, file.relative_to(name.snapshot.absolute()).as_posix(), **own)


def local_data(path: str, key: str) -> tuple[Path, dict[Path, int]]:
    """Return the folder of a data set's name in a run's config, and the sizes of its files. Uses no network.

    Raises:
        ConfigError: if the name is invalid, has no commit or was not downloaded, or if `data_files` raises it.
    """
    name = parse(path, "dataset", key)
    folder = name.snapshot
    with _one_sentence(name) as hub:
        try:
            sizes = _listed(name, hub)
            files = data_files(name, sizes)
        except _module("huggingface_hub.errors").CachedRepoTreeNotFoundError as error:
            raise name.error(_NOT_DOWNLOADED) from error
    return folder, {folder / file: sizes[file] for file in files}


def data_files(name: HubName, listed: Iterable[str]) -> list[str]:
    """Return the files of the name's pattern, or of its config and split.

    Args:
        name: the name, whose README.md is in the cache.
        listed: all files of the commit.

    Raises:
        ConfigError: if there are no such files, or if the config or the split is unknown or ambiguous.
    """
    listed = sorted(listed)
    if name.path:
        found = _matching([name.path], listed) or [file for file in listed if file.startswith(f"{name.path}/")]
        if not found:
            raise name.error(f"{name.repo} has no file {name.path}.{did_you_mean(name.path, listed)} Check the name.")
        return found
    tables = [file for file in listed if _is_table(file)]
    if not tables:
        code = next((file for file in listed if file == f"{name.repo.rpartition('/')[2]}.py"), None)
        rule = f"only {code}, which is code" if code else f"no file of the formats {', '.join(_TABLES)}"
        raise name.error(
            f"{name.repo} has {rule}, and Weft runs no code of a data set. Use its converted files: "
            "?revision=refs/convert/parquet."
        )
    splits = _splits_of_config(name, tables, _configs(name) if "README.md" in listed else [])
    if not splits:
        raise name.error(f"its README.md lists no file of the formats {', '.join(_TABLES)}. {_NAME_FILES}")
    split = name.split or ("train" if name.key.startswith("data.train") and "train" in splits else "")
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        which = f"it has no split {split}" if split else "it has several splits"
        raise name.error(f"{which}. Use split={' or split='.join(splits)}.")
    return splits[split]


def _is_table(file: str) -> bool:
    base = PurePosixPath(file.removesuffix(".gz").removesuffix(".zst"))
    hidden = any(part.startswith((".", "__")) for part in base.parts)
    return base.suffix in _TABLES and not hidden and base.name not in ("dataset_infos.json", "dataset_info.json")


def _splits_of_config(name: HubName, tables: Sequence[str], configs: Sequence[Any]) -> dict[str, list[str]]:
    by_name = {str(one.get("config_name", "default")): one for one in configs}
    if not configs:
        folders = {file.partition("/")[0] for file in tables}
        inside = [file for file in tables if file.startswith(f"{name.config}/")]
        if name.config and not inside and name.config != "default":
            raise name.error(f"it has no config {name.config}. Leave config out.")
        if not name.config and name.revision.startswith("refs/convert/") and len(folders) > 1:
            raise name.error(f"it has several configs. Use config={' or config='.join(sorted(folders))}.")
        return _splits_by_name(inside or tables)
    default = [key for key, one in by_name.items() if one.get("default") or key == "default" or len(configs) == 1]
    chosen = name.config or (default[0] if default else "")
    if chosen not in by_name:
        which = f"it has no config {chosen}" if chosen else "it has several configs"
        raise name.error(f"{which}. Use config={' or config='.join(by_name)}.")
    config = by_name[chosen]
    root, files = str(config.get("data_dir") or "").strip("./"), config.get("data_files")
    if files is None:
        return _splits_by_name([file for file in tables if file.startswith(f"{root}/" if root else "")])
    entries = [files] if isinstance(files, str | dict) else files
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        patterns = [paths] if isinstance(paths, str) else paths
        if not split or not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
            raise name.error(f"its README.md lists data files without a split or a path. {_NAME_FILES}")
        found = _matching([f"{root}/{one}".lstrip("/") for one in patterns], tables)
        splits.setdefault(str(split), []).extend(file for file in found if file not in splits[str(split)])
    return {split: found for split, found in splits.items() if found}


def _configs(name: HubName) -> list[Any]:
    """Return the configs in the header of the README.md."""
    try:
        header = _module("huggingface_hub.repocard").metadata_load(name.snapshot / "README.md") or {}
        return [one for one in header.get("configs") or [] if isinstance(one, dict)]
    except (ValueError, TypeError, AttributeError, _module("yaml").YAMLError) as error:
        raise name.error(f"the header of its README.md cannot be read. {_NAME_FILES}") from error


def _splits_by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split, from file names such as data/SPLIT-00000-of-00002.

    Otherwise the names of folders are used, then those of files. If none names a split, all files are "train".
    """
    splits: dict[str, list[str]] = {}
    for file in files:
        if shard := _SHARD.search(file):
            splits.setdefault(shard[1], []).append(file)
    for part in (lambda file: str(PurePosixPath(file).parent), lambda file: PurePosixPath(file).name):
        for split, words in _SPLITS.items() if not splits else ():
            pattern = re.compile(rf"(?:^|[-._ 0-9/])(?:{'|'.join(words)})(?:[-._ 0-9/]|$)")
            if found := [file for file in files if pattern.search(part(file))]:
                splits[split] = found
        if splits:
            break
    return splits or {"train": list(files)}


def _matching(patterns: Iterable[str], files: Iterable[str]) -> list[str]:
    from fsspec.utils import glob_translate

    rules = [re.compile(glob_translate(one.removeprefix("./").lstrip("/"))) for one in patterns]
    return [file for file in files if any(rule.match(file) for rule in rules)]
