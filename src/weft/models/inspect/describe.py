"""Parameter counts of any nn.Module by repeated blocks, and a description of its cost from runs on the meta device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import LayerSpec, ModelSpec
from weft.config.shapes.traced_model import DividedBytes, Growth, Matmul, TracedAttention, TracedLayer, TracedModel
from weft.errors import ModelError
from weft.models.inspect.blocks import CONTAINERS, Site, has_params, join_path, outermost
from weft.models.inspect.dry_run import is_named
from weft.models.inspect.kernel_recorder import KernelRecorder, Measured, PartOfRun, PartReader, Row, makers_of
from weft.models.inspect.layers import stored_weight
from weft.private_torch import Function, named_modules, storage_key, tree_flatten, tree_leaves, tree_unflatten

#: Identity of a block: its class, and name, shape and dtype of each parameter.
Kind = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]


def describe(module: nn.Module) -> ModelSpec:
    """Count a module's parameters; it may be on the meta device.

    Identical children of one container become one LayerSpec with a count: "blocks.*" if all children are identical,
    else "blocks.{0-3,5}". A weight that several modules share is counted in the first one.

    Raises:
        ModelError: if a parameter has no shape yet.
    """
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            rule = "a lazy module has no shape yet. Run the model once before describing it."
            raise ModelError(f"parameter {path}: {rule}")
    spec = getattr(module, "spec", None)
    return ModelSpec(
        name=type(module).__name__, layers=tuple(_layers(module)), shape=spec if isinstance(spec, DecoderSpec) else None
    )


def _layers(model: nn.Module) -> Iterator[LayerSpec]:
    """Yield one LayerSpec for each group of identical parts, in the order in which groups first appear."""
    sites = _parts(model)
    owners = {inner: site for site in reversed(sites) for inner in site.module.modules()}
    counts: Counter[str] = Counter()  # a part that shares weights with an earlier one has fewer parameters of its own
    for path, parameter in model.named_parameters():
        site = owners.get(model.get_submodule(path.rpartition(".")[0]))
        counts[site.path if site else path] += parameter.numel()
    listed = {site.path: site for site in sites if isinstance(site.parent, CONTAINERS)}
    groups: dict[object, list[str]] = {}
    for path, num_params in counts.items():
        kind = (listed[path].parent, _kind(listed[path].module)) if path in listed else path
        groups.setdefault((kind, num_params), []).append(path)
    for paths in groups.values():
        site, num_params = listed.get(paths[0]), counts[paths[0]]
        if num_params:
            yield LayerSpec(_group_path(site, paths) if site else paths[0], num_params, len(paths))


def _parts(model: nn.Module) -> list[Site]:
    """Return the outermost modules that are repeated in their container or contain no repeated modules."""
    kinds: dict[nn.Module, Counter[Kind]] = {
        part: Counter(map(_kind, _entries(part))) for part in model.modules() if isinstance(part, CONTAINERS)
    }
    # A ModuleList contains blocks even if it has only one entry.
    repeats = {
        part for part, found in kinds.items() if any(n > 1 or isinstance(part, nn.ModuleList) for n in found.values())
    }

    def is_part(site: Site) -> bool:
        alike = kinds[site.parent][_kind(site.module)] if site.parent in kinds else 1
        return alike > 1 or repeats.isdisjoint(site.module.modules())

    return outermost(model, is_part)


def _entries(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if has_params(child)]


def _kind(module: nn.Module) -> Kind:
    return type(module), tuple((name, tuple(value.shape), value.dtype) for name, value in module.named_parameters())


def _group_path(site: Site, paths: list[str]) -> str:
    """Return the displayed path of equal entries of a container: "blocks.*", "blocks.4" or "blocks.{0-3,5}".

    site: site of the first entry.
    """
    holder = site.path.rpartition(".")[0]
    if len(paths) == len(_entries(site.parent)):
        return join_path(holder, "*")
    if len(paths) == 1:
        return site.path
    return join_path(holder, "{" + ",".join(_runs([path.rpartition(".")[2] for path in paths])) + "}")


def _runs(names: list[str]) -> Iterator[str]:
    """Yield the names, with consecutive numbers as ranges: 0-2 5 for 0 1 2 5. Other names are unchanged."""
    if not all(name.isdigit() for name in names):
        yield from names
        return
    for _, run in groupby(enumerate(names), key=lambda item: int(item[1]) - item[0]):
        numbers = [name for _, name in run]
        yield numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


# Tracking of the part of the model that runs at each moment of a trace. A repeated layer is replaced by a stub.


class Layers:
    """The parts of the model in one traced run.

    Attributes:
        blocks: the repeated layers by path.
        ends: modules at whose call recording stops.
        parts: parts by index. Layers count from 0, and the caller chooses the indices of `before` and `after`.
        current: path of the layer that is traced.
    """

    def __init__(
        self,
        recorder: KernelRecorder,
        blocks: Mapping[str, nn.Module],
        ends: Sequence[nn.Module],
        before: int,
        after: int,
    ):
        self.recorder, self.blocks, self.ends, self._after = recorder, blocks, ends, after
        self.parts: dict[int, PartOfRun] = {before: PartOfRun("before"), after: PartOfRun("after")}
        self.current = ""
        self._known: dict[Any, tuple[int, Any]] = {}
        self._ended = False

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Trace the layers that run inside the context. A layer that is identical to a traced one is not run again."""
        own = {path: vars(block).get("forward") for path, block in self.blocks.items()}
        numbers = _own_numbers(self.blocks)
        for path, block in self.blocks.items():
            block.forward = self._forward(path, block.forward, _signature(block, numbers))
        handles = [end.register_forward_pre_hook(self._end) for end in self.ends]
        try:
            yield
        finally:
            for path, block in self.blocks.items():
                del block.forward  # restores the class's forward
                before = own[path]
                if before is not None:
                    block.forward = before
            for handle in handles:
                handle.remove()

    def _end(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._ended = True
        self.recorder.enter(None)

    def _forward(self, path: str, forward: Callable[..., Any], signature: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._ended:
                return forward(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            key = (signature, tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors))
            if key in self._known:
                number, outputs = self._known[key]
                self.parts[number].count += 1
                return self._stand_in(tensors, outputs)
            return self._traced(path, key, tensors, lambda: forward(*args, **kwargs))

        return run

    def _traced(self, path: str, key: Any, tensors: list[torch.Tensor], forward: Callable[[], Any]) -> Any:
        number = sum(each >= 0 for each in self.parts)
        part = self.parts[number] = PartOfRun(path)
        part.inputs = {
            self.recorder.key(each): each.untyped_storage().nbytes() for each in tensors if each.requires_grad
        }
        self.current = path
        self.recorder.enter(number)
        outputs = forward()
        self.recorder.enter(self._after)
        self.current = ""
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        part.outputs = {self.recorder.key(each) for each in made}
        part.output_values = sum(each.numel() for each in made)
        self._known[key] = number, outputs
        return outputs

    def _stand_in(self, tensors: list[torch.Tensor], outputs: Any) -> Any:
        """Return tensors with the shapes of the traced layer's outputs.

        Gradients reach the inputs without recorded cost.
        """
        self.recorder.enter(None)
        leaves, tree = tree_flatten(outputs)
        inputs = [each for each in tensors if each.requires_grad]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if inputs and places:
            made = _StandIn.apply([leaves[place] for place in places], *inputs)
            for place, each in zip(places, made, strict=True):
                leaves[place] = each
        self.recorder.enter(self._after)
        return tree_unflatten(leaves, tree)


class _StandIn(Function):
    @staticmethod
    def forward(ctx: Any, like: list[torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shapes = inputs
        return tuple(torch.empty_like(each) for each in like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(torch.empty_like(each) for each in ctx.shapes)


def _own_numbers(blocks: Mapping[str, nn.Module]) -> set[tuple[str, str]]:
    """Return the attributes that contain the layer's index in every layer: (path of the module in the layer, name)."""
    found: set[tuple[str, str]] | None = None
    for path, block in blocks.items():
        place = path.rpartition(".")[2]
        here = {
            (inner, name)
            for inner, module in named_modules(block)
            for name, value in vars(module).items()
            if type(value) is int and str(value) == place
        }
        found = here if found is None else found & here
    return found or set()


def _signature(block: nn.Module, ignored: set[tuple[str, str]]) -> Any:
    """Return the identity of a layer: classes, parameters, and attributes except the ignored ones."""
    return tuple((path, type(module), _parameters(module), _settings(path, module, ignored))
                 for path, module in named_modules(block))  # fmt: skip


def _parameters(module: nn.Module) -> Any:
    named = module.named_parameters(recurse=False)
    return tuple((name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in named)


def _settings(path: str, module: nn.Module, ignored: set[tuple[str, str]]) -> Any:
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str))
    return tuple((name, value) for name, value in plain if (path, name) not in ignored)


# Description of any module from runs on the meta device with several batch sizes and sequence lengths, to which
# polynomials are fitted.

#: Batch and sequence sizes of the runs, with sequences (in units of the step) and without. The last run checks the fit.
_POINTS = ((2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4))
_BATCHES = ((2, 1), (3, 1), (4, 1))
#: Indices of the parts that are not repeated layers.
BEFORE, AFTER = -1, -2
#: Maximum relative deviation in the check of the fit.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Properties of a model's modules that are needed before tracing.

    Attributes:
        blocks: the repeated layers by path; if empty, the model is one layer.
        styles: "columns", "rows" or "vocab" by module path, as tensor parallelism would shard them.
        head: the output layer of a language model.
        table: the embedding of token ids.
    """

    blocks: Mapping[str, nn.Module]
    styles: Mapping[str, str] = field(default_factory=dict[str, str])
    head: nn.Module | None = None
    table: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    parts: dict[int, PartOfRun]
    measured: dict[int, Measured]


def trace_model(
    model: nn.Module, outline: Outline, call: Callable[[nn.Module, int, int], Any], *, seq_step: int = 0
) -> TracedModel:
    """Describe the cost of a model, from runs on the meta device with several batch sizes and sequence lengths.

    Args:
        model: a model on the meta device.
        outline: its blocks, head, and the modules that tensor parallelism shards.
        call: call(model, batch, seq) runs the model on `batch` samples of `seq` tokens.
        seq_step: shortest sequence to try, in tokens; 0: the model reads no sequence.

    Raises:
        ModelError: if it does not run on the meta device, or its cost is not a polynomial in batch and sequence.
    """
    points = [(batch, seq * seq_step) for batch, seq in _POINTS] if seq_step else list(_BATCHES)
    weights = _weights(model)
    runs = [_run(model, outline, weights, lambda b=b, s=s: call(model, b, s)) for b, s in points]
    fit = _Fit([(b, s if seq_step else 1) for b, s in points], bool(seq_step))
    layers = {number: _layer(fit, [(run.parts[number], run.measured[number]) for run in runs])
              for number in _same_parts(runs)}  # fmt: skip
    repeated = tuple(layer for number, layer in layers.items() if number >= 0)
    head, table = (_weight_of(each) for each in (outline.head, outline.table))
    return TracedModel(
        name=type(model).__name__,
        layers=repeated,
        before=layers.get(BEFORE, TracedLayer(path="before", count=1)),
        after=layers.get(AFTER, TracedLayer(path="after", count=1)),
        vocab=0 if head is None else head.shape[0],
        tied=head is not None and table is head,
        hidden=_width(fit, runs, bool(seq_step)) if head is None else head.shape[1],
        reads_sequence=bool(seq_step),
        max_seq_len=2**20 if seq_step else 1,
        default_seq_len=0 if seq_step else 1,
        num_params=sum(param.numel() for param in model.parameters()),
    )


def _width(fit: _Fit, runs: Sequence[_Run], reads_sequence: bool) -> int:
    """Return the number of values per token, or per sample, of the first layer whose output size depends on these.

    Layers with a constant output size are skipped, because an image encoder may be first.
    """
    found = [fit.growth([run.parts[number].output_values for run in runs]) for number in runs[0].parts if number >= 0]
    widths = [round(growth.tokens if reads_sequence else growth.batch) for growth in found]
    return next((each for each in widths if each > 0), 1)


def _weights(model: nn.Module) -> set[int]:
    return {storage_key(each.untyped_storage()) for each in (*model.parameters(), *model.buffers())}


def _weight_of(module: nn.Module | None) -> torch.Tensor | None:
    return None if module is None else stored_weight(module)


def _run(model: nn.Module, outline: Outline, weights: set[int], call: Callable[[], Any]) -> _Run:
    modules = dict(named_modules(model))
    styles = {
        storage_key(param.untyped_storage()): style
        for path, style in outline.styles.items()
        for param in modules[path].parameters(recurse=False)
    }
    recorder = KernelRecorder(styles)
    ends = [each for each in (outline.head,) if each is not None]
    layers = Layers(recorder, outline.blocks or {"": model}, ends, BEFORE, AFTER)
    try:
        with torch.enable_grad(), layers.watched(), recorder.recording():
            recorder.enter(BEFORE)
            output = call()
            recorder.enter(None)
            _backward(output)
    except ModelError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        where = f" in {layers.current}" if layers.current else ""
        raise ModelError(
            f"it cannot run on the meta device: {recorder.last_op}{where} fails ({type(error).__name__}: {first}). "
            "Its operations must not depend on values: use a folder with its config.json, or another example"
        ) from error
    _count_params(model, outline, recorder, layers.parts)
    makers = makers_of(recorder, {key for part in layers.parts.values() for key in part.inputs})
    measured = {
        number: PartReader(recorder, number, part, weights, makers).measure()
        for number, part in layers.parts.items()
        if any(row.part == number for row in recorder.rows)
    }
    return _Run({number: part for number, part in layers.parts.items() if number in measured}, measured)


def _backward(output: Any) -> None:
    values = dict(output) if is_named(output) else output
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not found:
        raise ModelError("its output depends on no parameter that is trained. Return an output that does")
    torch.autograd.backward(found, [torch.empty_like(leaf) for leaf in found])


def _count_params(model: nn.Module, outline: Outline, recorder: KernelRecorder, parts: dict[int, PartOfRun]) -> None:
    """Assign each parameter to the part that reads it first.

    Weights of embedding and head are skipped, because they are counted by the vocabulary size.
    """
    vocabulary = {id(weight) for each in (outline.head, outline.table) if outline.head is not None
                  and (weight := _weight_of(each)) is not None}  # fmt: skip
    readers: dict[int, int] = {}
    for row in recorder.rows:
        for key in row.reads:
            readers.setdefault(key, row.part)
    owners = {
        id(param): style
        for path, module in named_modules(model)
        for param in module.parameters(recurse=False)
        if (style := outline.styles.get(path, ""))
    }
    for name, param in model.named_parameters():
        number = readers.get(storage_key(param.untyped_storage()))
        if id(param) in vocabulary or number is None or number not in parts:
            continue
        style = owners.get(id(param), "")
        # The bias of a row-parallel layer is added once, so every rank has it.
        cut = style in ("columns", "vocab") or (style == "rows" and not name.endswith("bias"))
        part = parts[number]
        if cut:
            part.params_cut += param.numel()
        else:
            part.params_whole += param.numel()


def _same_parts(runs: Sequence[_Run]) -> list[int]:
    """Return the indices of the parts. Raise ModelError unless the parts and their kernels are the same in all runs."""
    first = runs[0]
    for run in runs[1:]:
        same = run.parts.keys() == first.parts.keys() and all(
            [row.op for row in run.measured[number].heavy] == [row.op for row in first.measured[number].heavy]
            for number in first.parts
        )
        if not same:
            raise ModelError(
                "it runs other operations for another batch size or sequence length, so its work cannot be "
                "extrapolated. Give a folder with its config.json, or a size"
            )
    return list(first.parts)


class _Fit:
    """Fits the coefficients of a Growth to values at the batch and sequence sizes of the runs."""

    def __init__(self, points: Sequence[tuple[int, int]], with_sequence: bool):
        self._names = ("one", "batch", "seq", "tokens", "seq_square", "square") if with_sequence else ("one", "batch")
        rows = [[1.0, b, s, b * s, s * s, b * s * s] if with_sequence else [1.0, b] for b, s in points]
        self._inverse = np.linalg.inv(np.array(rows[:-1]))
        self._trial = np.array(rows[-1])

    def growth(self, values: Sequence[float]) -> Growth:
        """Return the polynomial through all values but the last. Raise ModelError if it misses the last value."""
        found = self._inverse @ np.array(values[:-1], dtype=np.float64)
        scale = max(1.0, max(abs(value) for value in values))
        found[np.abs(found) < 1e-9 * scale] = 0.0
        trial = float(self._trial @ found)
        if abs(trial - values[-1]) > _TOLERANCE * scale:
            rule = "its work is not a polynomial of batch size and sequence length"
            raise ModelError(f"{rule}: {values[-1]:.6g} instead of {trial:.6g}. Give its config.json, or a size")
        return Growth(**{name: float(f"{value:.10g}") for name, value in zip(self._names, found, strict=True)})

    def parts(self, values: Sequence[tuple[float, float, float]]) -> DividedBytes:
        """Return the polynomials for bytes, by the axes that divide them."""
        return DividedBytes(*(self.growth([each[place] for each in values]) for place in range(3)))


def _layer(fit: _Fit, runs: Sequence[tuple[PartOfRun, Measured]]) -> TracedLayer:
    part, first = runs[0]
    measured = [each for _, each in runs]
    rows = list(zip(*(each.heavy for each in measured), strict=True))
    moved = {name: fit.parts([each.moved[name] for each in measured]) for name in first.moved}
    return TracedLayer(
        path=part.path,
        count=part.count,
        params_cut=part.params_cut,
        params_whole=part.params_whole,
        matmuls=tuple(_matmul(fit, each) for each in rows if each[0].kind == "product"),
        attentions=tuple(_attention(fit, each) for each in rows if each[0].kind == "attention"),
        saved=tuple((name, fit.parts([each.saved[name] for each in measured])) for name in first.saved),
        reduced=fit.growth([each.reduced for each in measured]),
        kernels_forward=first.kernels[0],
        fused_kernels=first.kernels[1],
        **moved,
    )


def _matmul(fit: _Fit, rows: Sequence[Row]) -> Matmul:
    m, n, k, batch = (fit.growth([row.dims[place] for row in rows]) for place in range(4))
    left, right = rows[0].grads
    return Matmul(m, n, k, batch, rows[0].cut, left, right)


def _attention(fit: _Fit, rows: Sequence[Row]) -> TracedAttention:
    queries, keys = (fit.growth([row.dims[place] for row in rows]) for place in range(2))
    heads, kv_heads, width, causal = rows[0].fixed
    return TracedAttention(heads, kv_heads, width, queries, keys, causal, rows[0].cut == "inside")
