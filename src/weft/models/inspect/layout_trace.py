"""Find the layout of any module by following the features of its linear layers through one forward on the meta device.

Two linear layers are a pair if nothing between them mixes features (pointwise operations, attention by heads). The
first layer is sharded by columns and the second by rows. The embedding of the token ids, and the linear layer with as
many outputs as the embedding has entries, are sharded by vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.config.fields.layout import Layout
from weft.errors import LayoutError, ModelError
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.dry_run import call_traced, example_of, is_named
from weft.models.inspect.feature_flow import FeatureFlow, Mark
from weft.models.inspect.layers import (
    Heads,
    KnownModel,
    WrittenHeads,
    input_embeddings,
    is_linear,
    own_parameters,
    parent_of,
    weight_of,
)
from weft.models.inspect.rms_norm import rms_form
from weft.private_torch import named_modules, tree_leaves

#: Styles of layers that cannot be the first layer of a pair.
ENDS = ("rowwise", "vocab", "partial")


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """Result of `trace_layout`: the tensor-parallel layout, its source, and the reason of each pattern's style."""

    layout: Layout
    source: str
    reasons: Mapping[str, str]


def trace_layout(model: nn.Module, example: Any = None, across_norms: bool = False) -> FoundLayout:
    """Find the layout of `model` by one forward on the meta device, whatever its size.

    Args:
        model: any model.
        example: arguments of the forward; None: token ids, an image or features, depending on the model's first layer.
        across_norms: also shard layers whose features an RMS norm reduces together. The norm is then sharded too, and
            ranks sum its mean squares in each call.

    Raises:
        LayoutError: if the forward fails, or no layer can be sharded.
    """
    example = example_of(model) if example is None else example
    trace = _Trace(model, across_norms).run(example)
    styles, reasons = trace.styles()
    if not styles:
        blocks = tuple(f"{block}." for block in repeated_blocks(model))
        broken = [*trace.flow.broken.items()]
        first = next((one for one in broken if one[0].startswith(blocks)), broken[0] if broken else None)
        why = "" if first is None else f" ({first[0]}: {first[1]})"
        raise LayoutError(
            f"layout: nothing in {type(model).__name__} can be sharded: no two linear layers with only pointwise or "
            f"attention operations between them{why}, and no vocabulary. Use tp=1, or set a layout."
        )
    modules = dict(named_modules(model))
    pairs, why = generalise(styles, reasons, (*modules, *own_parameters(modules)))
    return FoundLayout(Layout(tuple(pairs.items())), "found by tracing one forward", why)


def works_on_parts(model: nn.Module, example: Any = None) -> dict[str, frozenset[str]]:
    """Map each module with direct parameters, such as a norm, to the linear layers whose output features it reads.

    Linear layers and embeddings are left out. The set is empty for a module that reads no such features.

    example: as in `trace_layout`. Raises LayoutError if the forward fails.
    """
    example = example_of(model) if example is None else example
    return dict(_Trace(model).run(example).inside)


def combined_features(model: nn.Module, example: Any = None) -> dict[str, str]:
    """Map each layer whose output features an operation combines to the reason. Arguments as in `trace_layout`."""
    example = example_of(model) if example is None else example
    return dict(_Trace(model).run(example).flow.broken)


