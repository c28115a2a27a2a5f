"""Tensors in a folder of safetensors files. Only headers are read, and every file's length is checked."""

from __future__ import annotations

import copy
import importlib
import math
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint import strict_json
from weft.checkpoint.manifest import DTYPE_BYTES, FileEntry, TensorEntry
from weft.checkpoint.read import Box, BoxView, Part, intersect_boxes
from weft.checkpoint.read_tensors import SliceReader
from weft.checkpoint.safetensors_files import RangedTensors, torch_formats
from weft.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: An index of a million tensors has about 100 MB.
_MAX_INDEX_BYTES = 2**29
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights of a folder: tensors by their names in the files, and the files with their sizes."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]


def no_folder(folder: Path) -> str:
    """Return the error text for a model.path that is not a folder, such as the name of a model on a hub."""
    is_name = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.is_dir()
    fetch = f" Type hf download {folder} --local-dir {folder} first." if is_name else ""
    remedy = fetch or " Give a Hugging Face model's: config.json, safetensors weights, tokenizer."
    return f"model.path={folder}: there is no such folder.{remedy}"


def stored_weights(folder: Path) -> StoredWeights:
    """Read the headers of a folder's weights: one safetensors file, or several with an index.

    Raises CheckpointError if a file or tensor is missing, truncated, damaged or differs from the index, or if the
    weights are pickles. The message names the file or tensor and the fix.
    """
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    if (folder / _INDEX).is_file():
        place = _index(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        place = None
    else:
        raise CheckpointError(_no_weights(folder))
    found: dict[str, TensorEntry] = {}
    sizes: dict[str, FileEntry] = {}
    for name in sorted(set(place.values())) if place is not None else [_SINGLE]:
        try:
            size = _size(folder / name)
            tensors = RangedTensors(folder / name, size).tensors
        except FileNotFoundError:
            raise CheckpointError(
                f"model.path={folder}: {_INDEX} names {name}, which is missing. Download the folder again."
            ) from None
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"model.path={folder}: {error}. Download {name} again.") from error
        sizes[name] = FileEntry(size, "")
        for key, one in tensors.items():
            if place is None or place.get(key) == name:
                found[key] = TensorEntry(name, one.dtype, one.shape)
    for key, name in (place or {}).items():
        if key not in found:
            raise CheckpointError(
                f"model.path={folder}: {_INDEX} says that {name} has tensor {key[:200]!r}, and it does not. "
                "Download the folder again."
            )
    return StoredWeights(folder, found, sizes)


def _index(file: Path) -> dict[str, str]:
    try:
        if _size(file) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        read: Any = strict_json.decode(file.read_bytes(), file.name)
        place = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(place, dict) or not all(_is_file_name(name) for name in place.values()):
            raise ValueError("weight_map is not a table of file names")
        return place
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"model.path={file.parent}: {file.name} cannot be read ({error}). Download it again."
        ) from error


def _is_file_name(name: Any) -> bool:
    is_text = isinstance(name, str) and name.isprintable() and len(name) < 256
    return is_text and name.endswith(".safetensors") and name == Path(name).name


