"""Parameters of a model on the meta device, made where they are needed: this rank's part, with the weights by name.

A model larger than one device is built on the meta device and cut there, which costs nothing. Of each parameter the
whole is then made on the host, one at a time, and this rank's part of it kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from weft.errors import ModelError
from weft.models import initialise_parameter
from weft.models.adapters import AdaptedLinear
from weft.parallel.placement.axes import AxisMap
from weft.parallel.private_torch import apply_to_tensors


class Materialise:
    """Makes parameters of one model.

    Args:
        model: with parameters on the meta device or not.
        axes: how its parameters are placed.
        seed: as `weft.models.initialise` takes it; None where there is none to make.
        filled_later: whether values come from files afterwards: each rank then takes memory for its part alone. Of an
            adapter, which no file holds, A and B are made from the seed.
        device: where they are made.

    Raises:
        ModelError: for a buffer on the meta device, and for a parameter there where there is no seed.
    """

    def __init__(
        self, model: nn.Module, axes: AxisMap, seed: int | None, device: torch.device, filled_later: bool = False
    ):
        self._filled_later = filled_later
        self._awaited: set[int] = set()
        self._axes = axes
        self._seed = seed
        self._device = device
        self._owners: dict[int, tuple[str, nn.Module]] = {}
        for path, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                self._owners.setdefault(id(param), (f"{path}.{name}" if path else name, module))
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ModelError(
                    f"buffer {name!r}: it is on the meta device, and Weft has no rule for its values. Give it values "
                    "first."
                )
        meta = [name for name, param in model.named_parameters() if param.is_meta and not self._is_filled_later(param)]
        if meta and seed is None:
            raise ModelError(
                f"parameter {meta[0]!r}: it is on the meta device. Give the model weights first, or seed= to make them."
            )

    @torch.no_grad()
    def make(
        self, params: Iterable[nn.Parameter], frozen_formats: Mapping[nn.Parameter, torch.dtype] | None = None
    ) -> None:
        """Make those of the parameters that are on the meta device, in place, in the format that they have there.

        frozen_formats: instead, of frozen ones that are filled later.
        """
        formats = frozen_formats or {}
        for param in params:
            if not param.is_meta:
                continue
            if self._is_filled_later(param):
                dtype = param.dtype if param.requires_grad else formats.get(param, param.dtype)
                here = torch.empty(param.shape, dtype=dtype, device=self._device)
                torch.utils.swap_tensors(param, nn.Parameter(here, requires_grad=param.requires_grad))
                self._awaited.add(id(param))
                continue
            assert self._seed is not None
            name, owner = self._owners[id(param)]
            whole = torch.empty(self._axes.whole_shape(name, param.shape), dtype=param.dtype)
            initialise_parameter(whole, self._axes.saved_name(name), owner, self._seed)
            part = self._axes.part(name, whole).to(self._device, copy=True).contiguous()
            torch.utils.swap_tensors(param, nn.Parameter(part, requires_grad=param.requires_grad))

    def value_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's values; None where they come later, into memory that is here: nothing to send yet."""
        return None if id(param) in self._awaited else param.detach()

    def _is_filled_later(self, param: nn.Parameter) -> bool:
        if not self._filled_later:
            return False
        name, owner = self._owners[id(param)]
        return not (isinstance(owner, AdaptedLinear) and name.endswith((".lora_A", ".lora_B")))


def move(model: nn.Module, device: torch.device) -> None:
    """Bring a model to the device; what is on the meta device stays there."""
    apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
