"""Plans as columns of numpy arrays, with one row per plan, and the training job for which they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.config.fields.plan_text import MEASURED_SHARES
from weft.config.fields.plan_values import orders
from weft.config.fields.wire_formats import COMPRESSES, GATHERS, WIRES, WireSpec, wire_spec
from weft.config.partitioning import CP_WAYS, choose_cp_mode, largest_remainder, samples_per_microbatch
from weft.config.plan import AXES, PLAN_FIELDS, PLANNED_PRECISIONS, RESHARDS, Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.planner.space.shape import Shape, Stack, TracedShape
from weft.planner.space.trained_part import (
    AdapterSize,
    DocumentMix,
    FrozenWork,
    PrivateDraws,
    TrainedPart,
    attention_products,
    feed_forward_products,
    half_share,
)

if TYPE_CHECKING:
    from weft.config.sections import OptimizerGroup

#: Values of the codes in `Columns.precision`, including formats that the runtime does not support.
PRECISIONS = PLANNED_PRECISIONS
_FP32, _FP8, _FP4, _TF32 = (PRECISIONS.index(name) for name in ("fp32", "fp8", "fp4", "tf32"))
#: Values of the codes in `Columns.cp_mode`: the modes of a plan's `cp_mode`, after "auto" is resolved.
CP_MODES = CP_WAYS
#: Values of the codes in `Columns.order`: the axes from outermost to innermost. The first is the default order.
ORDERS = orders(AXES)

#: Iterations of Muon's orthogonalization.
_TURNS = 5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Training job, independent of the plan: model, batch, optimizer and software.

    Attributes:
        seq_len: tokens of a sequence.
        global_batch: samples of one optimizer step.
        optimizer: "adamw", "sgd" or "muon".
        adapter: adapter that is trained instead of all weights, or None.
        texts: sequences per sample, such as the two answers of a preference pair.
        frozen: forwards of a step without gradients, or None.
        trained: shares of the weights that are trained if some groups have lr=0; None if all are.
        documents: documents that are packed into sequences; None if each sequence is one document.
        private: draws of a private run, or None.
        half: share of the FLOPs of linear layers, except experts, that stays in bf16 under precision=fp8.
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
    private: PrivateDraws | None = None

    @property
    def turned(self) -> list[tuple[float, float, float]]:
        """(rows, columns, count per average layer) of the matrices that Muon orthogonalizes; [] for other optimizers.

        These are the adapter's matrices, or all matrices between embedding and head except stacked experts.
        """
        if self.optimizer != "muon":
            return []
        if self.adapter is not None:
            thin = self.adapter
            return [(float(thin.rank), thin.width / 2 / max(1.0, thin.products), 2 * thin.products)]
        return self.linears

    @property
    def linears(self) -> list[tuple[float, float, float]]:
        """(inputs, outputs, count per average layer) of the matrices between embedding and head, without experts."""
        shape = self.shape
        if isinstance(shape, TracedShape):
            return [(float(rows), float(wide), count / shape.layers) for rows, wide, count in shape.traced.linears]
        parts = [(attention_products(shape), 1.0), (feed_forward_products(shape, shape.ffn), shape.dense_share)]
        parts += [(feed_forward_products(shape, shape.shared_ffn), shape.moe_share)]
        parts += [([(float(shape.hidden), float(shape.num_experts))], shape.moe_share)]  # the router
        return [(*size, often) for sizes, often in parts for size in sizes if often and min(size)]

    def with_groups(self, spec: DecoderSpec, groups: Sequence[OptimizerGroup]) -> Job:
        """Return the job with weights of optimizer groups with lr=0 frozen. A job with an adapter is not changed."""
        return self if self.adapter is not None else replace(self, trained=TrainedPart.of(spec, groups))

    def with_half_layers(self, spec: DecoderSpec, words: Sequence[str]) -> Job:
        """Return the job with the linear layers in bf16 that `words`, the value of `train.bf16_layers`, names."""
        return replace(self, half=half_share(spec, words))

    @property
    def turning_products(self) -> list[tuple[float, float, float, float]]:
        """(m, n, k, count per average layer) of the matmuls with which Muon orthogonalizes its matrices.

        Five iterations (optim/muon.py) have three matmuls each: X X^T, its square, and the square times X.
        """
        found: list[tuple[float, float, float, float]] = []
        for rows, wide, often in self.turned:
            short, long, times = min(rows, wide), max(rows, wide), often * _TURNS
            found += [(short, short, long, times), (short, short, short, times), (short, long, short, times)]
        return found

    def with_documents(self, text: str) -> Job:
        """Return the job with sequences packed from documents, in the format of `DocumentMix.parse`.

        Raises:
            ConfigError: for a text without valid lengths.
        """
        return replace(self, documents=DocumentMix.parse(text))

    @property
    def segments(self) -> list[tuple[int, float]]:
        """(tokens, share of all tokens) of segments with separate attention: documents, or full sequences."""
        return [(self.seq_len, 1.0)] if self.documents is None else list(self.documents.segments(self.seq_len))

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.global_batch * self.texts * self.seq_len

    def sequences(self, dp_size: Any, passes: Any) -> Any:
        """Return the number of sequences of one microbatch on one of `dp_size` data-parallel ranks.

        A microbatch has at least one sample. `passes` is the number of microbatches per step. Accepts numbers or numpy
        arrays.
        """
        return np.maximum(1, samples_per_microbatch(self.global_batch, dp_size, passes)) * self.texts

    def settled(self, plan: Plan) -> Plan:
        """Return the plan with `cp_mode` resolved if it is "auto", or with the default `cp_mode` if cp is 1."""
        mode = self.cp_mode_of(plan.cp_mode, plan.cp, plan.tp)
        return plan if plan.cp_mode == mode else plan.replace(cp_mode=mode)

    def cp_mode_of(self, mode: str, cp: int, tp: int) -> str:
        """Return the mode of context parallelism, with "auto" resolved, or the default if `cp` is 1."""
        if cp == 1:
            return PLAN_FIELDS["cp_mode"].default
        shape = self.shape  # "auto" is resolved as in the runtime
        return choose_cp_mode(mode, cp, shape.heads, shape.kv_heads, self.seq_len, tp)


#: Defaults of columns without a given value: the plan's default, except bf16, which nearly all published runs use.
_STARTS = {"precision": "bf16"}
#: Columns that follow from several fields and the job: (dtype, default).
_DERIVED = {"microbatch": ("int64", 1), "num_micro": ("int64", 1), "recompute_share": ("float64", 1.0)}
#: The arrays of `Columns`: (dtype, default).
_DEFAULTS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        column.name: (column.dtype, start)
        for each in PLAN_FIELDS.values()
        for column, start in zip(each.columns, each.kind.encode(_STARTS.get(each.name, each.default)), strict=True)
    }
    | _DERIVED
)


class Columns:
    """Plans as numpy arrays with one entry per plan.

    There is one array for each number that encodes a plan field (`PlanField.columns`). Values that are names are stored
    as codes: indices in SCHEDULES, RECOMPUTES, PRECISIONS, REDUCES, RESHARDS, CP_MODES and ORDERS.

    Attributes:
        microbatch: sequences of one microbatch on one data-parallel rank; with shares the largest microbatch of the
            rank with the most samples.
        num_micro: number of microbatches of one step.
        recompute_blocks: number of a rank's layers with the policy `recompute` (0: all).
        recompute_share: share of the layers with the policy, 0 to 1.
        activation_budget: bytes of saved activations allowed on one rank (inf: no budget; below 1: share of the bytes
            with recompute=none).
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> NDArray[Any]: ...

    def __init__(self, arrays: Mapping[str, NDArray[Any]]):
        vars(self).update(arrays)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"columns are not changed in place; with_arrays({name}=...) makes others")

    def with_arrays(self, **changes: NDArray[Any]) -> Columns:
        """Return the same rows with some arrays replaced."""
        return Columns.make(len(self), **{**vars(self), **changes})

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, rows: NDArray[np.bool_] | Ints | slice) -> Columns:
        """Return the rows of a mask, of indices or of a slice. A column with one broadcast value is not expanded."""
        if isinstance(rows, slice) or not len(self):
            return Columns({name: array[rows] for name, array in vars(self).items()})
        count = int(np.count_nonzero(rows)) if rows.dtype.kind == "b" else len(rows)
        return Columns({
            name: np.broadcast_to(array[0], count) if array.strides == (0,) else array[rows]
            for name, array in vars(self).items()
        })  # fmt: skip

    @property
    def world_size(self) -> Ints:
        """Number of ranks of each plan."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> Ints:
        """Number of data-parallel ranks, which read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def in_fp32(self) -> NDArray[np.bool_]:
        """True for plans whose weights and activations are fp32, whatever the format of their matmuls."""
        return (self.precision == _FP32) | (self.precision == _TF32)

    @property
    def narrow(self) -> NDArray[np.bool_]:
        """True for plans with matmuls of linear layers in fp8 or narrower formats."""
        return (self.precision == _FP8) | (self.precision == _FP4)

    @property
    def reduces_once(self) -> NDArray[np.bool_]:
        """True for plans that with zero=3 gather parameters and reduce gradients only once per step.

        These are plans with reshard=after_step, and pipelines with another value than after_forward.
        """
        lets_go = self.reshard == RESHARDS.index("after_forward")
        return (self.reshard == RESHARDS.index("after_step")) | ((self.pp > 1) & ~lets_go)

    def stride(self, axis: str) -> Ints:
        """Return the distance in ranks between neighbors on an axis: the product of the sizes of the axes inside it."""
        usual = self._inside(ORDERS[0], axis, slice(None))
        if not self.order.any():
            return usual
        found = usual.copy()
        for code in np.flatnonzero(np.bincount(self.order)).tolist():
            rows = self.order == code
            found[rows] = self._inside(ORDERS[code], axis, rows)
        return found

    def _inside(self, order: tuple[str, ...], axis: str, rows: Any) -> Ints:
        found: Ints = np.ones_like(np.asarray(self.tp[rows]))
        for name in order[order.index(axis) + 1 :]:
            found = found * getattr(self, name)[rows]
        return found

    @classmethod
    def make(cls, num_rows: int, **values: object) -> Columns:
        """Return columns with the given arrays or scalars. Other columns have the value of the default plan.

        Raises:
            TypeError: for a name that is not a column.
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

        A plan's microbatch size follows from the job's global batch. It is at least one sample.
        """
        listed = [job.settled(plan) for plan in plans]
        return cls.of_values({name: [getattr(plan, name) for plan in listed] for name in PLAN_FIELDS}, job)

    @classmethod
    def of_values(cls, values: Mapping[str, Sequence[Any]], job: Job) -> Columns:
        """Return the columns of plans from the values of their fields, with `cp_mode` "auto" resolved."""
        found: dict[str, NDArray[Any]] = {}
        for name in PLAN_FIELDS:
            found |= encoded(name, values[name])
        sizes = zip(values["pp"], values["microbatches"], values["accumulation"], strict=True)
        passes = np.array([piped if pp > 1 else alone for pp, piped, alone in sizes], dtype=np.int64)
        found["num_micro"] = passes
        sequences = job.sequences(found["dp_replicate"] * found["dp_shard"], passes)
        found["microbatch"] = np.asarray(sequences, dtype=np.int64)
        return cls.make(len(passes), **found).with_recompute_share(job.shape.layers).with_largest_share(job)

    def largest_samples(self, job: Job) -> Ints:
        """Return the samples of a step on the data-parallel rank that has the most. Shares "auto" count as equal."""
        found = -(-job.global_batch // self.dp)
        for code in _codes(self.shares):
            if (weights := PLAN_FIELDS["shares"].kind.decode(code)) and weights != MEASURED_SHARES:
                most = max(largest_remainder(job.global_batch, weights))
                found = np.where(self.shares == code, most, found)
        return found

    def with_largest_share(self, job: Job) -> Columns:
        """Return the columns with the largest microbatch of the rank with the most samples, for plans with shares."""
        if not self.shares.any():
            return self
        most = -(-self.largest_samples(job) // self.num_micro) * job.texts
        return self.with_arrays(microbatch=np.where(self.shares > 0, most, self.microbatch))

    def with_average_microbatch(self, job: Job) -> Columns:
        """Return the columns with the average microbatch of the rank with the most samples, which decides its time.

        Only plans with shares change. Without shares, all microbatches have the same size.
        """
        if not self.shares.any():
            return self
        average = self.largest_samples(job) * job.texts / self.num_micro
        return Columns(vars(self) | {"microbatch": np.where(self.shares > 0, average, self.microbatch)})

    @property
    def largest_shard(self) -> Floats:
        """The largest part of the states that dp_shard divides, over that of equal parts: 1 without `shard_shares`.

        It is also the padded bytes of a collective over the bytes of equal parts.
        """
        found = np.ones(len(self))
        for code in _codes(self.shard_shares):
            if weights := PLAN_FIELDS["shard_shares"].kind.decode(code):
                found = np.where(self.shard_shares == code, len(weights) * max(weights) / sum(weights), found)
        return found

    def with_recompute_share(self, num_layers: int) -> Columns:
        """Return the columns with `recompute_share`: `recompute_blocks` divided by the layers of the fullest rank."""
        if not self.recompute_blocks.any():
            return self
        chunks = np.where(self.pp > 1, self.pp * self.virtual_stages, 1)
        fullest = self.virtual_stages * -(-num_layers // chunks)
        share = np.where(self.recompute_blocks > 0, self.recompute_blocks / np.maximum(1, fullest), 1.0)
        return self.with_arrays(recompute_share=np.minimum(1.0, share))

    @classmethod
    def concatenate(cls, parts: Iterable[Columns]) -> Columns:
        """Return the rows of several tables in order. A column with the same broadcast value in all is not expanded."""
        tables = list(parts)
        if len(tables) == 1:
            return tables[0]
        found: dict[str, NDArray[Any]] = {}
        for name in _DEFAULTS:
            arrays: list[NDArray[Any]] = [getattr(table, name) for table in tables]
            first = arrays[0][:1]
            is_one = all(array.strides == (0,) and (array[:1] == first).all() for array in arrays)
            found[name] = np.broadcast_to(first[0], sum(map(len, arrays))) if is_one else np.concatenate(arrays)
        return cls(found)

    def plan(self, row: int) -> Plan:
        """Return one row as a plan.

        Raises:
            PlanError: if the runtime does not support a value (fp4).
        """
        return self[np.array([row])].plans()[0]

    def plans(self) -> list[Plan]:
        """Return every row as a plan.

        Raises:
            PlanError: if the runtime does not support a value of any plan (fp4).
        """
        fields: dict[str, list[Any]] = {}
        for name, known in PLAN_FIELDS.items():
            numbers = [getattr(self, column.name).tolist() for column in known.columns]
            if numbers:
                fields[name] = [_decoded(name, *each) for each in zip(*numbers, strict=True)]
        rows = zip(*fields.values(), strict=True)
        passes: list[int] = self.num_micro.tolist()
        return [_plan_of(dict(zip(fields, row, strict=True)), count) for row, count in zip(rows, passes, strict=True)]


@functools.lru_cache(maxsize=4096, typed=True)
def _decoded(name: str, *numbers: float) -> Any:
    """Return the normalized value of a field from its columns.

    Cached, because thousands of plans have few distinct values.
    """
    kind = PLAN_FIELDS[name].kind
    return kind.check(name, kind.decode(*numbers))


#: The values of the default plan, in the order of the fields.
_USUAL = {name: getattr(Plan(), name) for name in PLAN_FIELDS}
#: Fields with a value, such as "auto", that leaves the choice to the planner.
_OPEN = {name: known for name, known in PLAN_FIELDS.items() if known.auto_value}


def _plan_of(values: dict[str, Any], num_micro: int) -> Plan:
    """Return the plan of a row's decoded values. Modifies `values`."""
    sizes = {axis: values[axis] for axis in AXES}
    for name, known in _OPEN.items():
        if all(sizes[axis] == 1 for axis in known.needs):
            values[name] = known.default  # the only value
    values["microbatches" if sizes["pp"] > 1 else "accumulation"] = num_micro
    usual, found = (tuple(axis for axis in order if sizes[axis] > 1) for order in (AXES, values["order"]))
    values["order"] = () if found == usual else found
    return Plan.of_normal({**_USUAL, **values}.values())


def encoded(name: str, values: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays that encode the values of one field; empty if the estimates do not depend on it."""
    known = PLAN_FIELDS[name]
    codes = {value: known.kind.encode(value) for value in set(values)}  # many plans have few values
    numbers = [codes[value] for value in values]
    return {
        column.name: np.array([each[place] for each in numbers], dtype=column.dtype)
        for place, column in enumerate(known.columns)
    }


# Bytes of gradients and weights in the wire formats of `reduce`, `compress` and `gather`: communicated, and in memory.

Array = NDArray[np.float64]
#: Kind of gradient reduction: to the ranks that shard them, or over dp_replicate.
Way = Literal["shard", "replicas"]
#: The code of sync=diloco in the columns.
_DILOCO = PLAN_FIELDS["sync"].kind.encode("diloco:1")[0]


def wire_bytes(columns: Columns, numel: Array, own_bytes: Array | float, way: Way = "shard") -> Array:
    """Return the communicated bytes of gradients.

    If `compress` is set, it is the format of the reduction over dp_replicate, or of the other one if there are no
    replicas. Otherwise the format is `reduce`.

    Args:
        numel: number of gradients.
        own_bytes: bytes of a gradient that is not encoded.
        way: reduction to the ranks that shard gradients, or over dp_replicate.
    """

    def of(wire: WireSpec) -> Array:
        return wire.num_bytes(numel, own_bytes)

    plain, encoded = _of_rows(columns, of), _of_outer(columns, of)
    is_outer = (columns.compress > 0) & ((columns.dp_replicate > 1) == (way == "replicas"))
    return np.where(is_outer, encoded, plain)


def replica_bytes(columns: Columns, numel: Array, own_bytes: float) -> Array:
    """Return the bytes communicated over dp_replicate: of gradients, or of weights under local SGD.

    Args:
        own_bytes: bytes of a gradient that is not encoded. Weights are fp32 master weights with 4 bytes.
    """
    encoded = _of_outer(columns, lambda wire: wire.num_bytes(numel, 4.0))
    weights = np.where(columns.compress > 0, encoded, numel * 4.0)
    return np.where(columns.sync > 0, weights, wire_bytes(columns, numel, own_bytes, "replicas"))


def separate_bytes(columns: Columns) -> Array:
    """Return the bytes per parameter of separate fp32 masters, which exist if weights are gathered as differences."""
    return np.where(columns.gather == GATHERS.index("diff4"), 4.0, 0.0)


def outer_bytes(columns: Columns) -> Array:
    """Return the bytes per master weight of local SGD state: the anchor, and with DiLoCo the outer step's momentum.

    They are 0 without local SGD. With fragments, they include the copy of one fragment that is being sent, and its
    communication buffer.
    """
    under_way = np.where(columns.sync_fragments > 0, 8.0 / np.maximum(1, columns.sync_fragments), 0.0)
    return np.where(columns.sync == 0, 0.0, np.where(columns.sync == _DILOCO, 8.0, 4.0) + under_way)


def weight_bytes(columns: Columns, numel: Array, own_bytes: Array | float, *, in_layers: bool = True) -> Array:
    """Return the communicated bytes of gathered weights, by the plans' `gather`.

    Args:
        in_layers: True for weights of linear layers in blocks. Only they are communicated in fp8.
    """
    found = numel * own_bytes
    for code in _codes(columns.gather):
        if code and (in_layers or GATHERS[code] != "fp8"):
            found = np.where(columns.gather == code, wire_spec(GATHERS[code]).num_bytes(numel), found)
    return found


def copy_bytes(columns: Columns, own_bytes: float) -> Array:
    """Return the bytes per gradient of the encoded copy, which exists in addition to the communicated gradients."""

    def of(wire: WireSpec) -> float:
        return wire.copy_bytes(own_bytes)

    outer = np.where(columns.compress > 0, _of_outer(columns, of), 0.0)
    return np.maximum(_of_rows(columns, of), outer)


def state_bytes(columns: Columns) -> Array:
    """Return the bytes per gradient of compression state that senders keep from step to step."""
    sends = columns.dp_replicate * columns.dp_shard * columns.cp > 1
    plain = np.where(sends, 2 * _of_rows(columns, lambda wire: wire.state_bytes), 0.0)
    # Over dp_replicate a rank sends only its own shard of the reduced gradients.
    divides = (columns.dp_replicate > 1) & (columns.zero > 0)
    part = np.where(divides, columns.dp_shard * columns.cp, 1)
    outer = 2 * _of_outer(columns, lambda wire: wire.state_bytes) / part
    return plain + np.where((columns.compress > 0) & sends, outer, 0.0)


def low_rank(columns: Columns) -> Array:
    """Return the rank of the low-rank matrices that `compress` sends; 0 if values are encoded one by one."""
    return _of_outer(columns, lambda wire: np.full(len(columns), float(wire.rank)))


def _codes(column: NDArray[Any]) -> list[int]:
    if len(column) and (column == column[0]).all():
        return [int(column[0])]
    return np.flatnonzero(np.bincount(column)).tolist()


def _of_rows(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    return _by_format(columns.reduce, WIRES, of)


def _of_outer(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    return _by_format(columns.compress, COMPRESSES, of, none=0)


def _by_format(
    column: NDArray[Any], names: Sequence[str], of: Callable[[WireSpec], Array | float], none: int | None = None
) -> Array:  # fmt: skip
    found = np.zeros(len(column))
    for code in _codes(column):
        if code != none:
            found = np.where(column == code, of(wire_spec(names[code])), found)
    return found
