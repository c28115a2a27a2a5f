"""The chain of a model: its modules in call order, for dividing it into pipeline stages.

    embed -> blocks.0, blocks.1, ... -> norm, head

The chain has the repeated blocks, and the topmost other modules with parameters. Each of the other modules runs before
the first block, between two blocks, or after the last one. Weights without a single position are in every stage:
parameters outside these modules (`pos_embed`), and modules that are used on both sides of the blocks.

The order is the order of calls if the model can be called on the meta device (`call_order`), and the order of
registration otherwise. A stage checks the order again when it runs.

An encoder and a decoder are one chain that starts with the encoder's blocks. If a model reads images or audio into its
text, only the text model's blocks are in the chain, and each encoder (tower) is one module before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from weft.errors import ModelError
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import Site, block_sites, has_params, is_never_called, join_path
from weft.models.inspect.dry_run import CallOrder, call_order
from weft.models.inspect.layers import KnownModel, find_lm_head, table_params
from weft.models.inspect.private_torch import children
from weft.private_torch import named_modules

#: The encoder's output as an argument of a decoder's block, in transformers and in torch.
_FROM_ENCODER = ("encoder_hidden_states", "memory")
#: Inputs that only image and audio encoders (towers) read. Image sizes are not listed, because token positions depend
#: on them.
_OF_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "audio_values", "input_values")


@dataclass(frozen=True, slots=True)
class Chain:
    """The modules of a model in the order of their calls. See the module docstring.

    Attributes:
        blocks: the blocks, in order.
        before, after: modules that run before the first block and after the last one.
        joint: number of blocks of the encoder; 0 without an encoder.
        between: other modules, each with the number of blocks that run before it.
        everywhere: names of the parameters that every stage has.
        towers: arguments of the model's forward that are only read before the chain.
    """

    blocks: tuple[Site, ...]
    before: tuple[Site, ...]
    after: tuple[Site, ...]
    joint: int = 0
    between: tuple[tuple[int, Site], ...] = ()
    everywhere: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        """All modules that belong to a single stage."""
        return (*self.before, *self.upto(len(self.blocks)), *self.after)

    def upto(self, stop: int, first: int = 0) -> tuple[Site, ...]:
        """Return the blocks first to stop - 1, each followed by the modules before the next block."""
        found: list[Site] = []
        for number in range(first, stop):
            found.append(self.blocks[number])
            found += [site for position, site in self.between if position == number + 1]
        return tuple(found)


def find_chain(model: nn.Module) -> Chain:
    """Return the chain of a model.

    Raises:
        ModelError: if the model has no blocks.
    """
    units = block_sites(model)
    paths = dict.fromkeys(site.path.rpartition(".")[0] for site in units)
    pair = _encoder_and_decoder(model, set(paths))
    of_text = _of_text(model, set(paths))
    if pair is not None:
        units = [*_entries(model, pair[0]), *_entries(model, pair[1])]
    elif len(of_text) == 1:
        units = _entries(model, next(iter(of_text)))
    else:
        units = _with_empty(model, units) or _of_sequential(model)
    if not units:
        raise ModelError(
            f"model of type {type(model).__name__}: a pipeline divides a chain of blocks, and it has no repeated "
            "modules that are called. Put the blocks into nn.ModuleList, nn.ModuleDict or nn.Sequential, or use "
            "pp=1."
        )
    joint = len(_entries(model, pair[0])) if pair is not None else 0
    takes = inspect.signature(model.forward).parameters
    towers = tuple(name for name in _OF_TOWERS if name in takes) if len(paths) > 1 and pair is None else ()
    is_known = hugging_face.is_hugging_face(model) or isinstance(model, KnownModel)
    order = call_order(model) if pair is not None or not is_known else None
    return _arranged(model, units, order, joint, _part(pair[0], "encoder") if pair else "", towers, is_known=is_known)


def _with_empty(model: nn.Module, units: list[Site]) -> list[Site]:
    """Return the blocks and the other entries of their lists, except those that are never called or contain blocks."""
    found: dict[str, Site] = {}
    for site in units:
        is_list = isinstance(site.parent, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        holder = site.path.rpartition(".")[0]
        for each in _entries(model, holder) if is_list else [site]:
            if not is_never_called(each.module) and not _holds(each, units):
                found.setdefault(each.path, each)
    return list(found.values())


def _holds(site: Site, units: list[Site]) -> bool:
    return any(unit.path.startswith(f"{site.path}.") for unit in units)


def _entries(model: nn.Module, path: str) -> list[Site]:
    holder = model.get_submodule(path) if path else model
    return [Site(holder, key, join_path(path, key)) for key, child in children(holder).items() if child is not None]


def _of_sequential(model: nn.Module) -> list[Site]:
    """Return the entries of the model if it is a Sequential, or of its only Sequential with several layers."""
    if isinstance(model, nn.Sequential):
        return _entries(model, "")
    several = [
        path
        for path, module in named_modules(model)
        if isinstance(module, nn.Sequential) and sum(map(has_params, module.children())) > 1
    ]
    return _entries(model, several[0]) if len(several) == 1 else []


def _of_text(model: nn.Module, paths: set[str]) -> set[str]:
    """Return the `paths` of block lists that are inside the model's `language_model`.

    The result is empty if there are fewer than two paths, or no `language_model`.
    """
    if len(paths) < 2:
        return set()
    towers = (getattr(part, "language_model", None) for part in (model, getattr(model, "model", None)))
    inside = {id(part) for tower in towers if isinstance(tower, nn.Module) for part in tower.modules()}
    return {path for path in paths if path and id(model.get_submodule(path)) in inside}


def _encoder_and_decoder(model: nn.Module, paths: set[str]) -> tuple[str, str] | None:
    """Return the paths of the block lists of an encoder and of a decoder that takes the encoder's output, or None."""
    encoders = {path for path in paths if _part(path, "encoder")}
    decoders = {path for path in paths - encoders if _part(path, "decoder")}
    if len(paths) != 2 or len(encoders) != 1 or len(decoders) != 1:
        return None
    decoder = decoders.pop()
    takes = inspect.signature(_entries(model, decoder)[0].module.forward).parameters
    return (encoders.pop(), decoder) if any(name in takes for name in _FROM_ENCODER) else None


