"""Which part of a model runs at each moment of a trace; a layer like one that was traced runs as a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.private_torch import Function, named_modules, tree_flatten, tree_leaves, tree_unflatten
from weft.structure.cost.kernel_recorder import KernelRecorder
from weft.structure.cost.part_bytes import PartOfRun


class Layers:
    """The parts of one run. blocks: the repeated layers by path. ends: modules from which on nothing is written down.

    parts: by number; layers from 0 on, `before` and `after` as the caller numbers them. current: path of
    the layer that runs.
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
        """The layers are watched inside."""
        own = {path: vars(block).get("forward") for path, block in self.blocks.items()}
        numbers = _own_numbers(self.blocks)
        for path, block in self.blocks.items():
            block.forward = self._forward(path, block.forward, _signature(block, numbers))
        handles = [end.register_forward_pre_hook(self._end) for end in self.ends]
        try:
            yield
        finally:
            for path, block in self.blocks.items():
                del block.forward  # the class's own is there again
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
        """Outputs like those of the layer that was traced; gradients reach the inputs, at no cost."""
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
    """Settings in which every layer holds its own place: path of the module in the layer, and name."""
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
    """What makes two layers alike: classes, parameters, and settings but the ignored."""
    return tuple((path, type(module), _parameters(module), _settings(path, module, ignored))
                 for path, module in named_modules(block))  # fmt: skip


def _parameters(module: nn.Module) -> Any:
    named = module.named_parameters(recurse=False)
    return tuple((name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in named)


def _settings(path: str, module: nn.Module, ignored: set[tuple[str, str]]) -> Any:
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str))
    return tuple((name, value) for name, value in plain if (path, name) not in ignored)
