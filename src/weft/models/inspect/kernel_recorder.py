"""Record the kernels of one forward and backward on the meta device.

Matmuls and attention are recorded with sizes, everything else as bytes read and written. Values that tensor parallelism
shards are followed from the outputs of column-parallel layers to the inputs of row-parallel layers, in forward and
backward.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Generator, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from weft.errors import ModelError
from weft.models.inspect.private_torch import GROUPED_MM, UNSAFE_VIEW, next_node_number, node_in_backward, number_of
from weft.private_torch import Function, TorchDispatchMode, storage_key, tree_leaves

aten = torch.ops.aten

#: Operations that move no data: they make views, or memory that is written later.
_FREE = {
    aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    UNSAFE_VIEW, aten.lift_fresh, aten.alias,
}  # fmt: skip
#: Operations that read as much of their first argument as they return, such as lookups in a small table.
_PICKING = {aten.embedding, aten.index, aten.gather, aten.index_select}
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)


def is_worth_saving(op: Any, made: float, read: float) -> bool:
    """Return True if selective recompute should save the result of a matmul instead of recomputing it.

    All results are saved except outputs of batched matmuls that are larger than their inputs: attention scores, which
    are expensive to save and cheap to recompute.

    Args:
        op: the operation, or its name without the overload.
        made: size of the result.
        read: size of its inputs, in the same unit.
    """
    return str(op) not in ("aten.bmm", "aten.baddbmm") or made <= read


@dataclass(slots=True)
class Row:
    """One kernel.

    Attributes:
        op: name of the operation.
        kind: "product" (matmul), "attention" or "pass" (any other kernel).
        part: index of its layer.
        backward: True if it runs in backward.
        dims: m, n, k and batch of a matmul; queries and keys of attention.
        cut: how tensor parallelism shards the kernel: "columns" or "rows" for a column- or row-parallel matmul,
            "inside" if its inputs are sharded, else "none".
        reads, writes: bytes by storage.
        fixed: (query heads, key-value heads, head dim, is_causal) of attention.
        grads: whether the left and the right operand of a matmul require a gradient.
    """

    op: str
    kind: str
    part: int
    backward: bool
    dims: tuple[float, ...] = ()
    cut: str = "none"
    reads: dict[int, int] = field(default_factory=dict[int, int])
    writes: dict[int, int] = field(default_factory=dict[int, int])
    fixed: tuple[Any, ...] = ()
    grads: tuple[bool, bool] = (True, True)

    @property
    def is_heavy(self) -> bool:
        """True if selective recompute saves the output."""
        if self.kind == "pass" or self.backward:
            return False
        return is_worth_saving(self.op, sum(self.writes.values()), sum(self.reads.values()))


@dataclass(slots=True)
class Saved:
    """One tensor saved for backward.

    place: number of rows recorded before its last save. in_attention: True if only attention saves it.
    """

    part: int
    num_bytes: int
    place: int
    in_attention: bool


class KernelRecorder(TorchDispatchMode):
    """Mode that records every kernel as a row. `part` is the current part of forward; None records nothing.

    styles: "columns", "rows" or "vocab" by storage of a weight.
    """

    def __init__(self, styles: Mapping[int, str]):
        mode: Any = super()  # its argument is untyped
        mode.__init__()
        self.styles = styles
        self.part: int | None = None
        self.rows: list[Row] = []
        self.saved: dict[int, Saved] = {}
        self.cut: set[int] = set()
        self.last_op = ""
        self._alive: list[torch.UntypedStorage] = []
        self._starts: list[int] = []  # first autograd node number of each part of forward, ascending
        self._parts: list[int | None] = []
        self._attending = False

    def enter(self, part: int | None) -> int | None:
        """Continue forward in another part, and return the previous one."""
        before, self.part = self.part, part
        self._starts.append(next_node_number())
        self._parts.append(part)
        return before

    def key(self, tensor: torch.Tensor) -> int:
        """Return an id of the tensor's storage. The storage is kept alive so that the id stays unique."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return storage_key(storage)

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Record rows, saved tensors and attention inside the context."""
        original = F.scaled_dot_product_attention

        def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
            del dropout_p, scale, enable_gqa
            self._attending = True
            try:
                return _Attention.apply(self, query, key, value, is_causal and attn_mask is None)
            finally:
                self._attending = False

        # multi_head_attention_forward finds the function by its name in the module. The mode intercepts all other
        # calls.
        F.scaled_dot_product_attention = attend
        try:
            with self, saved_tensors_hooks(self._keep, lambda tensor: tensor), _Calls(original, attend):
                yield
        finally:
            F.scaled_dot_product_attention = original

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.last_op = str(func)
        outputs = func(*args, **(kwargs or {}))
        node = node_in_backward()
        packet = func.overloadpacket
        if packet in _FREE or func.is_view:
            # Views and uninitialized memory are sharded if an input is.
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(self.key(each) in self.cut for each in inputs):
                self.cut |= {self.key(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
            return outputs
        part = self.part
        if node is not None:  # the part of forward that made the autograd node
            place = bisect.bisect_right(self._starts, number_of(node)) - 1
            part = self._parts[place] if place >= 0 else None
        row = Row(str(packet), "pass", -99 if part is None else part, node is not None)
        self._fill(row, packet, args, kwargs, outputs)
        if part is not None:
            self.rows.append(row)
        return outputs

    def attended(self, query: torch.Tensor, key: torch.Tensor, outputs: list[torch.Tensor], causal: bool) -> None:
        """Record one fused attention of forward."""
        if self.part is None:
            return
        heads, kv_heads, width = query.shape[-3], key.shape[-3], query.shape[-1]
        inside = self.key(query) in self.cut
        queries = query.numel() // (heads * width)
        row = Row("attention", "attention", self.part, False, (queries, key.shape[-2]), "inside" if inside else "none")
        row.fixed = (heads, kv_heads, width, causal)
        row.reads = {self.key(query): _num_bytes(query), self.key(key): _num_bytes(key)}
        row.writes = {self.key(each): _num_bytes(each) for each in outputs}
        self.cut |= row.writes.keys() if inside else set()
        self.rows.append(row)

    def _fill(self, row: Row, packet: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        row.writes = {self.key(each): _num_bytes(each) for each in made}
        picked = sum(row.writes.values()) if packet in _PICKING else None
        for place, each in enumerate(inputs):
            size = _num_bytes(each) if picked is None or place else picked
            row.reads[self.key(each)] = max(size, row.reads.get(self.key(each), 0))
        style = next((self.styles[key] for key in row.reads if key in self.styles), "")
        inside = any(key in self.cut for key in row.reads)
        if packet in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[packet])
            row.kind, row.grads = "product", (left.requires_grad, right.requires_grad)
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            row.dims = (m, n, k, left.shape[0] if left.dim() == 3 else 1)
        elif packet in _CONVOLUTIONS:
            row.kind = "product"
            if packet is aten.convolution:
                row.dims, row.grads = _convolution(args, made[0]), (args[0].requires_grad, args[1].requires_grad)
        elif packet is GROUPED_MM:
            row.kind, row.grads = "product", (args[0].requires_grad, args[1].requires_grad)
            row.dims = _grouped(args, made[0])
        elif packet in flop_registry:
            raise ModelError(
                f"{packet}: the tracer does not support this product. Plan from a size or a config.json, or let the "
                f"model use torch's plain matrix products and attention"
            )
        if row.kind == "product" and style in ("columns", "rows"):
            row.cut = style
            inside = (style == "columns") != row.backward  # the input gradient is reversed
        elif inside:
            row.cut = "inside"
        if inside:
            self.cut |= row.writes.keys()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.part is not None:
            key = self.key(tensor)
            known = self.saved.get(key)
            if known is None:
                size = tensor.untyped_storage().nbytes()
                self.saved[key] = Saved(self.part, size, len(self.rows), self._attending)
            else:
                known.place = len(self.rows) if known.part == self.part else known.place
                known.in_attention &= self._attending
        return tensor.detach()  # the tensor itself would form a reference cycle with its graph


class _Calls(TorchFunctionMode):
    """Replaces calls to fused attention with the recorded function. On the meta device torch would decompose them."""

    def __init__(self, original: Any, attend: Any):
        super().__init__()
        self._known, self._attend = (original, attend), attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._attend if func in self._known else func)(*args, **(kwargs or {}))


class _Attention(Function):
    """Attention that saves the same tensors as a fused kernel: queries, keys, values, output and log-sums of rows."""

    @staticmethod
    def forward(
        ctx: Any, recorder: KernelRecorder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        *outer, heads, rows, _ = query.shape
        # Fused kernels store the output as (rows, heads, width), so the next layer reads it without a copy.
        out = query.new_empty((*outer, rows, heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder.attended(query, key, [out, sums], causal)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = ctx.saved_tensors[:3]
        found = [torch.empty_like(each) for each in given]
        return None, *found, None


def _grouped(args: Any, output: torch.Tensor) -> tuple[float, ...]:
    """Return the sizes of a grouped matmul with equal numbers of rows per matrix, or zeros for its backward."""
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 3:
        return left.shape[0] / right.shape[0], output.shape[-1], left.shape[1], right.shape[0]
    return 0.0, 0.0, 0.0, 0.0


def _convolution(args: Any, output: torch.Tensor) -> tuple[float, ...]:
    """Return a convolution's sizes as a matmul: one row per position of each sample, one matmul per group."""
    weight, transposed, groups = args[1], args[6], args[8]
    if transposed:
        channels = args[0].shape[1]
        return args[0].numel() / channels, weight[0].numel(), channels / groups, groups
    channels = output.shape[1]
    return output.numel() / channels, channels / groups, weight[0].numel(), groups


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of one read of a tensor. Expanded elements are read once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


