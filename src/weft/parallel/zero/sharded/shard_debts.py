"""What replicas owe of rounded gradients under zero=3: of each unit's sums over the ranks that divide it.

A unit's sums on a rank are its rows of the unit's parameters, one after another; each parameter has as many rows on
every rank, of which the last ones may be filled up. Names in checkpoints are those of `flat/slot_debts.py`: any plan
takes over what another one owed. Nobody owes parts of totals: a rule refuses int4 between more than two replicas, whose
owners would cut units where no parameter ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.checkpoint.parts import Deal
from weft.comm.wire import Coder, Coders, Matrix, matrices_of
from weft.errors import CommError
from weft.mesh import Axis
from weft.parallel.local_tensors import StateSource, Stretch
from weft.parallel.placement import AxisMap
from weft.parallel.zero.owed import read_owed, replicas_in
from weft.parallel.zero.sharded.param_shards import Shard
from weft.parallel.zero.sharded.shard_stretches import ShardStretches


@dataclass(slots=True)
class OwingUnit:
    """A unit whose sums over replicas owe what they round off.

    unit: its number. shards: of its parameters that are trained, in the order of their sums. axis: the replicas.
    """

    unit: int
    coders: Coders
    coder: Coder
    shards: Sequence[Shard]
    axis: Axis

    def sending(self, numel: int) -> Coder:
        """Return what its sums travel as in this step.

        numel: of the sums.

        Raises:
            CommError: where they are not those of all its parameters.
        """
        if numel != self.numel:
            raise CommError(
                f"compress={self.coder.wire.spec.name}: unit {self.unit} sums {numel} of its {self.numel} values: a "
                "forward left parameters out. Use compress=int8, which owes nothing."
            )
        self.coder.matrices = () if self.coders.is_exact else self.matrices()
        return self.coder

    @property
    def numel(self) -> int:
        """Elements of its sums on a rank."""
        return sum(_length(shard) for shard in self.shards)

    def matrices(self) -> list[Matrix]:
        """Return where this rank's rows of matrices lie in its sums, for a wire that sums them in low rank."""
        rank = self.coder.wire.spec.rank
        found: list[Matrix] = []
        for shard, at in self.places() if rank else ():
            shape = tuple(shard.local.shape)
            found += matrices_of(shape, 0, shard.local.numel(), at, rank)
        return found

    def places(self) -> Iterator[tuple[Shard, int]]:
        """Yield each parameter's shard, and its first element in the sums."""
        at = 0
        for shard in self.shards:
            yield shard, at
            at += _length(shard)

    @property
    def key(self) -> str:
        """The name of its debt among what its coder keeps."""
        return f"summands-1x{self.numel}/residual"


class ShardDebts:
    """Debts of sharded parameters.

    Args:
        placed: stretches of the shards.
        shards: by name.
        plain: parameters that are whole on each rank.
        axes: of the module.
        coders: keep what is owed until the first step is taken.
    """

    def __init__(
        self,
        placed: ShardStretches,
        shards: Mapping[str, Shard],
        plain: Mapping[str, nn.Parameter],
        axes: AxisMap,
        coders: Coders,
    ):
        self._placed, self._shards, self._plain, self._axes, self._coders = placed, shards, plain, axes, coders
        #: Units that owe; none where the wire over replicas does not feed back.
        self.units: list[OwingUnit] = []

    def sending(self, unit: int, params: Sequence[nn.Parameter], axis: Axis, coder: Coder) -> Callable[[int], Coder]:
        """Return what gives the wire of a unit's sums over replicas, by their number; which may owe from here on.

        Args:
            unit: its number.
            params: of fully_shard, as it reduces them.
            axis: the replicas.
            coder: of these sums.
        """
        if not coder.wire.feeds_back or axis.size == 1:
            return lambda numel: coder
        of = {id(shard.param): shard for shard in self._shards.values()}
        found = OwingUnit(unit, self._coders, coder, [of[id(one)] for one in params if one.requires_grad], axis)
        self.units.append(found)
        return found.sending

    def stretches(self) -> Iterator[Stretch]:
        """Yield what this rank owes, in its own memory; no collective."""
        for unit in self.units:
            if (flat := dict(unit.coder.states()).get(unit.key)) is not None:
                yield from self._of(unit, flat.view(-1))

    @torch.no_grad()
    def take(self, source: StateSource) -> list[str]:
        """Take over what any plan owed. Returns lines for people, where it is not as it was."""
        saved = replicas_in(source)
        if not saved:
            return []
        owing = {shard.name for unit in self.units for shard in unit.shards}
        self._give(source, {name: one for name, one in self._held.items() if name not in owing})
        number = self.units[0].axis.size if self.units else 0
        for unit in self.units:
            local = unit.shards[0].local
            debt = torch.zeros(unit.numel, dtype=local.dtype, device=local.device)
            whose = (str(unit.axis.rank),) if saved == number else ()
            for like in self._of(unit, debt):
                read_owed(like, source, whose)
            if saved != number:
                debt /= number
            rest = {name: tensor for name, tensor in unit.coder.states() if not name.endswith("/residual")}
            unit.coder.load({**rest, unit.key: debt[None]})
        if self._coders.owed:
            return ["what compress rounded off before and still owes goes with the gradients of the first step"]
        return [] if saved == number else [f"what {saved} replicas owe of rounded gradients is shared by {number} now"]

    @property
    def _held(self) -> dict[str, nn.Parameter]:
        return {name: shard.local for name, shard in self._shards.items()} | dict(self._plain)

    def _give(self, source: StateSource, held: Mapping[str, nn.Parameter]) -> None:
        """Let what is owed of these go with the first step's sums."""
        for name, param in held.items():
            if not param.requires_grad:
                continue
            total = torch.zeros_like(param.detach())
            found = self._axes.stretch(name, total) if name in self._plain else self._placed.like(name, total)
            read_owed(replace(found, name=f"{found.name}/residual."), source)
            if not self.units or total.any():
                self._coders.owed[name] = total

    def add(self) -> None:
        """Add what is owed to the sums of this step."""
        for name, total in self._coders.owed.items():
            grad = self._shards[name].local.grad if name in self._shards else self._plain[name].grad
            if grad is not None:
                grad.add_(total, alpha=self._coders.unit)

    def _of(self, unit: OwingUnit, flat: torch.Tensor) -> Iterator[Stretch]:
        """Stretches of what this replica owes of a unit's parameters."""
        for shard, at in unit.places():
            numel = shard.local.numel()
            like = self._placed.like(shard.name, shard.local)
            deal = Deal(
                shard.axis.ranks, max(_length(shard), 1)
            )  # a rule refuses tp, pp and ep: no other owes the same
            if numel:
                name = f"{like.name}/residual.{unit.axis.rank}"
                yield Stretch(name, like.part, deal, like.start, flat[at : at + numel])


def _length(shard: Shard) -> int:
    """Elements of a shard as it travels: as many rows on all ranks."""
    return shard.rows * shard.param.shape[1:].numel()
