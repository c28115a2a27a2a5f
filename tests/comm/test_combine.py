"""`Combiner` and operation signatures, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.reference import combined, data
from weft.comm.transports.link import BLOCK_BYTES, DTYPES, KINDS, OPS, Combiner, Operation, explain_signature, sign


@pytest.mark.parametrize("own", [0, 1, 2, 4])
@pytest.mark.parametrize("numel", [1, 5, BLOCK_BYTES // 4 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_may_alias_any_part(dtype, numel, own):
    parts = [data(rank, numel, dtype) for rank in range(5)]
    combine = Combiner()
    for op in OPS:
        copies = [part.clone() for part in parts]
        combine(copies, op, copies[own])
        assert torch.equal(copies[own], combined(5, numel, dtype, op))


def test_bf16_parts_are_added_in_fp32():
    # 256 + 1 is 256 in bf16, so adding ones in bf16 would not change the sum.
    parts = [torch.tensor([256.0]).bfloat16(), *[torch.ones(1).bfloat16() for _ in range(4)]]
    out = torch.empty(1).bfloat16()
    Combiner()(parts, "sum", out)
    assert float(out) == 260


@given(
    st.sampled_from(KINDS), st.sampled_from(OPS), st.sampled_from(DTYPES), st.integers(0, 4095), st.integers(1, 2**40)
)
@settings(max_examples=100, deadline=None)
def test_signature_describes_kind_op_dtype_root_and_numel(kind, op, dtype, root, numel):
    tensor = torch.empty(0, dtype=dtype).expand(0)

    class Sized:
        def __init__(self) -> None:
            self.dtype = tensor.dtype

        def numel(self) -> int:
            return numel

    operation = Operation(kind, "tp", Sized(), tensor, op, root, most=numel)
    signature = sign(operation)
    assert 0 <= signature < 2**63
    description = explain_signature(signature)
    assert description.startswith(kind)
    if kind != "barrier":
        amount = f"at most {numel}" if kind == "all_to_all" else numel
        assert f"of {amount} {str(dtype).removeprefix('torch.')}" in description
    if "reduce" in kind:
        assert f"({op})" in description
    if kind == "broadcast":
        assert f"from {root} " in description
