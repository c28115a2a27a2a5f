"""A wire: how the values of a tensor become the bytes that travel, and values again.

A wire is a value without memory; what it carries between steps (the residual of error feedback) goes in and out of
`encode`, and a `Coder` keeps it. Sums take one of two ways:

    links add (`added_in` is a format)   tensors are cast to it, and the links add them up, rounding once
    summands are decoded (None)          all_to_all of encoded parts, decoded and added in order of rank, in the
                                         tensor's own format; an all_reduce then gathers the encoded sums. Two ranks,
                                         and all of a wire that `sends_to_all`, send each other all of what they
                                         sum, and encode no sums

So a value is encoded at most twice, however many ranks there are, and all ranks decode the same bytes to the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from weft.config.wire_formats import WireSpec, wire_spec

#: Tensors by name that one `encode` leaves to that of the next step.
State = Mapping[str, torch.Tensor]


class Wire:
    """Base of all wires; `spec` has the name and the bytes. A subclass says how values are encoded.

    ops: what may be computed of values that travel so. Values that are not finite must not come out finite: a step
    is skipped by them.
    """

    ops: tuple[str, ...] = ("sum",)
    #: Whether what `encode` gives depends on the key that `at` took.
    by_chance = False
    #: Whether what is rounded off goes with the next step's values. A `Coder` sees to it, in units that neither the
    #: loss scale nor clipping changes; `encode` neither gets nor gives a state then.
    feeds_back = False
    #: Whether each rank of an all_reduce sends all of its summand to all others, and no sums are encoded.
    sends_to_all = False

    def __init__(self, spec: WireSpec):
        self.spec = spec

    def added_in(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the format in which links add up tensors of `dtype`; None where each summand must be decoded first."""
        del dtype
        return None

    def at(self, key: int) -> Wire:
        """Return the wire as it rounds under a key: itself, but of wires that round by chance.

        key: differs from step to step, from rank to rank, and between tensors.
        """
        del key
        return self

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Return R rows of N values as uint8 of shape (R, bytes), each row to be decoded by itself, and the next state.

        state: what the last step's `encode` of these rows gave; None in the first step. `x_RN` must not be changed.
        """
        raise NotImplementedError

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of each row, a new tensor of shape (R, numel).

        Args:
            codes_RC: what `encode` gave: uint8 (R, bytes).
            numel: values of a row.
            dtype: of the values.
        """
        raise NotImplementedError


def find_wire(name: str) -> Wire:
    """Return the wire of that name, which the plan's `reduce` says."""
    spec = wire_spec(name)
    module, _, cls = spec.codec.partition(":")
    return getattr(importlib.import_module(module), cls)(spec)
