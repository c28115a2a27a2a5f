"""How FLOPs and bytes of a layer depend on the batch, the sequence and the layout.

Letters: B samples of a microbatch on a rank, S tokens of a sequence on a rank, t tensor-parallel ranks, c
context-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from weft.errors import ModelError


@dataclass(frozen=True, slots=True)
class Growth:
    """A polynomial in B and S: one + batch B + seq S + tokens B S + seq_square S^2 + square B S^2."""

    one: float = 0.0
    batch: float = 0.0
    seq: float = 0.0
    tokens: float = 0.0
    seq_square: float = 0.0
    square: float = 0.0

    def at(self, batch: Any, seq: Any) -> Any:
        """Return the value for a batch and a sequence length, which may be numbers or numpy arrays."""
        linear, square = self.seq + self.tokens * batch, self.seq_square + self.square * batch
        return self.one + self.batch * batch + (linear + square * seq) * seq

    def __add__(self, other: Growth) -> Growth:
        return Growth(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Growth)))

    def __mul__(self, factor: float) -> Growth:
        return Growth(*(getattr(self, each.name) * factor for each in fields(Growth)))


@dataclass(frozen=True, slots=True)
class Matmul:
    """`batch` matmuls of m x k and k x n matrices, or a convolution in this form.

    Attributes:
        cut: what tensor parallelism shards: "columns": n, "rows": k, "inside": the batch, "none": nothing.
        input_grad, weight_grad: True if backward computes the gradient of the left matrix, or of the right one.
    """

    m: Growth
    n: Growth
    k: Growth
    batch: Growth
    cut: str = "none"
    input_grad: bool = True
    weight_grad: bool = True

    def sizes(self, batch: Any, seq: Any, t: Any) -> tuple[Any, Any, Any, Any]:
        """Return m, n, k and the number of matmuls on one rank.

        Args:
            batch, seq, t: sequences, tokens per sequence on this rank, and tensor-parallel ranks of a sharded layer.
        """
        found = [each.at(batch, seq) for each in (self.m, self.n, self.k, self.batch)]
        place = {"columns": 1, "rows": 2, "inside": 3}.get(self.cut)
        if place is not None:
            found[place] = found[place] / t
        return found[0], found[1], found[2], found[3]

    def flops(self, batch: Any, seq: Any, t: Any) -> Any:
        """Return the FLOPs of forward on one rank.

        Args:
            batch, seq, t: as in `sizes`.
        """
        m, n, k, count = self.sizes(batch, seq, t)
        return 2.0 * m * n * k * count

    @property
    def num_backward(self) -> int:
        """Number of matmuls of this size in backward."""
        return self.input_grad + self.weight_grad


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """One fused attention call.

    Attributes:
        queries: total number, B S.
        keys: keys visible to each query.
        cut: True if tensor parallelism shards the heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    queries: Growth
    keys: Growth
    causal: bool = True
    cut: bool = False

    def flops(self, batch: Any, seq: Any, t: Any, c: Any) -> Any:
        """Return the FLOPs of forward on one rank. A causal mask halves them.

        Args:
            batch, seq, t: sequences, tokens of each on this rank, and tensor-parallel ranks.
            c: context-parallel ranks; keys come from the full sequence.
        """
        heads = self.heads / t if self.cut else self.heads
        rows = self.queries.at(batch, seq)
        return 4.0 * rows * self.keys.at(batch, seq * c) * heads * self.head_dim * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, slots=True)
class DividedBytes:
    """Bytes of a layer, grouped by what divides them on a rank.

    Attributes:
        cut: divided by t.
        gathered: full on every rank, even under sequence parallelism.
        whole: divided by t only under sequence parallelism.
    """

    cut: Growth = Growth()
    gathered: Growth = Growth()
    whole: Growth = Growth()

    def at(self, batch: Any, seq: Any, t: Any, between: Any) -> Any:
        """Return the bytes on one rank.

        Args:
            batch, seq, t: sequences, tokens per sequence, and the divisor of sharded tensors.
            between: divisor of activations outside tensor-parallel modules: t under sp, else 1.
        """
        return self.cut.at(batch, seq) / t + self.gathered.at(batch, seq) + self.whole.at(batch, seq) / between

    def __add__(self, other: DividedBytes) -> DividedBytes:
        return DividedBytes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(DividedBytes)))

    def __mul__(self, factor: float) -> DividedBytes:
        return DividedBytes(*(getattr(self, each.name) * factor for each in fields(DividedBytes)))


