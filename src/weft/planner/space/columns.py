"""Plans as columns of numpy arrays, one row per plan, and the job that they are plans of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.config.decoder_shape import DecoderSpec
from weft.config.partitioning import CP_WAYS, choose_cp_mode, samples_per_microbatch
from weft.config.plan import AXES, PLAN_FIELDS, PLANNED_PRECISIONS, RESHARDS, Plan
from weft.config.plan_values import orders
from weft.config.wire_formats import COMPRESSES, GATHERS, WIRES, WireSpec, wire_spec
from weft.planner.space.shape import Shape, Stack, TracedShape
from weft.planner.space.trained_part import (
    AdapterSize,
    DocumentMix,
    FrozenWork,
    TrainedPart,
    attention_products,
    feed_forward_products,
    half_share,
)

if TYPE_CHECKING:
    from weft.config.sections import OptimizerGroup

#: What a code in `Columns.precision` stands for, the formats that the runtime does not have included.
PRECISIONS = PLANNED_PRECISIONS
_FP32, _FP8, _FP4, _TF32 = (PRECISIONS.index(name) for name in ("fp32", "fp8", "fp4", "tf32"))
#: What a code in `Columns.cp_mode` stands for: the ways of a plan's `cp_mode`, "auto" settled.
CP_MODES = CP_WAYS
#: What a code in `Columns.order` stands for: the axes from outermost to innermost, first the usual order.
ORDERS = orders(AXES)

#: Iterations of Muon's orthogonalisation.
_TURNS = 5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, whatever the plan: the model, the batch, the optimizer, and the software.

    seq_len: tokens of a sequence. global_batch: samples of one optimizer step. texts: sequences of a sample, such as
    the two answers of a pair. optimizer: "adamw", "sgd" or "muon". adapter: what is trained in place of all weights;
    None: these. trained: shares of the weights that are trained where groups have lr=0; None: all of them.
    half: share of the work of linear layers, experts apart, that stays in bf16 under precision=fp8.
    frozen: what a step computes without gradients; None: nothing. documents: what sequences are packed from; None: each
    sequence is one document.
    """

    shape: Shape
    seq_len: int
    global_batch: int
    optimizer: str = "adamw"
    stack: Stack = field(default_factory=Stack)
    adapter: AdapterSize | None = None
    texts: int = 1
    frozen: FrozenWork | None = None
    trained: TrainedPart | None = None
    documents: DocumentMix | None = None
    half: float = 0.0

    @property
    def turned(self) -> list[tuple[float, float, float]]:
        """(Rows, columns, how often in a mean layer) of the matrices that Muon orthogonalises.

        All between embedding and head but stacked experts. None for another optimizer.
        """
        if self.optimizer != "muon":
            return []
        shape = self.shape
        if self.adapter is not None:
            thin = self.adapter
            return [(float(thin.rank), thin.width / 2 / max(1.0, thin.products), 2 * thin.products)]
        if isinstance(shape, TracedShape):
            return [(float(rows), float(wide), count / shape.layers) for rows, wide, count in shape.traced.linears]
        parts = [(attention_products(shape), 1.0), (feed_forward_products(shape, shape.ffn), shape.dense_share)]
        parts += [(feed_forward_products(shape, shape.shared_ffn), shape.moe_share)]
        parts += [([(float(shape.hidden), float(shape.num_experts))], shape.moe_share)]  # the router
        return [(*size, often) for sizes, often in parts for size in sizes if often and min(size)]

    def with_groups(self, spec: DecoderSpec, groups: Sequence[OptimizerGroup]) -> Job:
        """Return the job with those of a decoder's weights frozen whose group of the optimizer has lr=0.

        spec: of the decoder, one of Weft's own.
        """
        return self if self.adapter is not None else replace(self, trained=TrainedPart.of(spec, groups))

    def with_half_layers(self, spec: DecoderSpec, words: Sequence[str]) -> Job:
        """Return the job with those of a decoder's layers in bf16 that `train.bf16_layers` names."""
        return replace(self, half=half_share(spec, words))

    @property
    def turning_products(self) -> list[tuple[float, float, float, float]]:
        """(m, n, k, how often in a mean layer) of the products with which Muon orthogonalises its matrices.

        Five iterations (optim/muon.py), each of three products: X X^T, its square, and that times X.
        """
        found: list[tuple[float, float, float, float]] = []
        for rows, wide, often in self.turned:
            short, long, times = min(rows, wide), max(rows, wide), often * _TURNS
            found += [(short, short, long, times), (short, short, short, times), (short, long, short, times)]
        return found

    def with_documents(self, text: str) -> Job:
        """Return the job with sequences packed from documents, as `DocumentMix.parse` takes them.

        Raises:
            ConfigError: for a text that says no lengths.
        """
        return replace(self, documents=DocumentMix.parse(text))

    @property
    def pieces(self) -> list[tuple[int, float]]:
        """(Tokens, share of all tokens) of what attention sees in one piece: documents, or whole sequences."""
        return [(self.seq_len, 1.0)] if self.documents is None else list(self.documents.pieces(self.seq_len))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.texts * self.seq_len

    def sequences(self, dp_size: Any, passes: Any) -> Any:
        """Return the sequences of one pass on one of `dp_size` ranks that read different samples: at least a sample's.

        Numbers or numpy arrays.
        """
        return np.maximum(1, samples_per_microbatch(self.global_batch, dp_size, passes)) * self.texts

    def settled(self, plan: Plan) -> Plan:
        """Return the plan with its way of context parallelism said where it has any, and not said where it has none."""
        mode = self.cp_mode_of(plan.cp_mode, plan.cp, plan.tp)
        return plan if plan.cp_mode == mode else plan.replace(cp_mode=mode)

    def cp_mode_of(self, mode: str, cp: int, tp: int) -> str:
        """Return a plan's way of context parallelism, settled so.

        Args:
            mode: the plan's `cp_mode`.
            cp: ranks that share a sequence.
            tp: ranks that share the heads.
        """
        if cp == 1:
            return PLAN_FIELDS["cp_mode"].default
        shape = self.shape  # "auto" as the runtime settles it
        return choose_cp_mode(mode, cp, shape.heads, shape.kv_heads, self.seq_len, tp)