def _size(file: Path) -> int:
    """Return the size of a regular file. Raise CheckpointError for pipes, devices and other special files."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file.name} is not a regular file")
    return found.st_size


def _no_weights(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        out = shlex.quote(f"{folder}-safetensors")
        return (
            f"model.path={folder}: its weights are pickles ({pickles[0]}), which can run code when they are read. "
            f"Run weft ckpt convert {shlex.quote(str(folder))} {out}, which reads them in a confined process, and "
            "use that folder."
        )
    return f"model.path={folder}: it has neither {_SINGLE} nor {_INDEX}. Give a folder with safetensors weights."


# Tensors composed of stored ones without a copy, such as stacked expert weights that are stored one per expert.

#: Exponent bits of each float format. They are all set in inf and NaN.
_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
#: Elements that are checked at a time, so that they stay in the processor's cache.
_CHECKED_ELEMENTS = 2**16
#: Bytes of tensors that are compared at a time.
_COMPARED_BYTES = 2**22
#: Unsigned integer dtypes by element size in bytes.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _TensorSlice:
    """A slice of a stored tensor as a part of a composed tensor.

    Attributes:
        name: name of the stored tensor.
        shape: shape of the slice, in the stored order of dims.
        start: first index of the slice in the stored tensor.
        corner: first index of the slice in the composed tensor.
        dims: dim of the composed tensor for each stored dim.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    corner: tuple[int, ...]
    dims: tuple[int, ...]

    def box(self) -> Box:
        sizes = [1] * len(self.corner)
        for dim, size in zip(self.dims, self.shape, strict=True):
            sizes[dim] = size
        return tuple((low, low + size) for low, size in zip(self.corner, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor composed of slices of stored tensors, with its shape and its dtype in the safetensors format."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[_TensorSlice, ...]

    @classmethod
    def of(cls, name: str, entry: TensorEntry) -> Joined:
        """Return the composition of a single stored tensor."""
        rank = len(entry.shape)
        return cls(
            entry.shape, entry.dtype, (_TensorSlice(name, entry.shape, (0,) * rank, (0,) * rank, tuple(range(rank))),)
        )

    @classmethod
    def stacked(cls, parts: Sequence[Joined], dim: int) -> Joined:
        """Return tensors of equal shape stacked along a new dim. Raises ValueError if shapes or dtypes differ."""
        _expect_equal([(one.shape, one.dtype) for one in parts])
        pieces = [
            replace(
                piece,
                corner=(*piece.corner[:dim], number, *piece.corner[dim:]),
                dims=tuple(one + (one >= dim) for one in piece.dims),
            )
            for number, part in enumerate(parts)
            for piece in part.pieces
        ]
        shape = parts[0].shape
        return cls((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype, tuple(pieces))

    @classmethod
    def end_to_end(cls, parts: Sequence[Joined], dim: int) -> Joined:
        """Return tensors concatenated along a dim. Raises ValueError if dtypes, or sizes of the other dims, differ."""
        dim %= len(parts[0].shape)
        _expect_equal([((*one.shape[:dim], *one.shape[dim + 1 :]), one.dtype) for one in parts])
        pieces, place = list[_TensorSlice](), 0
        for part in parts:
            for piece in part.pieces:
                corner = list(piece.corner)
                corner[dim] += place
                pieces.append(replace(piece, corner=tuple(corner)))
            place += part.shape[dim]
        shape = parts[0].shape
        return cls((*shape[:dim], place, *shape[dim + 1 :]), parts[0].dtype, tuple(pieces))

    def row_range(self, dim: int, low: int, high: int) -> Joined:
        """Return rows `low` to `high` (exclusive) of a dim."""
        dim %= len(self.shape)
        wanted = tuple((low, high) if one == dim else (0, size) for one, size in enumerate(self.shape))
        pieces = list[_TensorSlice]()
        for piece in self.pieces:
            common = intersect_boxes(piece.box(), wanted)
            if common is None:
                continue
            moved = [common[each][0] - piece.corner[each] for each in piece.dims]
            pieces.append(
                replace(
                    piece,
                    shape=tuple(common[each][1] - common[each][0] for each in piece.dims),
                    start=tuple(first + more for first, more in zip(piece.start, moved, strict=True)),
                    corner=tuple(first - (low if one == dim else 0) for one, (first, _) in enumerate(common)),
                )
            )
        return Joined((*self.shape[:dim], high - low, *self.shape[dim + 1 :]), self.dtype, tuple(pieces))

    def turned(self, dim0: int, dim1: int) -> Joined:
        """Return the tensor with two dims swapped."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        pieces = [
            replace(
                piece,
                corner=tuple(piece.corner[one] for one in order),
                dims=tuple(order.index(each) for each in piece.dims),
            )
            for piece in self.pieces
        ]
        return Joined(tuple(self.shape[one] for one in order), self.dtype, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that is computed from full stored tensors.

    Attributes:
        shape: its shape.
        dtype: its dtype in the safetensors format.
        name: its name in the result of `make`.
        make: returns tensors by name. Its argument is a function that returns a stored tensor by name.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str
    make: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]


class ByteRun(NamedTuple):
    """Bytes that are consecutive both in a file, from `offset` on, and in a tensor, from byte `start` on."""

    file: str
    offset: int
    start: int
    num_bytes: int


class JoinedTensors:
    """Tensors by a model's names, of which any part can be read from the files of a folder.

    finite: names of tensors whose values must be finite. Reading checks it.
    """

    def __init__(
        self, stored: StoredWeights, entries: Mapping[str, Joined | Computed], finite: Collection[str] = frozenset()
    ):
        self.entries, self._finite = entries, finite
        self._stored = stored
        self._reader = SliceReader(stored.folder, stored.files)
        #: Result of the last computation, cached because tensors that are computed together are read one after another.
        self._made: tuple[object, Mapping[str, Tensor]] = (None, {})

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors that have been read."""
        return self._reader.num_bytes

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part of a tensor.

        start: first element to read, as an index into the flattened part.
        Raises CheckpointError if bytes are missing or cannot be read, or a weight is not finite.
        """
        self._read(name, part, start, out)
        self.check_finite(name, out)

    def reopened(self) -> JoinedTensors:
        """Return the same tensors with files that are opened again, for use in another thread."""
        return JoinedTensors(self._stored, self.entries, self._finite)

    def byte_runs(self, name: str) -> list[ByteRun] | None:
        """Return the locations of a tensor's bytes in the files; None if they must be rearranged or computed.

        Raises CheckpointError if a file is missing or damaged.
        """
        joined, found = self.entries[name], list[ByteRun]()
        if isinstance(joined, Computed):
            return None
        width, whole = DTYPE_BYTES[joined.dtype], Part(joined.shape)
        for piece in joined.pieces:
            entry, numel = self._stored.entries[piece.name], math.prod(piece.shape)
            slice_box = tuple((low, low + size) for low, size in zip(piece.start, piece.shape, strict=True))
            here, there = whole.span(piece.box()), Part(entry.shape).span(slice_box)
            if not numel:
                continue
            if here is None or there is None or list(piece.dims) != sorted(piece.dims):
                return None
            if here[1] - here[0] != numel or there[1] - there[0] != numel:
                return None
            offset = self._reader.file(entry.file).tensors[piece.name].offset + there[0] * width
            found.append(ByteRun(entry.file, offset, here[0] * width, numel * width))
        return found if sum(run.num_bytes for run in found) == math.prod(joined.shape) * width else None

    def read_bytes(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file from `offset` on, as `byte_runs` gives them.

        Raises CheckpointError if the file is truncated, changed or cannot be read.
        """
        try:
            self._reader.file(file).into(out, offset)
        except (CheckpointError, OSError) as error:
            raise self._unreadable(error) from error

    def check_finite(self, name: str, values: memoryview) -> None:
        """Raise CheckpointError if the tensor's values must be finite, and these stored values of it are not."""
        dtype = self.entries[name].dtype
        if name in self._finite and dtype in _EXPONENTS and not _all_finite(values, dtype):
            raise CheckpointError(self._not_finite(name))

    def without(self, names: Collection[str]) -> JoinedTensors:
        """Return all tensors except the named ones."""
        kept = {name: entry for name, entry in self.entries.items() if name not in names}
        return JoinedTensors(self._stored, kept, self._finite)

    def is_equal(self, first: str, second: str) -> bool:
        """Return True if two tensors have equal shape, dtype and bytes. Reads both, some megabytes at a time."""
        one, other = self.entries[first], self.entries[second]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if one == other:  # the same stored tensor
            return True
        width, numel, part = DTYPE_BYTES[one.dtype], math.prod(one.shape), Part(one.shape)
        for start in range(0, numel, _COMPARED_BYTES // width):
            size = min(_COMPARED_BYTES // width, numel - start)
            both = np.empty((2, size * width), np.uint8)
            for row, name in zip(both, (first, second), strict=True):
                self._read(name, part, start, row.data)
            if not np.array_equal(both[0], both[1]):
                return False
        return True

    def _not_finite(self, name: str) -> str:
        joined = self.entries[name]
        pieces = [piece.name for piece in joined.pieces] if isinstance(joined, Joined) else []
        files = sorted({self._stored.entries[piece].file for piece in pieces})
        where = f" of {', '.join(files[:3])}" if files else ""
        return (
            f"model.path={self._stored.folder}: tensor {name!r}{where} has values that are not finite (NaN or "
            "infinity). Download the folder again, or use weights that were saved before training failed."
        )

    def _read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        joined = self.entries[name]
        width = DTYPE_BYTES[joined.dtype]
        target = np.frombuffer(out, _BITS[width])
        if part.is_padded:
            target[:] = 0
        try:
            if isinstance(joined, Computed):
                made = self._computed(joined)
                for view in part.views(start, start + len(target)):
                    inside = made[tuple(slice(low, high) for low, high in view.box)]
                    steps = tuple(stride * target.itemsize for stride in view.strides)
                    np.lib.stride_tricks.as_strided(target[view.offset :], inside.shape, steps)[...] = inside
                return
            boxes = [(piece, piece.box()) for piece in joined.pieces]
            for view in part.views(start, start + len(target)):
                for piece, box in boxes:
                    common = intersect_boxes(view.box, box)
                    if common is not None:
                        self._copy(target, view, piece, common)
        except (CheckpointError, OSError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"model.path={self._stored.folder}: {error}. Download the folder again.")

    def _copy(self, target: np.ndarray, view: BoxView, piece: _TensorSlice, common: Box) -> None:
        moved = [first - piece.corner[dim] for first, dim in zip(piece.start, piece.dims, strict=True)]
        there = tuple((common[dim][0] + by, common[dim][1] + by) for dim, by in zip(piece.dims, moved, strict=True))
        strides = tuple(view.strides[dim] for dim in piece.dims)
        want = BoxView(there, view.at(common), strides)
        self._reader.read_box(piece.name, self._stored.entries[piece.name], target, want)

    def _computed(self, one: Computed) -> np.ndarray:
        """Return the values of a computed tensor as unsigned integers (its bits), in its shape."""
        if self._made[0] is not one.make:
            self._made = (one.make, one.make(self._stored_tensor))
        flat = self._made[1][one.name].detach().contiguous().view(-1).view(torch.uint8).numpy()
        return flat.view(_BITS[DTYPE_BYTES[one.dtype]]).reshape(one.shape)

    def _stored_tensor(self, name: str) -> Tensor:
        entry = self._stored.entries[name]
        bits = np.empty(math.prod(entry.shape), _BITS[DTYPE_BYTES[entry.dtype]])
        strides = tuple(math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape)))
        whole = BoxView(tuple((0, size) for size in entry.shape), 0, strides)
        if bits.size:
            self._reader.read_box(name, entry, bits, whole)
        return torch.from_numpy(bits.view(np.uint8)).view(torch_formats()[entry.dtype]).view(entry.shape)


def _all_finite(out: memoryview, dtype: str) -> bool:
    """Return True if no float has all bits of its exponent set."""
    exponent = _EXPONENTS[dtype]
    bits: Any = np.frombuffer(out, _BITS[DTYPE_BYTES[dtype]])
    for start in range(0, len(bits), _CHECKED_ELEMENTS):
        if ((bits[start : start + _CHECKED_ELEMENTS] & exponent).max(initial=0)) == exponent:
            return False
    return True


def _expect_equal(kinds: Sequence[object]) -> None:
    if len(set(kinds)) != 1:
        raise ValueError(f"its parts differ: {kinds[0]} and {next(one for one in kinds if one != kinds[0])}")


# Conversions of stored tensors by transformers, as compositions: renamed, joined, split, transposed.

#: Tensors by the source pattern of a conversion, as they are between its operations.
_Parts = dict[str, list[Joined]]


class _NotDescribed(Exception):
    """Raised if an operation cannot be expressed as a composition of slices."""


def under_model_names(model: Any, stored: StoredWeights) -> tuple[dict[str, Joined | Computed], list[str]]:
    """Return how each tensor of a model is composed of stored ones, and the stored names that it does not use.

    Raises CheckpointError if tensors cannot be composed as the model's class requires.
    """
    plain = {name: Joined.of(name, entry) for name, entry in stored.entries.items()}
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    try:
        tables: Any = importlib.import_module("transformers.conversion_mapping")
        core: Any = importlib.import_module("transformers.core_model_loading")
        transforms = tables.get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # releases before 5 have no tables
        return _with_prefix(plain, state, prefix)
    renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Joined | Computed] = {}
    left: list[str] = []
    parts: dict[str, dict[str, list[str]]] = {}
    for name in sorted(plain, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = core.rename_source_key(name, [], [], prefix, state)
        if target not in state:
            left.append(name)
        elif pattern is None:
            found[target] = plain[name]
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, names in parts.items():
        converter = by_pattern[next(iter(names))]
        found |= _converted(target, converter, names, plain, model)
    return found, left


def _converted(
    target: str, converter: Any, names: Mapping[str, Sequence[str]], plain: Mapping[str, Joined], model: Any
) -> dict[str, Joined | Computed]:
    """Return the tensors that one transformers converter makes, by the model's names."""
    # The order of transformers' table determines the order of concatenation.
    parts = {
        pattern: [plain[name] for name in names[pattern]] for pattern in converter.source_patterns if pattern in names
    }
    try:
        for operation in converter.operations:
            parts = _described(operation, parts, converter, target, model)
        whole = {pattern: one for pattern, (one,) in parts.items()}
        return dict(_named(target, whole))
    except (_NotDescribed, ValueError):  # ValueError: parts that differ, which transformers may still be able to join
        return _computed(target, converter, names, plain, model)


def _described(operation: Any, parts: _Parts, converter: Any, target: str, model: Any) -> _Parts:
    kind, targets = type(operation).__name__, list(converter.target_patterns)
    if kind == "MergeModulelist":
        stacked = {pattern: [Joined.stacked(each, operation.dim)] for pattern, each in parts.items()}
        return {targets[0]: stacked.popitem()[1]} if len(stacked) == 1 else stacked
    if kind == "Concatenate" and len(targets) == 1:
        return {targets[0]: [Joined.end_to_end([one for each in parts.values() for one in each], operation.dim)]}
    if len(parts) != 1 or len(one := next(iter(parts.values()))) != 1:
        raise _NotDescribed
    pattern, whole = next(iter(parts)), one[0]
    if kind == "Chunk" and operation.num_shards_attribute is None:
        size = -(-whole.shape[operation.dim] // len(targets))
        return _split(whole, operation.dim, [size] * len(targets), targets)
    if kind == "Split":
        shapes = [model.get_parameter(target.replace(targets[0], each)).shape for each in targets]
        return _split(whole, operation.dim, [shape[operation.dim] for shape in shapes], targets)
    if kind == "Transpose":
        is_turned = not operation.check_dims or whole.shape != tuple(model.get_parameter(target).shape)
        turned = whole.turned(operation.dim0, operation.dim1) if is_turned else whole
        return {targets[0] if len(targets) == 1 else pattern: [turned]}
    raise _NotDescribed


def _split(whole: Joined, dim: int, sizes: Sequence[int], targets: Sequence[str]) -> _Parts:
    if sum(sizes) != whole.shape[dim]:
        raise _NotDescribed
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    cuts = zip(targets, sizes, ends, strict=True)
    return {target: [whole.row_range(dim, end - size, end)] for target, size, end in cuts}


def _named(target: str, whole: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (full name, result) for each target pattern of a conversion.

    A full name has the prefix and suffix of `target` around the pattern. If `target` contains no pattern, the patterns
    themselves are the names.
    """
    first = next((pattern for pattern in whole if pattern in target), None)
    before, _, after = target.partition(first) if first is not None else ("", "", "")
    return ((f"{before}{pattern}{after}" if first is not None else pattern, one) for pattern, one in whole.items())


def _computed(
    target: str, converter: Any, names: Mapping[str, Sequence[str]], plain: Mapping[str, Joined], model: Any
) -> dict[str, Joined | Computed]:
    """Describe a conversion that transformers runs on full tensors. The shapes are computed on the meta device.

    Raises CheckpointError if it fails there.
    """
    formats = torch_formats()

    def carry_out(tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        working = copy.deepcopy(converter)
        for pattern, each in names.items():
            for name in each:
                working.add_tensor(target, name, pattern, tensor_of(name))
        made = working.convert(target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    try:
        shapes = carry_out(lambda name: torch.empty(plain[name].shape, dtype=formats[plain[name].dtype], device="meta"))
    except Exception as error:  # the exception depends on the shapes
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        kinds = ", ".join(type(one).__name__ for one in converter.operations)
        raise CheckpointError(
            f"model.path: tensor {target!r} cannot be put together ({kinds}: {first}). Give the config.json that "
            "belongs to these weights."
        ) from error
    back = {dtype: name for name, dtype in formats.items()}
    return {name: Computed(tuple(one.shape), back[one.dtype], name, carry_out) for name, one in shapes.items()}


def _with_prefix(
    plain: Mapping[str, Joined], state: Mapping[str, Any], base: str
) -> tuple[dict[str, Joined | Computed], list[str]]:
    """Return the stored tensors by the model's names, and the stored names that the model does not have.

    The names may differ by the prefix of the base model.
    """
    prefix = f"{base}."
    found: dict[str, Joined | Computed] = {}
    left: list[str] = []
    for name, one in plain.items():
        way = next((way for way in (name, prefix + name, name.removeprefix(prefix)) if way in state), None)
        if way is None:
            left.append(name)
        else:
            found[way] = one
    return found, left