# Result of tracing a model: FLOPs, memory and parameters of each distinct layer, by batch, sequence and layout.

#: Header of a saved description, with its version.
FORMAT, VERSION = "weft-traced-model", 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """One distinct layer, or the modules before or after the layers. Bytes are for a half-precision format.

    Attributes:
        path: path of the first instance.
        count: number of identical layers.
        params_cut: number of parameters that tensor parallelism shards.
        params_whole: number of parameters with a full copy on every tp rank.
        moved_forward, moved_backward: bytes that kernels other than matmuls and attention read and write.
        fused_forward, fused_backward: the same with chains of kernels fused as by torch.compile.
        saved: bytes saved for backward by recompute policy: "none", "attention", "selective", "full", and "compiled"
            for "none" under torch.compile.
        reduced: values that tensor parallelism all-reduces in forward.
        kernels_forward: kernel launches in forward.
        fused_kernels: the same, compiled.
    """

    path: str
    count: int
    params_cut: int = 0
    params_whole: int = 0
    matmuls: tuple[Matmul, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    moved_forward: DividedBytes = field(default_factory=DividedBytes)
    moved_backward: DividedBytes = field(default_factory=DividedBytes)
    fused_forward: DividedBytes = field(default_factory=DividedBytes)
    fused_backward: DividedBytes = field(default_factory=DividedBytes)
    saved: tuple[tuple[str, DividedBytes], ...] = ()
    reduced: Growth = field(default_factory=Growth)
    kernels_forward: int = 0
    fused_kernels: int = 0

    @property
    def num_params(self) -> int:
        """Number of parameters of one instance."""
        return self.params_cut + self.params_whole

    def flops(self, batch: Any, seq: Any, *, tp: Any = 1, cp: Any = 1, backward: bool = False) -> Any:
        """Return the FLOPs of matmuls and attention on one rank, in forward or in backward.

        Args:
            batch, seq: sequences, and tokens of each full sequence, of which a rank has 1/cp.
            tp, cp, backward: ranks of tp and cp; True for the FLOPs of backward instead of forward.
        """
        part = seq / cp
        products = sum(each.flops(batch, part, tp) * (each.num_backward if backward else 1) for each in self.matmuls)
        scores = sum(each.flops(batch, part, tp, cp) * (2.5 if backward else 1.0) for each in self.attentions)
        return products + scores

    def saved_bytes(
        self, batch: Any, seq: Any, policy: str = "none", *, tp: Any = 1, cp: Any = 1, sp: bool = False
    ) -> Any:
        """Return the bytes that one microbatch saves for backward on one rank under a recompute policy.

        Args:
            batch, seq, policy: sequences, tokens of each full sequence, and the recompute policy.
            tp, cp, sp: ranks of tp and cp; True if tp also divides the other activations.
        """
        return dict(self.saved)[policy].at(batch, seq / cp, tp, tp if sp else 1)

    def moved_bytes(
        self, batch: Any, seq: Any, *, tp: Any = 1, cp: Any = 1, sp: bool = False, backward: bool = False
    ) -> Any:
        """Return the bytes that memory-bound kernels read and write on one rank, in forward or in backward.

        Args:
            batch, seq: sequences, and tokens of each full sequence.
            tp, cp, sp: ranks of tp and cp; True if tp also divides the other activations.
            backward: count backward instead of forward.
        """
        return (self.moved_backward if backward else self.moved_forward).at(batch, seq / cp, tp, tp if sp else 1)


@dataclass(frozen=True, slots=True)
class Limit:
    """The values of a plan field that a model supports, and the reason why it supports no others."""

    values: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A traced model.

    Attributes:
        layers: the distinct repeated layers.
        before, after: the modules before the first and after the last layer, without embedding table and head.
        vocab: entries of the head, or 0.
        tied: True if the head shares the embedding table.
        hidden: values passed from one layer to the next, per token, or per sample if the model has no sequences.
        reads_sequence: True if S has a meaning.
        max_seq_len: maximum sequence length.
        default_seq_len: sequence length of the example.
        limits: restrictions of plan fields for this model.
        linears: inputs, outputs and count of the linear layers that may have an adapter.
        crossings: tensors of `hidden` values per token that a pipeline stage sends to the next, averaged over all stage
            boundaries; an encoder's output is sent along with its decoder's states.
    """

    name: str
    layers: tuple[TracedLayer, ...]
    before: TracedLayer
    after: TracedLayer
    vocab: int
    tied: bool
    hidden: int
    reads_sequence: bool
    max_seq_len: int
    default_seq_len: int
    num_params: int
    limits: tuple[tuple[str, Limit], ...] = ()
    linears: tuple[tuple[int, int, int], ...] = ()
    crossings: float = 1.0

    @property
    def num_layers(self) -> int:
        """Number of layers, including identical ones."""
        return sum(layer.count for layer in self.layers)

    @property
    def attention(self) -> TracedAttention | None:
        """The first attention of the layers, or None."""
        return next((each for layer in self.layers for each in layer.attentions), None)

    def flops(self, batch: Any, seq: Any, *, causal: bool = True) -> Any:
        """Return the model FLOPs of forward and backward, including the head, without recomputation.

        Args:
            batch, seq: sequences, and tokens per sequence.
            causal: if False, count the full T x T matrix of causal attention.
        """
        total = 6.0 * batch * seq * self.vocab * self.hidden
        for layer in (self.before, *self.layers, self.after):
            products = sum(each.flops(batch, seq, 1) * (1 + each.num_backward) for each in layer.matmuls)
            scores = sum(
                3.0 * each.flops(batch, seq, 1, 1) * (2.0 if each.causal and not causal else 1.0)
                for each in layer.attentions
            )
            total = total + layer.count * (products + scores)
        return total

    def weight_flops(self, batch: Any, seq: Any) -> Any:
        """Return the FLOPs of weight gradients in backward, including the head. Batched matmuls are not counted."""
        total = 2.0 * batch * seq * self.vocab * self.hidden
        for layer in (self.before, *self.layers, self.after):
            total = total + layer.count * sum(
                each.flops(batch, seq, 1) * each.weight_grad for each in layer.matmuls if each.batch.one == 1
            )
        return total

    def save(self, path: Path) -> None:
        """Write the traced model as JSON, which `weft plan` reads without torch."""
        table = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_table(cls, source: str, table: Mapping[str, Any]) -> TracedModel:
        """Return the traced model that `save` wrote.

        Raises:
            ModelError: for a table of another version, or not of a saved model; the message names `source`.
        """
        if table.get("version") != VERSION:
            rule = f"version={table.get('version')} of a saved model; this Weft reads version {VERSION}"
            raise ModelError(f"model={source}: {rule}. Trace it again: weft plan package.module:function --save-model.")
        try:
            values = {name: table[name] for name in (each.name for each in fields(cls))}
            values["layers"] = tuple(_layer(each) for each in values["layers"])
            values |= {name: _layer(values[name]) for name in ("before", "after")}
            limits = ((name, Limit(tuple(each["values"]), each["reason"])) for name, each in values["limits"])
            values["limits"] = tuple(limits)
            values["linears"] = tuple((int(i), int(o), int(count)) for i, o, count in values["linears"])
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            rule = f"it is not a saved model ({type(error).__name__}: {error})"
            raise ModelError(f"model={source}: {rule}. Trace it again, or give a config.json.") from None


def _layer(table: Mapping[str, Any]) -> TracedLayer:
    values = dict(table)
    values["matmuls"] = tuple(_with_growths(Matmul, each) for each in values["matmuls"])
    values["attentions"] = tuple(_with_growths(TracedAttention, each) for each in values["attentions"])
    values["saved"] = tuple((name, _with_growths(DividedBytes, each)) for name, each in values["saved"])
    for name in ("moved_forward", "moved_backward", "fused_forward", "fused_backward"):
        values[name] = _with_growths(DividedBytes, values[name])
    values["reduced"] = Growth(**values["reduced"])
    return TracedLayer(**values)


def _with_growths(kind: Any, table: Mapping[str, Any]) -> Any:
    values = {
        name: Growth(**cast(dict[str, float], value)) if isinstance(value, dict) else value
        for name, value in table.items()
    }
    return kind(**values)