#: What is not named where columns are made: what a plan has by default, but bf16, as nearly all published runs have.
_STARTS = {"precision": "bf16"}
#: Columns that follow from several fields and the job: their types, and what they are by default.
_DERIVED = {"microbatch": ("int64", 1), "num_micro": ("int64", 1), "recompute_share": ("float64", 1.0)}
#: The arrays of `Columns`: their types, and what they are by default.
_DEFAULTS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        column.name: (column.dtype, start)
        for each in PLAN_FIELDS.values()
        for column, start in zip(each.columns, each.kind.encode(_STARTS.get(each.name, each.default)), strict=True)
    }
    | _DERIVED
)


class Columns:
    """One row per plan: an array for each number that fields of the plan are encoded to (`PlanField.columns`).

    Words are codes: positions in SCHEDULES, RECOMPUTES, PRECISIONS, REDUCES, RESHARDS, CP_MODES, ORDERS.
    Besides, microbatch: sequences of one pass on one data-parallel rank. num_micro: passes of one step.
    recompute_blocks: so many of a rank's layers have the policy `recompute` (0: all). recompute_share: which part of
    the layers that is, 0 to 1. activation_budget: bytes that saved activations may take on one rank (inf: no budget;
    below 1: share of what recompute=none keeps).
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> NDArray[Any]: ...

    def __init__(self, arrays: Mapping[str, NDArray[Any]]):
        vars(self).update(arrays)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"columns are not changed in place; with_arrays({name}=...) makes others")

    def with_arrays(self, **changes: NDArray[Any]) -> Columns:
        """Return the same rows with some arrays in place of others."""
        return Columns.make(len(self), **{**vars(self), **changes})

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, rows: NDArray[np.bool_] | Ints | slice) -> Columns:
        """The rows of a mask, of indices or of a slice. What is one number for all rows stays one in memory."""
        if isinstance(rows, slice) or not len(self):
            return Columns({name: array[rows] for name, array in vars(self).items()})
        count = int(np.count_nonzero(rows)) if rows.dtype.kind == "b" else len(rows)
        return Columns({
            name: np.broadcast_to(array[0], count) if array.strides == (0,) else array[rows]
            for name, array in vars(self).items()
        })  # fmt: skip

    @property
    def world_size(self) -> Ints:
        """Ranks of each plan."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> Ints:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def in_fp32(self) -> NDArray[np.bool_]:
        """Rows whose weights and activations are fp32, whatever their products are rounded to."""
        return (self.precision == _FP32) | (self.precision == _TF32)

    @property
    def narrow(self) -> NDArray[np.bool_]:
        """Rows with products of linear layers in fp8 or narrower."""
        return (self.precision == _FP8) | (self.precision == _FP4)

    @property
    def reduces_once(self) -> NDArray[np.bool_]:
        """Rows that with zero=3 gather and reduce once in a step. Under a pipeline one pass is the step."""
        lets_go = self.reshard == RESHARDS.index("after_forward")
        return (self.reshard == RESHARDS.index("after_step")) | ((self.pp > 1) & ~lets_go)

    def stride(self, axis: str) -> Ints:
        """Count the ranks from one neighbour on an axis to the next: the product of the axes inside of it."""
        usual = self._inside(ORDERS[0], axis, slice(None))
        if not self.order.any():
            return usual
        found = usual.copy()
        for code in np.flatnonzero(np.bincount(self.order)).tolist():
            rows = self.order == code
            found[rows] = self._inside(ORDERS[code], axis, rows)
        return found

    @property
    def tp_stride(self) -> Ints:
        """Ranks from one tp neighbour to the next."""
        return self.stride("tp")

    def _inside(self, order: tuple[str, ...], axis: str, rows: Any) -> Ints:
        found: Ints = np.ones_like(np.asarray(self.tp[rows]))
        for name in order[order.index(axis) + 1 :]:
            found = found * getattr(self, name)[rows]
        return found

    @classmethod
    def make(cls, num_rows: int, **values: object) -> Columns:
        """Return the columns with the given arrays or scalars; what is not named has the value of the default plan.

        Raises:
            TypeError: for a name that is no column.
        """
        filled: dict[str, NDArray[Any]] = {}
        for name, (dtype, start) in _DEFAULTS.items():
            array = np.asarray(values.pop(name, start), dtype=dtype)
            filled[name] = np.broadcast_to(array, (num_rows,)) if array.ndim == 0 else array
        if values:
            raise TypeError(f"no such columns: {', '.join(values)}")
        return cls(filled)

    @classmethod
    def of(cls, plans: Iterable[Plan], job: Job) -> Columns:
        """Return the columns of plans.

        A plan's microbatch is what the job's global batch leaves: at least one sample.
        """
        listed = [job.settled(plan) for plan in plans]
        return cls.of_values({name: [getattr(plan, name) for plan in listed] for name in PLAN_FIELDS}, job)

    @classmethod
    def of_values(cls, values: Mapping[str, Sequence[Any]], job: Job) -> Columns:
        """Return the columns of plans by the values of their fields, their ways of context parallelism settled.

        Args:
            values: of every field, one for each plan.
            job: model, sequence and batch.
        """
        found: dict[str, NDArray[Any]] = {}
        for name in PLAN_FIELDS:
            found |= encoded(name, values[name])
        sizes = zip(values["pp"], values["microbatches"], values["accumulation"], strict=True)
        passes = np.array([piped if pp > 1 else alone for pp, piped, alone in sizes], dtype=np.int64)
        found["num_micro"] = passes
        sequences = job.sequences(found["dp_replicate"] * found["dp_shard"], passes)
        found["microbatch"] = np.asarray(sequences, dtype=np.int64)
        return cls.make(len(passes), **found).with_recompute_share(job.shape.layers)

    def with_recompute_share(self, num_layers: int) -> Columns:
        """Fill in which share of the fullest rank's layers `recompute_blocks` are."""
        if not self.recompute_blocks.any():
            return self
        chunks = np.where(self.pp > 1, self.pp * self.virtual_stages, 1)
        fullest = self.virtual_stages * -(-num_layers // chunks)
        share = np.where(self.recompute_blocks > 0, self.recompute_blocks / np.maximum(1, fullest), 1.0)
        return self.with_arrays(recompute_share=np.minimum(1.0, share))

    @classmethod
    def concatenate(cls, parts: Iterable[Columns]) -> Columns:
        """Join the rows of several columns, one after another. What is one number for all rows stays one in memory."""
        tables = list(parts)
        if len(tables) == 1:
            return tables[0]
        return cls({name: _joined([getattr(table, name) for table in tables]) for name in _DEFAULTS})

    def plan(self, row: int) -> Plan:
        """Return one row as a plan.

        Raises:
            PlanError: where the runtime has no word for it (fp8).
        """
        return self[np.array([row])].plans()[0]

    def plans(self) -> list[Plan]:
        """Return every row as a plan.

        Raises:
            PlanError: where the runtime has no word for one (fp8).
        """
        fields: dict[str, list[Any]] = {}
        for name, known in PLAN_FIELDS.items():
            numbers = [getattr(self, column.name).tolist() for column in known.columns]
            if numbers:
                fields[name] = [_decoded(name, *each) for each in zip(*numbers, strict=True)]
        rows = zip(*fields.values(), strict=True)
        passes: list[int] = self.num_micro.tolist()
        return [_plan_of(dict(zip(fields, row, strict=True)), count) for row, count in zip(rows, passes, strict=True)]


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Some arrays one after another."""
    first = arrays[0][:1]
    if all(array.strides == (0,) and (array[:1] == first).all() for array in arrays):
        return np.broadcast_to(first[0], sum(map(len, arrays)))
    return np.concatenate(arrays)


@functools.lru_cache(maxsize=4096, typed=True)
def _decoded(name: str, *numbers: float) -> Any:
    """The value of a field from its columns, in its normal form; a ranking has thousands of plans of few values."""
    kind = PLAN_FIELDS[name].kind
    return kind.check(name, kind.decode(*numbers))


#: The values of the default plan, in the order of the fields.
_USUAL = {name: getattr(Plan(), name) for name in PLAN_FIELDS}
#: Fields that an open word leaves to the planner, as "auto" does.
_OPEN = {name: known for name, known in PLAN_FIELDS.items() if known.auto_value}


def _plan_of(values: dict[str, Any], num_micro: int) -> Plan:
    """The plan of a row's decoded values, which are changed."""
    sizes = {axis: values[axis] for axis in AXES}
    for name, known in _OPEN.items():
        if all(sizes[axis] == 1 for axis in known.needs):
            values[name] = known.default  # nothing is settled where there is nothing to choose
    values["microbatches" if sizes["pp"] > 1 else "accumulation"] = num_micro
    usual, found = (tuple(axis for axis in order if sizes[axis] > 1) for order in (AXES, values["order"]))
    values["order"] = () if found == usual else found
    return Plan.of_normal({**_USUAL, **values}.values())


def encoded(name: str, values: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """The arrays of one field's values, none where the estimates do not depend on it."""
    known = PLAN_FIELDS[name]
    codes = {value: known.kind.encode(value) for value in set(values)}  # many plans have few values
    numbers = [codes[value] for value in values]
    return {
        column.name: np.array([each[place] for each in numbers], dtype=column.dtype)
        for place, column in enumerate(known.columns)
    }


# What gradients and weights cost as the wires that `reduce`, `compress` and `gather` name: on the way, in memory.

Array = NDArray[np.float64]
#: The ways of gradients: to the ranks that divide them, and over dp_replicate.
Way = Literal["shard", "replicas"]
#: The code of sync=diloco in columns.
_DILOCO = PLAN_FIELDS["sync"].kind.encode("diloco:1")[0]


def wire_bytes(columns: Columns, numel: Array, own_bytes: Array | float, way: Way = "shard") -> Array:
    """Return bytes on the wire of so many gradients.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each where nothing is encoded.
        way: which one they go.
    """

    def of(wire: WireSpec) -> Array:
        return wire.num_bytes(numel, own_bytes)

    plain, encoded = _of_rows(columns, of), _of_outer(columns, of)
    return np.where(_is_outer(columns, way), encoded, plain)


def replica_bytes(columns: Columns, numel: Array, own_bytes: float) -> Array:
    """Return bytes on the wire over dp_replicate: of gradients, or of weights where replicas meet rarely.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each gradient where nothing is encoded; weights are masters, of 4 bytes.
    """
    encoded = _of_outer(columns, lambda wire: wire.num_bytes(numel, 4.0))
    weights = np.where(columns.compress > 0, encoded, numel * 4.0)
    return np.where(columns.sync > 0, weights, wire_bytes(columns, numel, own_bytes, "replicas"))


def separate_bytes(columns: Columns) -> Array:
    """Return bytes per master that lies beside the weight which differences bring to it, where both are fp32."""
    return np.where(columns.gather == GATHERS.index("diff4"), 4.0, 0.0)


def outer_bytes(columns: Columns) -> Array:
    """Return bytes per master that replicas keep which meet rarely: the anchor, and the momentum of an outer step.

    Where they meet in fragments, also what one of these was when it left, and what travels.
    """
    under_way = np.where(columns.sync_fragments > 0, 8.0 / np.maximum(1, columns.sync_fragments), 0.0)
    return np.where(columns.sync == 0, 0.0, np.where(columns.sync == _DILOCO, 8.0, 4.0) + under_way)


def weight_bytes(columns: Columns, numel: Array, own_bytes: Array | float, *, in_layers: bool = True) -> Array:
    """Return bytes on the wire of so many weights that are gathered, by the plans' `gather`.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each where nothing is encoded.
        in_layers: whether they are of linear layers in blocks, which alone travel in fp8.
    """
    found = numel * own_bytes
    for code in _codes(columns.gather):
        if code and (in_layers or GATHERS[code] != "fp8"):
            found = np.where(columns.gather == code, wire_spec(GATHERS[code]).num_bytes(numel), found)
    return found


def copy_bytes(columns: Columns, own_bytes: float) -> Array:
    """Bytes per gradient of the encoded copy beside what is on its way."""

    def of(wire: WireSpec) -> float:
        return wire.copy_bytes(own_bytes)

    outer = np.where(columns.compress > 0, _of_outer(columns, of), 0.0)
    return np.maximum(_of_rows(columns, of), outer)


def state_bytes(columns: Columns) -> Array:
    """Bytes per gradient of what ranks that send them carry from step to step, the last step's beside the next."""
    sends = columns.dp_replicate * columns.dp_shard * columns.cp > 1
    plain = np.where(sends, 2 * _of_rows(columns, lambda wire: wire.state_bytes), 0.0)
    # Over dp_replicate a rank sends its own part of the sums alone.
    divides = (columns.dp_replicate > 1) & (columns.zero > 0)
    part = np.where(divides, columns.dp_shard * columns.cp, 1)
    outer = 2 * _of_outer(columns, lambda wire: wire.state_bytes) / part
    return plain + np.where((columns.compress > 0) & sends, outer, 0.0)


def low_rank(columns: Columns) -> Array:
    """Return the rank of the matrices that `compress` sends in place of larger ones; 0 where it encodes by value."""
    return _of_outer(columns, lambda wire: np.full(len(columns), float(wire.rank)))


def _is_outer(columns: Columns, way: Way) -> NDArray[np.bool_]:
    """Rows whose `compress` is for this way."""
    return (columns.compress > 0) & ((columns.dp_replicate > 1) == (way == "replicas"))


def _codes(column: NDArray[Any]) -> list[int]:
    """The codes in a column. Nearly always it is one: then nothing is sorted."""
    if len(column) and (column == column[0]).all():
        return [int(column[0])]
    return np.flatnonzero(np.bincount(column)).tolist()


def _of_rows(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    """Each row's figure, by the wire of its plan."""
    found = np.zeros(len(columns))
    for code in _codes(columns.reduce):
        found = np.where(columns.reduce == code, of(wire_spec(WIRES[code])), found)
    return found


def _of_outer(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    """The same of `compress`; 0 where there is none."""
    found = np.zeros(len(columns))
    for code in _codes(columns.compress):
        if code:
            found = np.where(columns.compress == code, of(wire_spec(COMPRESSES[code])), found)
    return found
