"""Weights as bytes, row by row: bounds, what stays exact, and that no cut between ranks changes a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.comm.wire.codes import RowCodes, RowSlice
from weft.config.wire_formats import wire_spec

SPEC = wire_spec("int8")
SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 5), st.integers(1, 600)),
        st.tuples(st.integers(1, 700)),
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 80)),
    ),
    min_size=1,
    max_size=5,
)


def travelled(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What one rank's parts become."""
    codec = RowCodes(SPEC, [RowSlice.of(part.shape) for part in parts], parts[0].dtype)
    flat = torch.cat([part.reshape(-1) for part in parts])
    out = torch.full_like(flat, torch.nan)
    codec.decode(codec.encode(flat)[None], out[None])
    pieces = out.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@given(SHAPES, st.integers(0, 99), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_each_value_is_off_by_half_a_step_at_most_and_vectors_by_nothing(shapes, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype) for shape in shapes]
    for part, found in zip(parts, travelled(parts), strict=True):
        if part.ndim < 2 or not part.numel():
            assert torch.equal(found, part)
            continue
        for x, y in zip(part.view(len(part), -1).double(), found.view(len(part), -1).double(), strict=True):
            for block, was in zip(x.split(256), y.split(256), strict=True):
                # The scale is up to a bf16 step above; decoded values are rounded to the tensor's own format.
                step = float(block.abs().max()) / 127 * (1 + 2**-7)
                slack = float(block.abs().max()) * torch.finfo(dtype).eps
                assert float((block - was).abs().max()) <= step / 2 + slack


@given(st.integers(1, 9), st.integers(1, 600), st.integers(1, 8), st.integers(0, 99))
def test_how_rows_lie_on_ranks_changes_no_bit(rows, columns, cut, seed):
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    (together,) = travelled([whole])
    apart = [travelled([part])[0] for part in whole.split(min(cut, rows))]
    assert torch.equal(torch.cat(apart), together)


def test_parts_of_several_ranks_are_decoded_each_to_its_place():
    shapes = [RowSlice.of(shape) for shape in ((3, 300), (7,), (2, 4, 9))]
    codec = RowCodes(SPEC, shapes, torch.float32)
    flats = torch.randn(4, codec.numel)
    codes = torch.stack([codec.encode(flat) for flat in flats])
    out = torch.empty_like(flats)
    codec.decode(codes, out)
    for flat, found in zip(flats, out, strict=True):
        alone = torch.empty(1, codec.numel)
        codec.decode(codec.encode(flat)[None], alone)
        assert torch.equal(found, alone[0])
        assert torch.equal(found[900:907], flat[900:907])
        assert not torch.equal(found, flat)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_come_out_finite(bad):
    weight = torch.ones(3, 300)
    weight[1, 17] = bad
    (found,) = travelled([weight])
    assert not found[1, :256].isfinite().any()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


def test_bytes_are_those_that_the_planner_counts():
    codec = RowCodes(SPEC, [RowSlice.of((64, 512)), RowSlice.of((128, 1024))], torch.bfloat16)
    numel = 64 * 512 + 128 * 1024
    assert codec.num_bytes == SPEC.num_bytes(numel) == numel * (1 + 2 / 256)
