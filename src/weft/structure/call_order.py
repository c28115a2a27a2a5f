"""The order in which a model calls its modules, read from one forward without numbers."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import LayoutError, ModelError
from weft.structure import dry_run
from weft.structure.blocks import Site, has_params, is_never_called, join_path
from weft.structure.private_torch import children

#: Sizes of images that are tried if the model refuses the usual example.
_SIDES = (224, 32, 28, 16, 8)


class CallOrder:
    """Calls of modules in order, and the modules whose weights were read outside of their calls."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self._first: dict[nn.Module, int] = {}
        self._uses: set[tuple[nn.Module, tuple[nn.Module, ...]]] = set()

    def add(self, module: nn.Module) -> None:
        """Note the begin of a call."""
        self._first.setdefault(module, len(self.calls))
        self.calls.append(module)

    def add_use(self, owner: nn.Module, running: tuple[nn.Module, ...]) -> None:
        """Note that a module was called, or a weight of it read, during these calls."""
        self._uses.add((owner, running))

    def is_read(self, module: nn.Module) -> bool:
        """Return whether a weight of a module, or a part of it, was used outside of the module's calls."""
        inside = set(module.modules())
        return any(owner in inside and module not in running for owner, running in self._uses)

    def is_called(self, module: nn.Module) -> bool:
        """Return whether a module was called, or nothing in it was."""
        return module in self._first or not any(part in self._first for part in module.modules())

    def called(self, sites: list[Site]) -> list[Site]:
        """Return the sites, with the modules that are called in place of a module that is not."""
        found: list[Site] = []
        for site in sites:
            inside = [
                Site(site.module, key, join_path(site.path, key))
                for key, child in children(site.module).items()
                if child is not None and has_params(child)
            ]
            is_opened = site.module not in self._first and any(part in self._first for part in site.module.modules())
            found += self.called(inside) if is_opened and not self._has_own(site.module) else [site]
        return found

    def sorted(self, sites: list[Site]) -> list[Site]:
        """Return the sites in the order of their first calls. What is never called keeps its position."""
        called = [site for site in sites if site.module in self._first]
        ordered = iter(sorted(called, key=lambda site: self._first[site.module]))
        return [next(ordered) if site.module in self._first else site for site in sites]

    def positions(self, site: Site, units: list[Site]) -> list[int]:
        """Return after how many of the blocks a module is called, once for each different number."""
        modules = {unit.module for unit in units}
        seen: set[nn.Module] = set()
        found: dict[int, None] = {}
        for module in self.calls:
            if module in modules:
                seen.add(module)
            elif module is site.module:
                found.setdefault(sum(unit.module in seen for unit in units))
        return list(found)

    @staticmethod
    def _has_own(module: nn.Module) -> bool:
        return any(True for _ in module.named_parameters(recurse=False))


def call_order(model: nn.Module) -> CallOrder | None:
    """Call a model without numbers and return the order of calls; None if it cannot be called so.

    The example is made up (`dry_run.example_of`). The model stays as it is.
    """
    try:
        example = dry_run.example_of(model)
    except (LayoutError, ModelError):
        return None
    for attempt in (example, *_of_other_sizes(example), *_with_more(model, example)):
        order = CallOrder()
        watch = _Watch(model, order)
        hooks = watch.hooks()
        try:
            dry_run.call_without_numbers(model, dry_run.without_numbers(attempt, model), watch)
        except (LayoutError, ModelError):
            continue
        finally:
            for hook in hooks:
                hook.remove()
        return order
    return None


def _of_other_sizes(example: Any) -> list[Any]:
    image = _only(example)
    if image is None or image.dim() != 4:
        return []
    return [(torch.zeros(1, image.shape[1], side, side),) for side in _SIDES]


def _only(example: Any) -> torch.Tensor | None:
    """The tensor of an example that is one tensor."""
    found: list[Any] = list(example) if dry_run.is_placed(example) else []
    return found[0] if len(found) == 1 else None


def _with_more(model: nn.Module, example: Any) -> list[Any]:
    """The example with numbers of samples for the other arguments that forward requires: steps of noise, classes."""
    takes = inspect.signature(model.forward).parameters.values()
    required = sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in takes)
    given = _only(example)
    if given is None or not 1 < required <= 3:
        return []
    more = [torch.zeros(len(given), dtype=dtype) for dtype in (torch.int64, torch.float32)]
    others = itertools.product(more, repeat=required - 1)
    return [(*first, *rest) for rest in others for first in (example, *_of_other_sizes(example))]


class _Watch(TorchFunctionMode):
    """Notes calls, and weights that are read outside of them; answers yes to questions about numbers."""

    def __init__(self, model: nn.Module, order: CallOrder):
        super().__init__()
        self._model, self._order = model, order
        self._running: list[nn.Module] = []
        self._owners: dict[int, list[nn.Module]] = {}

    def hooks(self) -> list[Any]:
        """Register the hooks that note calls."""
        modules = [module for module in self._model.modules() if not is_never_called(module)]
        before = [module.register_forward_pre_hook(self._enter) for module in modules]
        return before + [module.register_forward_hook(self._leave, always_call=True) for module in modules]

    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        if module is self._model:  # its tensors are stand-ins for this call
            self._owners = {}
            for part in module.modules():
                for each in part.parameters(recurse=False):
                    self._owners.setdefault(id(each), []).append(part)
        else:
            self._order.add(module)
            self._order.add_use(module, (*self._running, module))
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__bool__) and args[0].is_meta:
            return True
        for each in args:
            owners = self._owners.get(id(each), [])
            if not any(owner in self._running for owner in owners):
                for owner in owners:
                    self._order.add_use(owner, tuple(self._running))
        return func(*args, **(kwargs or {}))