# Bytes that one layer moves and saves, computed from the recorded kernels, for each recompute policy, eager and
# compiled.

#: Bytes of a part in three groups: sharded by tp, read in full by a column-parallel layer, and the rest.
Bytes = tuple[float, float, float]


@dataclass(slots=True)
class PartOfRun:
    """One layer in one run.

    Attributes:
        inputs: bytes of input activations, by storage.
        outputs: storages of the outputs.
        count: number of identical layers.
        output_values: number of output values that require a gradient.
        params_cut, params_whole: number of parameters that tensor parallelism shards, and that it replicates.
    """

    path: str
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    outputs: set[int] = field(default_factory=set[int])
    count: int = 1
    output_values: int = 0
    params_cut: int = 0
    params_whole: int = 0


@dataclass(slots=True)
class Measured:
    """Measured values of one layer in one run.

    Attributes:
        heavy: matmuls and attention calls of forward, in order.
        moved: bytes that other kernels read and write, in forward and backward, eager and fused.
        saved: bytes saved for backward, by recompute policy.
        reduced: number of output values of row-parallel matmuls, which are all-reduced.
        kernels: number of kernels in forward, eager and fused.
    """

    heavy: list[Row]
    moved: dict[str, Bytes]
    saved: dict[str, Bytes]
    reduced: float
    kernels: tuple[int, int]


