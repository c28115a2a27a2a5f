"""Wire formats: encoding of a tensor's values for communication, and decoding.

A `Wire` is stateless. State between steps (the residual of error feedback) is passed in and out of `encode`, and a
`Coder` keeps it. There are two modes of sums.

If `added_in` returns a dtype, tensors are cast to it, and the links add them with a single rounding.

If `added_in` returns None, ranks exchange encoded parts by all_to_all, decode them, and add them in rank order in the
tensor's dtype. An all_reduce then gathers the encoded sums. With two ranks, or a wire that `sends_to_all`, it instead
sends the full encoded summand of each rank to all ranks, and encodes no sums.

A value is therefore encoded at most twice for any number of ranks, and all ranks decode the same bytes to the same
bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from weft.config.fields.wire_formats import WireSpec, wire_spec
from weft.errors import PlanError

#: Tensors by name that one `encode` passes to the `encode` of the next step.
State = Mapping[str, torch.Tensor]


class Wire:
    """Base of all wires. `spec` has the name and the sizes. A subclass implements the encoding.

    `ops` are the reductions that work on encoded values. Non-finite values must not decode to finite ones, because they
    cause a step to be skipped.
    """

    ops: tuple[str, ...] = ("sum",)
    #: True if the output of `encode` depends on the key passed to `at`.
    by_chance = False
    #: True if the rounding error is added to the next step's values. A `Coder` does this, in units that are
    #: independent of loss scale and clipping; `encode` then neither receives nor returns a state.
    feeds_back = False
    #: True if each rank of an all_reduce sends its full summand to all others, and no sums are encoded.
    sends_to_all = False

    def __init__(self, spec: WireSpec):
        self.spec = spec

    def added_in(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype in which links add tensors of `dtype`, or None if each summand must be decoded first."""
        del dtype
        return None

    def at(self, key: int) -> Wire:
        """Return a wire that rounds under the given key. Wires without stochastic rounding return themselves."""
        del key
        return self

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Return R rows of N values as uint8 (R, bytes), each decodable separately, and the next state.

        x_RN: the values. They must not be changed. state: the state that the last step's `encode` of these rows
        returned; None in the first step.
        """
        raise NotImplementedError

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of each row in a new tensor of shape (R, numel).

        codes_RC: encoded rows, uint8 (R, bytes).
        """
        raise NotImplementedError


def find_wire(name: str) -> Wire:
    """Return the wire with that name, as in the plan's `reduce`.

    Raises PlanError if its class feeds rounding errors back and its spec has no `state_bytes`, which the rules read.
    """
    spec = wire_spec(name)
    module, _, cls = spec.codec.partition(":")
    wire: Wire = getattr(importlib.import_module(module), cls)(spec)
    if wire.feeds_back and not spec.state_bytes:
        raise PlanError(f"wire format {name}: {cls}.feeds_back is set, but state_bytes is 0. Set it in the WireSpec.")
    return wire