class _Trace:
    def __init__(self, model: nn.Module, across_norms: bool = False):
        self.model, self.across_norms = model, across_norms
        self.paths = {id(module): path for path, module in named_modules(model)}
        self._begin(None)

    def _begin(self, inputs: Any) -> FeatureFlow:
        is_vetted = isinstance(self.model, KnownModel) or hasattr(self.model, "base_model_prefix")
        self.flow = FeatureFlow(is_vetted)
        self.order: list[str] = []
        self.sibling_params: dict[str, int] = {}  # parameters of modules that also have linear layers: name -> id
        self.own: list[str] = []  # direct parameters of modules with linear children
        self.ends: dict[str, frozenset[str]] = {}  # row-parallel candidates -> layers whose features they read
        self.sizes: dict[str, tuple[int, int]] = {}
        self.inside: dict[str, frozenset[str]] = {}  # modules with parameters -> layers whose features they read
        self.gives: dict[str, frozenset[str]] = {}  # parents of linear layers -> layers whose features they output
        self.weights: dict[int, list[tuple[str, str]]] = {}  # (layer, name) by id of a parameter
        self.normed: dict[str, frozenset[str]] = {}  # norms over all features -> layers of these features
        table = input_embeddings(self.model)
        self.embedding: str | None = None if table is None else self.paths.get(id(table))
        self.ids = [
            leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()
        ]
        return self.flow

    def run(self, example: Any) -> _Trace:
        """Call the model, follow the features of its layers, and return self.

        Raises LayoutError if the forward fails.
        """
        handles = [self.model.register_forward_pre_hook(self._before_model)]
        handles += [hook for module in self.model.modules() for hook in self._watch(module)]
        try:
            output = call_traced(self.model, example, self._begin)
        except ModelError as error:
            raise LayoutError(
                f"layout: {error} Give example=, the arguments of a forward that works, or layout=, with paths of this "
                "model as `weft layout` prints them."
            ) from error
        finally:
            self.flow.is_over = True
            for handle in handles:
                handle.remove()
        self._outputs = {id(leaf) for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(_plain(output)):
            if (mark := self.flow.of(leaf)) is not None:
                self.flow.end(mark, "its features are the model's output")
        return self

    def _watch(self, module: nn.Module) -> Iterable[Any]:
        if Heads.of(module).count:
            yield module.register_forward_pre_hook(self._before_heads)
            yield module.register_forward_hook(self._after_heads)
        # A layer whose weight is computed from other parameters, as weight norm does, is not sharded.
        if is_linear(module) and "weight" in dict(module.named_parameters(recurse=False)):
            yield module.register_forward_pre_hook(self._before_linear)
            yield module.register_forward_hook(self._after_linear)
        elif isinstance(module, nn.Embedding):
            yield module.register_forward_pre_hook(self._before_embedding)
            yield module.register_forward_hook(self._after_embedding)
        elif self.across_norms and rms_form(module) is not None:
            yield module.register_forward_pre_hook(self._before_norm)
            yield module.register_forward_hook(self._after_norm)
        else:
            if next(module.parameters(recurse=False), None) is not None:
                yield module.register_forward_pre_hook(self._before_other, with_kwargs=True)
            if any(is_linear(child) for child in module.children()):
                yield module.register_forward_pre_hook(self._before_around)
                yield module.register_forward_hook(self._after_around)

    def _before_model(self, module: nn.Module, args: Any) -> None:
        """Record the layers' weights. Weights that are read outside their layers (penalty terms) are not sharded."""
        del args
        if isinstance(self.model, KnownModel):
            return
        for path, layer in named_modules(module):
            if is_linear(layer) or isinstance(layer, nn.Embedding):
                for name, param in layer.named_parameters(recurse=False):
                    if param is getattr(layer, "token_rows", None):  # an embedding and a head may share them
                        continue
                    self.weights.setdefault(id(param), []).append((path, name))
        self.flow.weights = set(self.weights)

    def _before_heads(self, module: nn.Module, args: Any) -> None:
        """Accept constant head counts inside this module, because its attributes are set to a rank's counts."""
        del args
        self.flow.trusted += 1
        self.flow.own.append(frozenset(map(id, module.parameters())))

    def _after_heads(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self.flow.trusted -= 1
        self.flow.own.pop()

    def _before_linear(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path, mark = self.paths[id(module)], self.flow.of(args[0]) if args else None
        sources = frozenset[str]()
        if mark is not None and mark.dim == args[0].dim() - 1:
            sources = mark.sources
        elif mark is not None:
            self.flow.end(mark, f"its features are not the last dim of what {path} reads")
        before = self.ends.get(path, sources)
        for other in (path, *(before ^ sources)) if before != sources else ():
            self.flow.broken.setdefault(other, f"{path} is called again on other features")
        self.ends[path] = before | sources
        self.flow.inside = True

    def _after_linear(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del args
        path, (outputs, inputs) = self.paths[id(module)], weight_of(module).shape
        self.flow.inside = False
        if path not in self.sizes:
            self.order.append(path)
        self.sizes[path] = (outputs, inputs)
        self.flow.mark(output, Mark(frozenset((path,)), output.dim() - 1, outputs))

    def _before_embedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.flow.lookup = id(module.weight)
        # The wrapper of meta tensors may have created a new object, so the token ids are recognized as the first ids
        # that are read.
        if self.embedding is None and args and any(args[0] is ids for ids in self.ids):
            self.embedding = self.paths[id(module)]

    def _after_embedding(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """Mark the output of an embedding that does not read the token ids.

        It may have a column per head, like T5's relative positions.
        """
        del args
        assert isinstance(module, nn.Embedding)
        self.flow.lookup = None
        path = self.paths[id(module)]
        if path != self.embedding:
            if path in self.sizes:
                self.flow.broken.setdefault(path, "it is called twice")
            else:
                self.order.append(path)
            self.sizes[path] = (module.embedding_dim, module.num_embeddings)
            self.flow.mark(output, Mark(frozenset((path,)), output.dim() - 1, module.embedding_dim))

    def _before_norm(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        mark = self.flow.of(args[0])
        if mark is None or mark.dim != args[0].dim() - 1:
            self._before_other(module, args, {})
            return
        path = self.paths[id(module)]
        self.normed[path] = self.normed.get(path, frozenset()) | mark.sources
        self.flow.inside = True

    def _after_norm(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self.flow.inside and (mark := self.flow.of(args[0])) is not None:
            self.flow.inside = False
            if mark.segment is not None:
                self.flow.end(mark, f"{self.paths[id(module)]} uses a segment of its features together")
            else:
                self.flow.mark(output, mark)

    def _before_other(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.flow.params |= {id(param) for param in module.parameters(recurse=False)}
        path = self.paths[id(module)]
        self.inside.setdefault(path, frozenset())
        for leaf in tree_leaves((args, kwargs)):
            if (mark := self.flow.of(leaf)) is not None:
                self.inside[path] |= mark.sources

    def _before_around(self, module: nn.Module, args: Any) -> None:
        """Record the module's heads, and mark its direct parameters.

        They may have one number per head, like attention sinks, and are then sharded with the heads.
        """
        del args
        self.flow.written.append(WrittenHeads.of(module))
        for path, param in own_parameters({self.paths[id(module)]: module}).items():
            self.flow.params.add(id(param))
            self.sibling_params[path] = id(param)
            if not param.dim() or param.shape[0] == 1:
                continue
            if path not in self.own:
                self.own.append(path)
            self.flow.mark(param, Mark(frozenset((path,)), 0, param.shape[0]))

    def _after_around(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        self.flow.written.pop()
        first = next((leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor)), None)
        mark = self.flow.of(first)
        self.gives[self.paths[id(module)]] = frozenset() if mark is None else mark.sources

    def styles(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the style and the reason of each module or parameter that is sharded or next to sharded layers.

        The styles are in module order. They include "partial" modules, which work on sharded features, and "replicate"
        ones, which do not.
        """
        styles: dict[str, str] = {}
        reasons: dict[str, str] = {}
        # Columns of parameters that are read outside their layers are not sharded.
        read = {place for number in self.flow.read for place in self.weights[number]}
        for path, name in read:
            self.flow.broken.setdefault(path, f"its {name} is read outside the layer")
        self._vocabulary(styles, reasons, read)
        families = self._families()
        blocks = tuple(f"{block}." for block in repeated_blocks(self.model))
        for path in self.order:
            sources = self.ends.get(path, frozenset())
            if (
                path in styles
                or not sources
                or (path, "weight") in read
                or any(styles.get(source, "colwise") in ENDS for source in sources)
            ):
                continue  # an output layer, or the first layer is the second of another pair
            family = frozenset[str]().union(*(families[source] for source in sources))
            if path.startswith(blocks) and not all(source.startswith(blocks) for source in family):
                continue  # a pair with one layer outside the blocks, such as a conditioning layer
            if any(source in self.flow.broken or styles.get(source) in ENDS for source in family):
                continue
            if any(self.ends.get(source, frozenset()) & family for source in family):
                continue  # such a layer reads all features of the others, as in h + layer(h)
            names = ", ".join(sorted({source.rpartition(".")[2] for source in family.difference(self.own)}))
            for source in sorted(family - styles.keys(), key=(*self.order, *self.own).index):
                styles[source], reasons[source] = self._column(source, path)
            styles[path] = "rowwise"
            reasons[path] = f"reads the outputs of {names}, with nothing between that mixes features"
            self._between(styles, reasons, family, names)
        around = {parent_of(path) for path, style in styles.items() if style.startswith("colwise")}
        for path in self.sibling_params:
            if parent_of(path) in around and path not in styles:
                styles[path], reasons[path] = "replicate", "works on no features that are divided"
        self._ahead(styles, reasons)
        modules = dict(named_modules(self.model))
        self._undivided(styles, reasons, modules)
        position = {path: place for place, path in enumerate((*modules, *own_parameters(modules)))}
        ordered = sorted(styles, key=lambda path: position[path])
        return {path: styles[path] for path in ordered}, reasons

    def _between(self, styles: dict[str, str], reasons: dict[str, str], family: frozenset[str], names: str) -> None:
        """Add modules that process the features of a family of layers."""
        for inner, seen in self.inside.items():
            if seen & family:
                styles[inner] = "partial"
                reasons[inner] = f"works on the outputs of {names} segment by segment"
        for inner, number in self.sibling_params.items():
            if self.flow.met.get(number, frozenset()) & family and inner not in styles:
                styles[inner], reasons[inner] = "partial", f"works on the outputs of {names} segment by segment"
        for inner, seen in self.normed.items():
            if seen & family:
                read = ", ".join(sorted(source.rpartition(".")[2] for source in seen))
                styles[inner], reasons[inner] = "colwise", f"norms the outputs of {read}: ranks add up its sums"

    def _ahead(self, styles: dict[str, str], reasons: dict[str, str]) -> None:
        """Add, as partial, the other modules next to sharded layers if some are linear, as in latent attention.

        The module around them outputs a sum over ranks, and its input reaches the heads of one rank. So the parameters
        of all modules inside it have gradients that are partial sums.
        """
        modules = dict(named_modules(self.model))
        columns: dict[str, list[str]] = {}
        for path, style in styles.items():
            if style.startswith("colwise"):
                columns.setdefault(parent_of(path), []).append(path.rpartition(".")[2])
        for row in [path for path, style in styles.items() if style == "rowwise"]:
            around = parent_of(row)
            cut = columns.get(around)
            if not around or not cut or self.gives.get(around) != frozenset((row,)):
                continue
            rest = [
                path
                for name, module in named_modules(modules[around])
                if (path := f"{around}.{name}") not in styles and name
                if next(module.parameters(recurse=False), None) is not None
            ]
            if any(path in self.sizes for path in rest):
                for path in rest:
                    styles[path], reasons[path] = "partial", f"makes what {', '.join(sorted(cut))} read, for all heads"

    def _undivided(self, styles: dict[str, str], reasons: dict[str, str], modules: Mapping[str, nn.Module]) -> None:
        """Add, as replicated, modules in the parents of column-sharded layers that read no features of these layers."""
        columns = {path for path, style in styles.items() if style.startswith("colwise")}
        for around in {parent_of(path) for path in columns} - {""}:
            if any("norm" in type(child).__name__.lower() for child in modules[around].children()):
                continue  # its sharded layers are separate parts
            for name, module in named_modules(modules[around]):
                path = f"{around}.{name}"
                seen = self.ends.get(path, frozenset()) | self.inside.get(path, frozenset())
                is_free = (
                    bool(name) and path not in styles and not seen & columns and path in {*self.ends, *self.inside}
                )
                if is_free and next(module.parameters(recurse=False), None) is not None:
                    styles[path], reasons[path] = "replicate", "works on no features that are divided"

    def _families(self) -> dict[str, frozenset[str]]:
        """Return families of layers whose features are combined element by element.

        A family is sharded together or not at all.
        """
        families = {path: frozenset((path,)) for path in (*self.order, *self.own)}
        for group in self.flow.rank_group:
            joined = frozenset[str]().union(*(families[path] for path in group))
            for path in joined:
                families[path] = joined
        return families

    def _column(self, source: str, end: str) -> tuple[str, str]:
        if source in self.own:
            return "colwise", f"a number for each head, whose features reach {end.rpartition('.')[2]}"
        outputs = self.sizes[source][0]
        segments = sorted(self.flow.segments.get(source, ()))
        count = self.flow.counts[source]
        heads = f", in {count} heads" if count < outputs and not segments else ""
        reason = f"its outputs reach {end.rpartition('.')[2]} one by one{heads}"
        if not segments:
            return "colwise", reason
        sizes = [size for _, size in segments]
        equal = len(set(sizes)) == 1
        text = str(len(sizes)) if equal else "+".join(map(str, sizes))
        return f"colwise:{text}", f"{len(sizes)} segments; {reason}"

    def _vocabulary(self, styles: dict[str, str], reasons: dict[str, str], read: set[tuple[str, str]]) -> None:
        if self.embedding is None:
            return
        modules = dict(named_modules(self.model))
        table = modules[self.embedding]
        assert isinstance(table, nn.Embedding)
        for path, module in modules.items():  # T5 reads ids with two embeddings that are tied to a third
            if isinstance(module, nn.Embedding) and module.weight is table.weight and (path, "weight") not in read:
                styles[path], reasons[path] = "vocab", f"reads the token ids, {table.num_embeddings} entries"
        for path in reversed(self.order):
            if not is_linear(modules[path]):
                continue
            tied = modules[path].weight is table.weight
            if any(layer == path for layer, _ in read):
                continue
            if tied or self.sizes[path][0] == table.num_embeddings:
                styles[path] = "vocab"
                what = "tied to the embedding" if tied else "as many outputs as the embedding has entries"
                reasons[path] = f"the head: {what}"
                return


def generalise(
    styles: dict[str, str], reasons: dict[str, str], paths: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles and reasons by pattern: `*` for numbers if all blocks are equal, `{q,k}` for siblings of one style.

    paths: all paths of the model.
    """
    by_pattern: dict[str, list[str]] = {}
    for path in paths:
        by_pattern.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path), []).append(path)
    pairs: dict[str, str] = {}
    why: dict[str, str] = {}
    for path, style in styles.items():
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        alike = all(styles.get(other) == style for other in by_pattern[pattern])
        pairs[pattern if alike else path] = style
        why[pattern if alike else path] = reasons[path]
    joined: dict[tuple[str, str], list[str]] = {}
    for pattern, style in pairs.items():
        prefix, _, name = pattern.rpartition(".")
        joined.setdefault((prefix, style if prefix else name), []).append(name)
    result: dict[str, str] = {}
    result_why: dict[str, str] = {}
    for (prefix, _), names in joined.items():
        if "*" in names or len(names) == 1 or not prefix:
            short = [f"{prefix}.{name}" if prefix else name for name in names]
        else:
            short = [f"{prefix}.{{{','.join(names)}}}"]
        for pattern, name in zip(short, names, strict=False):
            first = f"{prefix}.{name}" if prefix else name
            result[pattern] = pairs[first]
            result_why[pattern] = why[first]
    return result, result_why


def _plain(output: Any) -> Any:
    return dict(output) if is_named(output) else output
