"""What the forward of each microbatch runs inside of: which samples it has, and who counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from weft.parallel import ExpertBalance, drops_of, norm_groups_of
from weft.parallel.pipeline import Inside
from weft.parallel.randomness import SampleNumbers


def insides_of(model: nn.Module, experts: ExpertBalance, samples: Sequence[SampleNumbers], key: int) -> Inside:
    """Return what gives, for the number of a microbatch, what its forward runs inside of.

    Args:
        model: what `parallelize` returned.
        experts: of the model.
        samples: of each microbatch.
        key: of the step's dropout.
    """
    drops, norms = drops_of(model), norm_groups_of(model)

    @contextlib.contextmanager
    def inside(index: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if drops is not None:
                stack.enter_context(drops.microbatch(key, samples[index]))
            if norms is not None:
                stack.enter_context(norms.microbatch(samples[index], index))
            if samples[index].is_empty:
                stack.enter_context(experts.leaving_out())
            yield

    return inside
