"""Compiled blocks under tp, sp and ep match one process without compiling.

Tracing is real, but no code is generated, to save time. tests/memory/test_compile.py and tests/parallel/context do so.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.choice import todays
from tests.parity.cases import LLAMA
from tests.parity.compiled import train_compiled
from tests.parity.dropout_cases import cases as dropout_cases
from tests.parity.moe_cases import moe_cases
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case

RTOL = 1e-10


def chosen(kind: str) -> dict[str, Case]:
    if kind == "experts":
        return {"aux": moe_cases()["aux"]}
    if kind == "dropout":
        return {"gpt2": dropout_cases()["gpt2"]}
    return {"llama": DecoderCase(dataclasses.replace(LLAMA, num_layers=1), num_steps=2)}


def train_traced(plan: str, cases: dict[str, Case], backend: str) -> dict[str, ParityResult]:
    """Train on this rank, with a backend that generates no code."""
    return {name: train_compiled(plan, case, backend).result for name, case in cases.items()}


@pytest.mark.parametrize(
    ("plan", "kind"),
    todays(
        [
            pytest.param("tp=2 sp=on", "decoders", marks=pytest.mark.full),
            ("tp=2 sp=on recompute=full", "decoders"),
            ("dp_shard=2 ep=2 zero=2", "experts"),
            ("tp=2 sp=on", "dropout"),
        ],
        parts=3,
    ),
)
def test_compiled_blocks_match_one_process(plan, kind, ranks2):
    cases = chosen(kind)
    expected = {name: train_case("precision=fp64", case) for name, case in cases.items()}
    for found in ranks2.run(train_traced, f"{plan} compile=on precision=fp64", cases, "lean"):
        for name, result in found.items():
            assert result.largest_difference(expected[name]) < RTOL, name
