"""Where a model can be cut into stages: its chain of blocks, and what lies before and after it.

    embed, pos_embed -> blocks.0, blocks.1, ... -> norm, head

The chain is the one ModuleList of blocks, or the Sequential that the model is or holds. What holds parameters outside
of it runs before the first block or after the last one: an embedding before, what a Hugging Face model says is its head
after, anything else in order of registration.

An encoder and a decoder are one chain too, where the decoder's blocks take what the encoder gives:

    embeddings of both -> encoder.block.0, ... -> encoder.final_norm -> decoder.block.0, ... -> decoder.final_norm, head

Of a model that writes images or sounds into its text, the chain is that of the text: towers lie before it, whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import LayoutError, ModelError
from weft.structure import dry_run
from weft.structure.blocks import Site, has_params, join_path, repeated_blocks
from weft.structure.layers import find_lm_head, table_params
from weft.structure.private_torch import children

#: What a decoder's block calls the encoder's output: transformers, torch.
_FROM_ENCODER = ("encoder_hidden_states", "memory")
#: Inputs that only towers read. Sizes of images stay: positions of tokens follow from them.
_OF_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "audio_values", "input_values")


@dataclass(frozen=True, slots=True)
class Chain:
    """blocks in order; before, after: the modules with parameters that run before the first and after the last.

    joint: how many of the blocks are the encoder's; 0: there is one list of blocks. between: what runs after those and
    before the decoder's. encoder: its path. cross: which parameter of a decoder's block is the encoder's output.
    towers: arguments of the model's forward that are read before the chain, and by no one after.
    """

    blocks: tuple[Site, ...]
    before: tuple[Site, ...]
    after: tuple[Site, ...]
    joint: int = 0
    between: tuple[Site, ...] = ()
    encoder: str = ""
    cross: int = 0
    towers: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        """All of them."""
        return (*self.before, *self.blocks[: self.joint], *self.between, *self.blocks[self.joint :], *self.after)

    def is_encoder(self, site: Site) -> bool:
        """Tell whether a place is inside of the encoder."""
        return bool(self.joint) and site.path.startswith(f"{self.encoder}.")


def find_chain(model: nn.Module) -> Chain:
    """Return the chain of a model.

    Raises:
        ModelError: where there is none, several that are no encoder and decoder, or a parameter that belongs to no
            part of it.
    """
    paths = {path.rpartition(".")[0] for path in repeated_blocks(model)}
    pair = _encoder_and_decoder(model, paths)
    if pair is not None:
        return _joined(model, *pair)
    path = _chain_path(model, paths)
    before: list[Site] = []
    after: list[Site] = []
    passed = False
    head = find_lm_head(model)
    for site in _beside(model, (path,)):
        if site is None:
            passed = True
        elif (passed and not _is_table(site.module)) or (head is not None and head in site.module.modules()):
            after.append(site)
        else:
            before.append(site)
    takes = inspect.signature(model.forward).parameters
    towers = tuple(name for name in _OF_TOWERS if name in takes) if len(paths) > 1 else ()
    return Chain(_blocks(model, path), tuple(before), tuple(after), towers=towers)


def _blocks(model: nn.Module, path: str) -> tuple[Site, ...]:
    holder = model.get_submodule(path) if path else model
    return tuple(Site(holder, key, join_path(path, key)) for key in children(holder))


def _chain_path(model: nn.Module, paths: set[str]) -> str:
    """Path of the module whose children are the chain."""
    if len(paths) == 1:
        return next(iter(paths))
    if isinstance(model, nn.Sequential):
        return ""
    of_text = _of_text(model, paths)
    if len(of_text) == 1:
        return of_text.pop()
    found = f"it has {len(paths)} lists of blocks ({', '.join(sorted(paths))})" if paths else "it has no list of blocks"
    raise ModelError(
        f"model of type {type(model).__name__}: a pipeline cuts one chain of blocks, and {found}. "
        f"Put the blocks into one nn.ModuleList or nn.Sequential, or use pp=1."
    )


def _of_text(model: nn.Module, paths: set[str]) -> set[str]:
    """The lists of blocks in the language model of one that reads more than text."""
    towers = (getattr(part, "language_model", None) for part in (model, getattr(model, "model", None)))
    inside = {id(part) for tower in towers if isinstance(tower, nn.Module) for part in tower.modules()}
    return {path for path in paths if path and id(model.get_submodule(path)) in inside}


def _encoder_and_decoder(model: nn.Module, paths: set[str]) -> tuple[str, str] | None:
    """Paths of the two lists of blocks of an encoder and of a decoder that takes what the encoder gives."""
    encoders = {path for path in paths if _part(path, "encoder")}
    decoders = {path for path in paths - encoders if _part(path, "decoder")}
    if len(paths) != 2 or len(encoders) != 1 or len(decoders) != 1:
        return None
    decoder = decoders.pop()
    return (encoders.pop(), decoder) if _cross(_blocks(model, decoder)[0].module) else None


def _part(path: str, name: str) -> str:
    """The path of the module that is called so: an encoder, or a text_encoder."""
    keys = path.split(".")
    return next((".".join(keys[: place + 1]) for place, key in enumerate(keys) if key.endswith(name)), "")


def _cross(block: nn.Module) -> int:
    """Which parameter of a block is the encoder's output; 0 where it takes none."""
    takes = list(inspect.signature(block.forward).parameters)
    return next((takes.index(name) for name in _FROM_ENCODER if name in takes), 0)


