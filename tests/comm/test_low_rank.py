"""Low-rank gradient compression: sums of rank r, their residuals, and which matrices are compressed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.comm.collectives import start_all_reduce, start_reduce_scatter
from weft.comm.mesh import build_mesh
from weft.comm.wire.coder import Coders
from weft.comm.wire.low_rank import Matrix, matrices_of
from weft.comm.wire.wire_format import find_wire
from weft.config.plan import Plan

ROWS, COLUMNS = 96, 80
NUMEL = 40 + ROWS * COLUMNS + 24
MATRIX = Matrix(40, ROWS, COLUMNS)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 8),
)
def test_matrices_cover_full_rows_of_a_slice_and_save_bytes(shape, first, last, rank):
    numel = torch.Size(shape).numel()
    start, end = sorted((first % (numel + 1), last % (numel + 1)))
    for one in matrices_of(shape, start, end, 7, rank):
        assert 7 + start <= one.start
        assert one.start + one.numel <= 7 + end
        assert (one.start - 7) % one.columns == 0
        assert numel % one.columns == 0
        assert start > one.start - 7 - one.columns
        assert one.start - 7 + one.numel + one.columns > end
        assert 2 * rank * (one.rows + one.columns) < one.numel
        assert len(shape) > 1


@pytest.mark.parametrize(
    "shape, found",
    [
        ([128, 512], (128, 512)),
        ([64, 64, 3, 3], (64, 576)),
        ([8, 64, 128], (512, 128)),
        ([65536], None),
        ([16, 16], None),
        ([8, 100_000], None),
    ],
)
def test_tensor_dims_are_folded_to_a_nearly_square_matrix(shape, found):
    ones = matrices_of(shape, 0, torch.Size(shape).numel(), 0, 4)
    assert [one[1:] for one in ones] == ([found] if found else [])


def of_rank(rank: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, rank, generator=draw, dtype=torch.float64) for n in (ROWS, COLUMNS))
    ends = torch.randn(NUMEL - ROWS * COLUMNS, generator=draw, dtype=torch.float64)
    return torch.cat([ends[:40], (left @ right.t()).reshape(-1), ends[40:]])


def sums_of_low_rank(size: int) -> dict[str, object]:
    """Return sums, residual balances and checks of low-rank collectives over several steps."""
    axis = build_mesh(Plan.parse(f"dp_replicate={size}")).data
    found: dict[str, object] = {}

    def fresh() -> Coders:
        return Coders(find_wire("fp32"), find_wire("powersgd:4"))

    def step(coders: Coders, flat: torch.Tensor, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        coder = coders.outer("one")
        coder.matrices = [MATRIX]
        out = torch.empty_like(flat)
        pending = start_all_reduce(out.copy_(flat), axis, wire=coder)
        (other,) = start_all_reduce(torch.ones(1), axis).wait()  # begins between the two stages
        pending.wait()
        coders.commit(clip)
        assert other == size
        return out, dict(coder.states())["summands-1x7744/residual"][0].clone()

    low, _ = step(fresh(), of_rank(4 // size, axis.rank))  # the sum has rank 4 at most
    found["low"] = low
    full = of_rank(COLUMNS, axis.rank)
    coders, applied, residual_before = fresh(), [], torch.zeros(NUMEL, dtype=torch.float64)
    for clip in (1.0, 0.5, 1.0):
        sums, residual = step(coders, full, clip)
        balance = [start_all_reduce(one.clone(), axis).wait() for one in (residual_before, residual, full)]
        found.setdefault("left", []).append(
            float((clip * (balance[0] + balance[2]) - clip * sums - balance[1]).abs().max())
        )
        applied.append(sums)
        residual_before = residual
    found["sums"] = applied
    coders = fresh()
    own = torch.empty(NUMEL // size, dtype=torch.float64)
    coder = coders.outer("one")
    coder.matrices = [MATRIX]
    start_reduce_scatter(full, axis, out=own, wire=coder).wait()
    found["part"] = bool(torch.equal(own, applied[0].view(size, -1)[axis.rank]))
    spoilt = full.clone()
    spoilt[50] = float("nan")
    coder = fresh().outer("one")
    coder.matrices = [MATRIX]
    found["spoilt"] = bool(start_all_reduce(spoilt, axis, wire=coder).wait()[MATRIX.start :][:5].isfinite().any())
    return found


def check(pool, size: int) -> None:
    answers = pool.run(sums_of_low_rank, size)
    exact = sum(of_rank(4 // size, rank) for rank in range(size))
    for found in answers:
        torch.testing.assert_close(found["low"], exact, rtol=0, atol=1e-10)
        assert max(found["left"]) < 1e-10
        assert found["part"]
        assert not found["spoilt"]
        assert all(torch.equal(one, other) for one, other in zip(found["sums"], answers[0]["sums"], strict=True))
    references = [reference_sum(size, steps) for steps in (1, 2, 3)]
    for one, other in zip(answers[0]["sums"], references, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def reference_sum(size: int, steps: int) -> torch.Tensor:
    """Return the sum of the last of `steps` steps of Vogels et al., algorithms 1 and 2, computed in one process.

    The residuals are scaled by the clip factors of the test.
    """
    import hashlib

    seed = int.from_bytes(hashlib.blake2b(b"one outer 40", digest_size=7).digest(), "little")
    draw = torch.Generator().manual_seed(seed)
    basis = torch.randn(COLUMNS, 4, generator=draw, dtype=torch.float64)
    flats = [of_rank(COLUMNS, rank) for rank in range(size)]
    residuals = [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in flats]
    sums = torch.empty(0)
    for clip in (1.0, 0.5, 1.0)[:steps]:
        matrices = [MATRIX.of(flat) + one for flat, one in zip(flats, residuals, strict=True)]
        thin = torch.linalg.qr(sum(matrices) @ basis)[0]
        basis = sum(matrices).t() @ thin
        sums = thin @ basis.t()
        residuals = [clip * (matrix - sums / size) for matrix in matrices]
    full_sum = sum(flats)
    MATRIX.of(full_sum).copy_(sums)
    return full_sum


def test_sums_match_powersgd_and_are_exact_for_rank_four(ranks2):
    check(ranks2, 2)


@pytest.mark.full
def test_sums_match_powersgd_on_four_ranks(ranks4):
    check(ranks4, 4)
