"""Sources of data: a path, a folder, a glob or the built-in source, as a sorted list of files of one format."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft import hub
from weft.config.run_config import STDLIB_SOURCE
from weft.errors import DataError, did_you_mean

#: Format of each file suffix. A file with one of the text suffixes is one document.
FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".tfrecord": "tfrecord", ".tfrecords": "tfrecord",
    **dict.fromkeys(
        (".txt", ".text", ".md", ".rst", ".log", ".tex", ".html", ".xml", ".yaml", ".yml", ".toml", ".ini", ".sql",
         ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".rs", ".java", ".js", ".ts", ".rb", ".sh"),
        "text",
    ),
}  # fmt: skip
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
#: Number of a shard, as in data.tfrecord-00000-of-00010.
_SHARD = re.compile(r"(?<=\.tfrecord)(s?)-\d+-of-\d+$")
_STDLIB_LEFT_OUT = frozenset(
    (
        *("test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"),
        # Character tables and help texts: they are not code, and so large that a small model would learn little else.
        *("encodings", "pydoc_data"),
    )
)
_USE = f'Use a file, a folder, a glob such as "data/*.jsonl", or "{STDLIB_SOURCE}".'


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source. `size_bytes` and `mtime_ns` are as of when it was found, and are part of the cache key."""

    path: Path
    name: str
    format: str
    compression: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileSet:
    """The sorted files of one source, all of one format.

    `field` is the config key of the source. `num_skipped` counts files of unknown formats, and .json files next to data
    of another format.
    """

    field: str
    path: str
    format: str
    files: tuple[SourceFile, ...]
    num_skipped: int = 0

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)


def find_files(path: str, field: str, *, lazy: bool = False) -> FileSet:
    """Return the files of `path`. `field` is the dotted config key for errors, such as "data.train.0".

    lazy: include files of a data set on the hub that are not downloaded yet.

    Raises:
        DataError: if nothing matches, `path` is a URL, a format is unknown, the files are of several formats, or one is
            not a regular file.
    """
    if path == STDLIB_SOURCE:
        root = Path(sysconfig.get_path("stdlib"))
        found = [file for file in _walk(root, _STDLIB_LEFT_OUT.__contains__) if file.suffix == ".py"]
        return _file_set(field, path, found, root)
    if path.startswith("builtin:"):
        raise DataError(f"{field}.path={path}: no such built-in source.{did_you_mean(path, [STDLIB_SOURCE])} {_USE}")
    if hub.is_hub_text(path):
        folder, sizes = hub.local_data(path, f"{field}.path")
        return _file_set(field, path, sizes, folder, sizes if lazy else {})
    if "://" in path:
        raise DataError(
            f"{field}.path={path}: Weft reads local files only. "
            f"Download the data first ({_download_command(path)}) and give its path."
        )
    place = Path(path).expanduser()
    if place.is_file():
        if _format_of(place) is None:
            raise DataError(
                f"{field}.path={path}: {place.suffix or 'a file without a suffix'} is not a known format. "
                f"Use one of {', '.join(FORMATS)}, also with .gz or .zst."
            )
        return _file_set(field, path, [place], place.parent)
    if place.is_dir():
        return _file_set(field, path, _walk(place, lambda name: name.startswith(".")), place)
    if glob.has_magic(path):
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]
        return _file_set(field, path, [name for name in found if not name.is_dir()], Path())
    raise DataError(f"{field}.path={path}: no file matches.{_near(place)} {_USE}")


def _download_command(address: str) -> str:
    scheme = address.partition("://")[0]
    if scheme == "s3":
        return f"aws s3 sync {address} data" if address.endswith("/") else f"aws s3 cp {address} ."
    if scheme == "gs":
        return f"gcloud storage cp -r {address} ."
    return f"curl -LO {address}" if scheme in ("http", "https") else "with the tool of that storage"


def _near(place: Path) -> str:
    if not place.parent.is_dir():
        return f" The folder {place.parent} does not exist."
    if os.path.lexists(place):
        return f" It is {_odd(place)}."
    hint = did_you_mean(place.name, sorted(os.listdir(place.parent)))
    return hint if hint else f" The folder {place.parent.absolute()} has no such name."


def _odd(place: Path) -> str:
    return "a link without a target" if place.is_symlink() and not place.exists() else "not a regular file"


def _format_of(path: Path) -> tuple[str, str] | None:
    compression = COMPRESSIONS.get(path.suffix.lower(), "")
    suffix = Path(path.stem).suffix if compression else path.suffix
    data_format = FORMATS.get(_SHARD.sub(r"\1", suffix.lower()))
    if data_format is None or (compression and data_format == "parquet"):
        return None
    return data_format, compression


def _walk(folder: Path, leaves_out: Callable[[str], bool]) -> list[Path]:
    found: list[Path] = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not leaves_out(name))
        found.extend(Path(here, name) for name in names if not leaves_out(name))
    return found


def _file_set(
    field: str, path: str, found: Iterable[Path], root: Path, sizes: Mapping[Path, int] | None = None
) -> FileSet:
    """Return found files as a source. sizes: sizes of files that need not exist yet."""
    sizes = sizes or {}
    found = list(found)
    # Sorted by path relative to the source, so that a moved folder keeps its order.
    known = sorted((_relative(name, root), name) for name in found if _format_of(name))
    if not known:
        seen = sorted({name.suffix or name.name for name in found})[:8]
        reason = f"no file of a known format ({', '.join(seen)} found)" if seen else "no file matches"
        raise DataError(f"{field}.path={path}: {reason}. {_USE}")
    for _, name in known:
        if not name.is_file() and name not in sizes:
            raise DataError(f"{field}.path={path}: {name} is {_odd(name)}. Repair or remove it.")
    files = [_source_file(relative, name, sizes) for relative, name in known]
    # A .json file among data of another format is a description (dataset_info.json). If there is only json, it is the
    # data.
    files = [file for file in files if file.format != "json"] or files
    formats = Counter(file.format for file in files)
    if len(formats) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
        raise DataError(
            f"{field}.path={path}: all files of a source have one format, but these are {counts}. "
            'Use a separate source for each format, with a glob such as "data/**/*.jsonl".'
        )
    return FileSet(field, path, files[0].format, tuple(files), len(found) - len(files))


def _relative(name: Path, root: Path) -> str:
    return name.relative_to(root).as_posix() if root != Path() else name.as_posix()


def _source_file(relative: str, path: Path, sizes: Mapping[Path, int]) -> SourceFile:
    data_format, compression = _format_of(path) or ("", "")
    if not path.exists():
        return SourceFile(path, str(path), data_format, compression, sizes[path], 0)
    stat = path.stat()
    return SourceFile(path.resolve(), str(path), data_format, compression, stat.st_size, stat.st_mtime_ns)


def unique_columns(file: str, header: list[str]) -> list[str]:
    """Return the header of a csv file. Raises DataError if two of its columns have one name."""
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise DataError(f"{file}: two columns have the name {twice!r}. Rename one of them.")
    return header