def _joined(model: nn.Module, encoder: str, decoder: str) -> Chain:
    """The chain of an encoder and a decoder. Where the model cannot be asked, order of registration decides."""
    first, second = _blocks(model, encoder), _blocks(model, decoder)
    inside, head = f"{_part(encoder, 'encoder')}.", find_lm_head(model)
    order = _calls(model, first, second)
    before: list[Site] = []
    between: list[Site] = []
    after: list[Site] = []
    passed = 0
    for site in _beside(model, (encoder, decoder)):
        if site is None:
            passed += 1
            continue
        is_inside = site.path.startswith(inside)
        late = order.get(site.module, 0 if _is_table(site.module) else passed)
        if head is not None and head in site.module.modules():
            late = 2
        (after if late == 2 else between if late == 1 and is_inside else before).append(site)
    return Chain(
        (*first, *second), tuple(before), tuple(after), joint=len(first), between=tuple(between),
        encoder=inside.rstrip("."), cross=_cross(second[0].module),
    )  # fmt: skip


def _calls(model: nn.Module, first: tuple[Site, ...], second: tuple[Site, ...]) -> dict[nn.Module, int]:
    """How many of the two lists of blocks are over when each module is called first, by a forward without numbers."""
    over = 0
    found: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: object) -> None:
        del args
        found.setdefault(module, over)

    def pass_on(module: nn.Module, args: object, output: object) -> None:
        del args, output
        nonlocal over
        over = 1 if module is first[-1].module else 2

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    hooks += [blocks[-1].module.register_forward_hook(pass_on) for blocks in (first, second)]
    try:
        example = dry_run.without_numbers(dry_run.example_of(model), model)
        dry_run.call_without_numbers(model, example, _Answers())
    except (LayoutError, ModelError):
        pass  # what was called before is known all the same
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Answers(TorchFunctionMode):
    """Says yes to what a forward asks of numbers that are not there, such as whether a mask hides nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__bool__) and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def _beside(model: nn.Module, chain_paths: tuple[str, ...]) -> Iterator[Site | None]:
    """Modules with parameters beside the lists of blocks, topmost and in order of registration; None for each list."""
    if chain_paths == ("",):
        yield None
        return
    yield from _children(model, "", chain_paths)


def _children(module: nn.Module, path: str, chain_paths: tuple[str, ...]) -> Iterator[Site | None]:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ModelError(
            f"parameter {join_path(path, own[0])!r}: it lies beside the chain of blocks, in no module of its own, so "
            f"no stage owns it. Put it into a module that runs before or after the blocks, or use pp=1."
        )
    for key, child in children(module).items():
        if child is None:
            continue
        inner = join_path(path, key)
        if inner in chain_paths:
            yield None
        elif any(each.startswith(f"{inner}.") for each in chain_paths):
            yield from _children(child, inner, chain_paths)
        elif has_params(child):
            yield Site(module, key, inner)


def _is_table(module: nn.Module) -> bool:
    """Whether all its parameters are tables that are looked up."""
    return table_params(module).issuperset(module.parameters())
