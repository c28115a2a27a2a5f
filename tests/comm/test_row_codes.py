"""Row-wise int8 codes of weights: error bounds, exact vectors, and bits that do not depend on sharding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.comm.wire.codes import RowCodes, RowSlice
from weft.config.fields.wire_formats import wire_spec

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


def encoded_and_decoded(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `parts` after encoding and decoding on one rank."""
    codec = RowCodes(SPEC, [RowSlice.of(part.shape) for part in parts], parts[0].dtype)
    flat = torch.cat([part.reshape(-1) for part in parts])
    out = torch.full_like(flat, torch.nan)
    codec.decode(codec.encode(flat)[None], out[None])
    decoded = out.split([part.numel() for part in parts])
    return [one.view(part.shape) for one, part in zip(decoded, parts, strict=True)]


@given(SHAPES, st.integers(0, 99), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_matrix_error_is_at_most_half_a_step_and_vectors_are_exact(shapes, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype) for shape in shapes]
    for part, found in zip(parts, encoded_and_decoded(parts), strict=True):
        if part.ndim < 2 or not part.numel():
            assert torch.equal(found, part)
            continue
        for x, y in zip(part.view(len(part), -1).double(), found.view(len(part), -1).double(), strict=True):
            for block, was in zip(x.split(256), y.split(256), strict=True):
                # The scale may be one bf16 step larger. Decoded values are rounded to the tensor's dtype.
                step = float(block.abs().max()) / 127 * (1 + 2**-7)
                slack = float(block.abs().max()) * torch.finfo(dtype).eps
                assert float((block - was).abs().max()) <= step / 2 + slack


@given(st.integers(1, 9), st.integers(1, 600), st.integers(1, 8), st.integers(0, 99))
def test_sharding_of_rows_changes_no_bit(rows, columns, shard_rows, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    (unsharded,) = encoded_and_decoded([weight])
    sharded = [encoded_and_decoded([part])[0] for part in weight.split(min(shard_rows, rows))]
    assert torch.equal(torch.cat(sharded), unsharded)


def test_parts_of_several_ranks_decode_independently():
    shapes = [RowSlice.of(shape) for shape in ((3, 300), (7,), (2, 4, 9))]
    codec = RowCodes(SPEC, shapes, torch.float32)
    flats = torch.randn(4, codec.numel)
    codes = torch.stack([codec.encode(flat) for flat in flats])
    out = torch.empty_like(flats)
    codec.decode(codes, out)
    for flat, found in zip(flats, out, strict=True):
        single = torch.empty(1, codec.numel)
        codec.decode(codec.encode(flat)[None], single)
        assert torch.equal(found, single[0])
        assert torch.equal(found[900:907], flat[900:907])
        assert not torch.equal(found, flat)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_value_makes_only_its_block_non_finite(bad):
    weight = torch.ones(3, 300)
    weight[1, 17] = bad
    (found,) = encoded_and_decoded([weight])
    assert not found[1, :256].isfinite().any()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


def test_num_bytes_match_the_planner():
    codec = RowCodes(SPEC, [RowSlice.of((64, 512)), RowSlice.of((128, 1024))], torch.bfloat16)
    numel = 64 * 512 + 128 * 1024
    assert codec.num_bytes == SPEC.num_bytes(numel) == numel * (1 + 2 / 256)
