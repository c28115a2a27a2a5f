"""Compiled blocks under tp, sp, cp and ep compute what one process computes without compiling. The tracer is real;
generated code is paid for once."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from tests.parity.cases import GPT2, LLAMA
from tests.parity.dropout_cases import cases as dropout_cases
from tests.parity.moe_cases import moe_cases
from weft.memory import repeated_blocks
from weft.testing import Case, DecoderCase, ParityResult, train_case

RTOL = 1e-10


def chosen(kind: str) -> dict[str, Case]:
    if kind == "experts":
        return {name: case for name, case in moe_cases().items() if name in ("aux", "bias")}
    if kind == "dropout":
        return {"gpt2": dropout_cases()["gpt2"]}
    return {
        "llama": DecoderCase(dataclasses.replace(LLAMA, num_layers=1), num_steps=2),
        "gpt2": DecoderCase(dataclasses.replace(GPT2, num_heads=4, num_kv_heads=4), num_steps=2, documents=True),
    }


def train_traced(plan: str, cases: dict[str, Case], backend: str) -> dict[str, ParityResult]:
    """On each rank, with another backend in the place of the one that generates code."""
    module = importlib.import_module("weft.parallel.parallelize")
    before = module.compile_blocks

    def compile_blocks(model: torch.nn.Module) -> None:
        for block in repeated_blocks(model).values():
            block.compile(backend=backend)

    module.compile_blocks = compile_blocks
    torch._dynamo.reset()
    try:
        return {name: train_case(plan, case) for name, case in cases.items()}
    finally:
        module.compile_blocks = before


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("tp=2", "decoders"),
        ("tp=2 sp=on recompute=full", "decoders"),
        ("cp=2 cp_mode=gather zero=1", "decoders"),
        ("dp_shard=2 ep=2 zero=2", "experts"),
        ("tp=2 ep=2 sp=on", "experts"),
        ("tp=2 sp=on", "dropout"),
    ],
)
def test_traced_blocks(plan, kind, ranks2):
    cases = chosen(kind)
    wanted = {name: train_case("precision=fp64", case) for name, case in cases.items()}
    for found in ranks2.run(train_traced, f"{plan} compile=on precision=fp64", cases, "aot_eager"):
        for name, result in found.items():
            assert result.largest_difference(wanted[name]) < RTOL, name


def test_generated_code_under_sequence_parallelism(ranks2):
    case = DecoderCase(dataclasses.replace(LLAMA, num_layers=1), num_steps=1)
    wanted = train_case("precision=fp64", case)
    for found in ranks2.run(train_case, "tp=2 sp=on compile=on precision=fp64", case):
        assert found.largest_difference(wanted) < RTOL