def _part(path: str, name: str) -> str:
    """Return the path up to the first part that ends with `name`, such as `text_encoder` for "encoder", or ""."""
    keys = path.split(".")
    return next((".".join(keys[: place + 1]) for place, key in enumerate(keys) if key.endswith(name)), "")


def _arranged(
    model: nn.Module, units: list[Site], order: CallOrder | None, joint: int, encoder: str, towers: tuple[str, ...],
    *, is_known: bool,
) -> Chain:  # fmt: skip
    """Return the chain with a position for every module, from the order of calls or else the order of registration."""
    if order is not None and not joint:
        units = order.called(units)
        if len({site.module for site in units}) == len(units):
            units = order.sorted(units)
    head, count = find_lm_head(model), len(units)
    numbers = {site.path: number for number, site in enumerate(units)}
    before: list[Site] = []
    between: list[tuple[int, Site]] = []
    after: list[Site] = []
    everywhere: list[str] = []
    passed = 0
    for found in _outside_blocks(model, set(numbers)):
        if isinstance(found, int):
            passed += found
            continue
        if isinstance(found, str):
            everywhere.append(found)
            continue
        for site in [found] if order is None else order.called([found]):
            position = _position(site, units, order, passed, is_joint=bool(joint), is_known=is_known)
            if head is not None and head in site.module.modules():
                position = count
            elif joint and position is not None and 0 < position < count and not site.path.startswith(f"{encoder}."):
                position = 0
            if position is None:
                everywhere += [join_path(site.path, name) for name, _ in site.module.named_parameters()]
            elif 0 < position < count:
                between.append((position, site))
            else:
                (after if position else before).append(site)
    return Chain(
        tuple(units), tuple(before), tuple(after), joint, tuple(between), tuple(everywhere), towers
    )  # fmt: skip


def _position(
    site: Site, units: list[Site], order: CallOrder | None, passed: int, *, is_joint: bool, is_known: bool
) -> int | None:  # fmt: skip
    """Return the number of blocks that run before a module, or None if every stage must hold it."""
    is_table = table_params(site.module).issuperset(site.module.parameters())
    if is_joint:
        positions = order.positions(site, units) if order is not None else []
        return positions[0] if positions else 0 if is_table else passed
    if order is None:
        is_small = all(param.ndim < 2 for param in site.module.parameters())
        return None if not passed and is_small and not is_known else 0 if is_table else passed
    positions = order.positions(site, units)
    if order.is_read(site.module) or not positions:
        return None
    return positions[0] if len(positions) == 1 or is_table else None


def _outside_blocks(model: nn.Module, units: set[str]) -> Iterator[Site | str | int]:
    """Yield, in order of registration, the topmost modules with parameters outside the blocks, and 1 for each block.

    Also yield the names of parameters that belong to no such module.
    """

    def look_into(module: nn.Module, path: str) -> Iterator[Site | str | int]:
        for name, _ in module.named_parameters(recurse=False):
            yield join_path(path, name)
        for key, child in children(module).items():
            inner = join_path(path, key)
            if child is None:
                continue
            if inner in units:
                yield 1
            elif is_never_called(child) or any(unit.startswith(f"{inner}.") for unit in units):
                yield from look_into(child, inner)
            elif has_params(child):
                yield Site(module, key, inner)

    yield from look_into(model, "")