def makers_of(recorder: KernelRecorder, passed: Set[int]) -> dict[int, int]:
    """Return the part that created each storage in forward, except storages in `passed`, the layers' input activations.

    A tensor that one part creates and another saves, such as rotary tables, is counted once, for the part that created
    it.
    """
    found: dict[int, int] = {}
    for row in recorder.rows:
        if not row.backward:
            found |= dict.fromkeys(row.writes.keys() - found.keys() - passed, row.part)
    return found


class PartReader:
    """Computes the measured values of one part from its rows.

    ignored: storages of parameters, buffers and the model's inputs. makers: see `makers_of`.
    """

    def __init__(
        self, recorder: KernelRecorder, number: int, part: PartOfRun, ignored: set[int], makers: Mapping[int, int]
    ):
        self.recorder, self.part, self.ignored = recorder, part, ignored
        self.rows = [row for row in recorder.rows if row.part == number]
        self.forward = [row for row in self.rows if not row.backward]
        self.backward = [row for row in self.rows if row.backward]
        self.heavy = [row for row in self.forward if row.kind != "pass"]
        self.maker: dict[int, Row] = {}
        for row in self.forward:
            for key in row.writes:
                self.maker.setdefault(key, row)
        self.saved = {
            key: each
            for key, each in recorder.saved.items()
            if makers.get(key, each.part) == number and key not in ignored
        }
        self.operands = {key for row in self.heavy for key in row.reads}
        self.dropped = self._dropped()

    def measure(self) -> Measured:
        """Return all measured values."""
        saved = {
            "none": self.saved.keys(),
            "attention": [key for key, each in self.saved.items() if not each.in_attention or key in self.operands],
            "compiled": self.saved.keys() - self.dropped,
        }
        sizes = {key: each.num_bytes for key, each in self.saved.items()}
        # Inputs of column-parallel matmuls under sp are saved as the rank's own part, and gathered again in backward.
        none: frozenset[int] = frozenset()
        kept = {name: self._divided(((key, sizes[key]) for key in keys), none) for name, keys in saved.items()}
        kept["full"] = self._divided(self.part.inputs.items(), none)
        summed = {key for row in self.heavy if row.cut == "rows" for key in row.writes}  # saved before the all-reduce
        kept["selective"] = self._divided(self._selective().items(), summed)
        moved = {
            "moved_forward": self._moved(self.forward),
            "moved_backward": self._moved(self.backward),
            "fused_forward": self._fused(self.forward),
            "fused_backward": self._with_dropped(self._fused(self.backward)),
        }
        values = sum(row.dims[0] * row.dims[1] * row.dims[3] for row in self.heavy if row.cut == "rows")
        fused = len(self.heavy) + len(list(_chains(self.forward)))
        kernels = (len(self.forward), fused)
        return Measured(self.heavy, moved, kept, values, kernels)

    def _divided(self, items: Iterable[tuple[int, float]], gathered: Set[int]) -> Bytes:
        """Return the bytes that tp shards, bytes in full on every rank even under sp, and bytes that sp shards."""
        found = [0.0, 0.0, 0.0]
        for key, size in items:
            found[0 if key in self.recorder.cut else 1 if key in gathered else 2] += size
        return found[0], found[1], found[2]

    def _selective(self) -> dict[int, int]:
        """Return the tensors that selective recompute saves: layer inputs, and outputs of matmuls and attention."""
        last = max((each.place for each in self.saved.values()), default=0)
        kept = dict(self.part.inputs)
        for place, row in enumerate(self.recorder.rows):
            if row.part == self.rows[0].part and row.is_heavy and place < last and not row.backward:
                kept |= row.writes
        return kept

    def _dropped(self) -> set[int]:
        """Return saved tensors that compiled code recomputes from others, since element-wise chains are cheap."""
        kept: set[int] = set()
        dropped: set[int] = set()
        for key in self.saved:
            row = self.maker.get(key)
            again = row is not None and row.kind == "pass"
            if row is not None and again and all(self._at_hand(each, kept, 64) for each in row.reads if each != key):
                dropped.add(key)
            else:
                kept.add(key)
        return dropped

    def _at_hand(self, key: int, kept: set[int], depth: int) -> bool:
        if key in kept or key in self.ignored or key in self.part.inputs:
            return True
        row = self.maker.get(key)
        if row is None:
            return True  # made before the layer, or a constant
        if row.kind != "pass" or depth == 0:
            return False
        return all(self._at_hand(each, kept, depth - 1) for each in row.reads if each != key)

    def _moved(self, rows: Iterable[Row]) -> Bytes:
        found = [0.0, 0.0, 0.0]
        for row in rows:
            if row.kind == "pass":
                size = sum(row.reads.values()) + sum(row.writes.values())
                found[0 if row.cut == "inside" else 2] += size
        return found[0], found[1], found[2]

    def _fused(self, rows: list[Row]) -> Bytes:
        """Return the bytes moved if each chain of element-wise kernels is fused.

        A fused chain reads only its inputs and writes only its outputs.
        """
        found = [0.0, 0.0, 0.0]
        for chain in _chains(rows):
            members = {id(row) for row in chain}
            made = {key for row in chain for key in row.writes}
            read: dict[int, int] = {}
            for row in chain:
                for key, size in row.reads.items():
                    if key not in made:
                        read |= self._sources(key, size)
            outside = {key for row in self.rows if id(row) not in members for key in row.reads}
            used = {key for row in chain for key in row.reads}
            wanted = outside | self.part.outputs | (self.saved.keys() - self.dropped)
            written = {
                key: size
                for row in chain
                for key, size in row.writes.items()
                if key in wanted or (row.backward and key not in used)
            }
            size = sum(read.values()) + sum(written.values())
            found[0 if any(row.cut == "inside" for row in chain) else 2] += size
        return found[0], found[1], found[2]

    def _with_dropped(self, moved: Bytes) -> Bytes:
        """Return the bytes that backward moves, including recomputed inputs of matmuls that it writes again."""
        found = list(moved)
        for key in self.dropped & self.operands:
            found[0 if key in self.recorder.cut else 2] += self.saved[key].num_bytes
        return found[0], found[1], found[2]

    def _sources(self, key: int, size: int) -> Mapping[int, int]:
        """Return the tensors that compiled code reads instead of one that it does not save."""
        if key not in self.dropped:
            return {key: size}
        found: dict[int, int] = {}
        for each, part in self.maker[key].reads.items():
            if each != key:
                found |= self._sources(each, part)
        return found


def _chains(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Yield sequences of rows without a matmul or attention between them."""
    chain: list[Row] = []
    for row in rows:
        if row.kind == "pass":
            chain.append(row)
        elif chain:
            yield chain
            chain = []
    if chain:
        yield chain
