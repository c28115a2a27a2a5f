"""Graphs, graph breaks and recompiles are counted."""

from __future__ import annotations

import pytest
import torch

from weft.verify.oracles import counted_graphs


def breaks_once(x: torch.Tensor, factor: int) -> torch.Tensor:
    y = x * factor
    torch._dynamo.graph_break()
    return y + 1


def test_graphs_compiled_in_the_context_are_counted():
    with counted_graphs() as found:
        call = torch.compile(breaks_once, backend="eager", dynamic=False)
        call(torch.ones(3), 2)
    assert found.graphs == 2
    assert sum(found.breaks.values()) == 1
    assert found.recompiles == []
    with counted_graphs() as found:
        call = torch.compile(breaks_once, backend="eager", dynamic=False)
        call(torch.ones(3), 2)
        call(torch.ones(3), 5)
    assert len(found.recompiles) == 1


def test_too_many_recompiles_raise():
    call = torch.compile(lambda x, factor: x * factor, backend="eager", dynamic=False)

    def many():
        with counted_graphs():
            return [call(torch.ones(3), factor) for factor in range(2, 20)]

    with pytest.raises(Exception, match="recompile_limit"):
        many()
