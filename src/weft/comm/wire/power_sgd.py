"""Low-rank sums of matrices (PowerSGD): two all_reduces, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.transports.link import Operation, unobserved
from weft.comm.wire.coder import Coder
from weft.comm.wire.low_rank import BASIS, Matrix, first_basis, orthonormal


class LowRankSum(Pending):
    """A sum of the ranks' flat tensors in flight. The coder's matrices are sent in low rank, the rest unchanged.

    `out` gets all sums, or this rank's slice of them if it has fewer elements.
    """

    def __init__(self, name: str, flat: torch.Tensor, axis: Axis, out: torch.Tensor, coder: Coder):
        self._coder, self._over, self._out, self._name = coder, axis, out, name
        self._matrices, self._rank = coder.matrices, coder.wire.spec.rank
        self._second: Pending | None = None
        self._thin: list[torch.Tensor] = []
        self._done = False
        with torch.no_grad(), unobserved():
            self._owing = coder.with_residual(self._key(flat), flat[None])[0]
            kept = coder.carried(BASIS)
            sizes = [one.columns * self._rank for one in self._matrices]
            if kept is not None and kept["q"].numel() == sum(sizes):
                parts = torch.split(kept["q"], sizes) if sizes else ()
                self._bases = [part.view(-1, self._rank) for part in parts]
            else:
                self._bases = [first_basis(one, self._rank, coder.name, self._owing) for one in self._matrices]
            products = [one.of(self._owing) @ basis for one, basis in zip(self._matrices, self._bases, strict=True)]
            self._gaps = _gaps_of(self._matrices, flat.numel())
            rest = [self._owing[gap] for gap in self._gaps]
            self._sums = torch.cat([*rest, *(product.reshape(-1) for product in products)])
        operation = Operation("all_reduce", axis.label, self._sums, self._sums)
        super().__init__(self._sums, axis, operation)
        if self._matrices:
            axis.staged.append(self)

    @staticmethod
    def _key(flat: torch.Tensor) -> str:
        return f"summands-1x{flat.numel()}"

    def go_on(self) -> None:
        """Finish the first sums and begin the second. Called once."""
        super().wait()
        with torch.no_grad(), unobserved():
            start = sum(gap.stop - gap.start for gap in self._gaps)
            for one in self._matrices:
                size = one.rows * self._rank
                self._thin.append(orthonormal(self._sums[start : start + size].view(-1, self._rank)))
                start += size
            pairs = zip(self._matrices, self._thin, strict=True)
            products = torch.cat([(one.of(self._owing).t() @ thin).reshape(-1) for one, thin in pairs])
        operation = Operation("all_reduce", self._over.label, products, products)
        self._second = Pending(products, self._over, operation)

    def wait(self) -> torch.Tensor:
        if not self._done:
            if self in self._over.staged:
                self._over.staged.remove(self)
            if self._matrices and self._second is None:
                self.go_on()
            if self._second is None:
                super().wait()
            products = None if self._second is None else self._second.wait()
            with torch.no_grad(), unobserved():
                self._finish(products)
            self._done = True
        return self._out

    def _finish(self, products: torch.Tensor | None) -> None:
        """Assemble the sums. The approximation error of this rank's summand becomes the residual."""
        whole, start = torch.empty_like(self._owing), 0
        for gap in self._gaps:
            whole[gap] = self._sums[start : start + gap.stop - gap.start]
            start += gap.stop - gap.start
        if products is not None:
            sizes = [one.columns * self._rank for one in self._matrices]
            for one, thin, part in zip(self._matrices, self._thin, torch.split(products, sizes), strict=True):
                torch.mm(thin, part.view(-1, self._rank).t(), out=one.of(whole))
            self._coder.carry(BASIS, {"q": _scaled(products, sizes)})
        rest = torch.zeros_like(self._owing)
        for one in self._matrices:
            torch.sub(one.of(self._owing), one.of(whole), alpha=1 / self._over.size, out=one.of(rest))
        self._coder.owe(self._key(self._owing), rest[None])
        flat = self._out.detach().view(-1)
        flat.copy_(whole if flat.numel() == whole.numel() else whole.view(self._over.size, -1)[self._over.rank])

    def where(self) -> tuple[str, tuple[int, ...]]:
        return self._second.where() if self._second is not None else super().where()

    def late(self) -> tuple[int, ...]:
        return self._second.late() if self._second is not None else super().late()


def _scaled(products: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Scale each basis to a maximum of 1, independent of the loss scale, so that matmuls with it do not underflow."""
    parts = [part / largest if (largest := part.abs().amax()) > 0 else part for part in torch.split(products, sizes)]
    return torch.cat(parts)


def _gaps_of(matrices: Sequence[Matrix], numel: int) -> list[slice]:
    gaps: list[slice] = []
    end = 0
    for one in matrices:
        if one.start > end:
            gaps.append(slice(end, one.start))
        end = one.start + one.numel
    if end < numel:
        gaps.append(slice(end, numel))
    return gaps
