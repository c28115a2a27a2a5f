"""Groups of consecutive samples of a global batch, and where their samples lie."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ModelError
from weft.mesh import Axis, Mesh
from weft.parallel.randomness import SampleNumbers
from weft.spec import shares


@dataclass(frozen=True, slots=True)
class GroupCut:
    """How the groups of one microbatch lie.

    index: of the microbatch in the step. samples: this rank's. first: the number of the first group that has samples in
    it. num_groups: in the microbatch, over the ranks of `axis`. axis: the ranks that share groups; None: none do.
    ends_alone: the last group of the global batch is one sample. runs: the samples of each rank of `axis`, or of this
    one.
    """

    index: int
    samples: SampleNumbers
    first: int
    num_groups: int
    axis: Axis | None
    ends_alone: bool = False
    runs: tuple[range, ...] = ()


class SampleGroups:
    """The groups of `size` samples that a global batch is divided into.

    Args:
        mesh: of the ranks.
        size: samples of a group; the last of a batch may be smaller.
        said: the setting and its value, for errors.
        name: the setting.
    """

    def __init__(self, mesh: Mesh, size: int, said: str, name: str):
        self.size, self._mesh, self._said, self._name = size, mesh, said, name

    def cut_of(self, samples: SampleNumbers, index: int) -> GroupCut:
        """Return how the groups of a microbatch lie.

        Args:
            samples: this rank's.
            index: of the microbatch in the step.

        Raises:
            ModelError: where a group has samples in another microbatch.
        """
        size, data, parts = self.size, self._mesh.data, self._mesh.plan.microbatches_per_step
        numbers, num_ranks = samples.numbers, data.size
        count = len(numbers) * num_ranks * parts if samples.total is None else samples.total
        runs = shares.share_out(count, num_ranks * parts)[index * num_ranks : (index + 1) * num_ranks]
        start, stop = runs[0].start, runs[-1].stop
        own = runs[data.rank]
        if list(numbers) != list(own):
            return self._own_alone(samples, index, count)
        if not _on_borders(range(start, stop), size, count):
            raise ModelError(
                f"{self._said}: a microbatch holds samples {start} to {stop - 1} of the global batch over all "
                f"ranks, and a group must lie in one microbatch. Use a {self._name} that divides {stop - start}, or "
                f"fewer microbatches."
            )
        alone = count % size == 1 or size == 1
        if all(_on_borders(run, size, count) for run in runs):
            return GroupCut(index, samples, own.start // size, max(1, -(-len(own) // size)), None, alone, (own,))
        axis = self._sharing(len(own), count % (num_ranks * parts) == 0)
        among = (
            runs if axis is data else [runs[data.rank // axis.size * axis.size + place] for place in range(axis.size)]
        )
        first = among[0].start // size
        return GroupCut(index, samples, first, -(-(among[-1].stop - first * size) // size), axis, alone, tuple(among))

    def _own_alone(self, samples: SampleNumbers, index: int, count: int) -> GroupCut:
        """Of samples that lie elsewhere than Weft puts them: fine where they are whole groups."""
        numbers = samples.numbers
        is_run = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        if not is_run or not _on_borders(range(numbers[0], numbers[-1] + 1), self.size, count):
            raise ModelError(
                f"{self._said}: this rank's microbatch holds parts of groups, and Weft does not know where "
                "the other parts are. Pass the DataLoader through run.shard, which deals out samples in order."
            )
        own = range(numbers[0], numbers[-1] + 1)
        return GroupCut(index, samples, numbers[0] // self.size, -(-len(numbers) // self.size), None, runs=(own,))

    def _sharing(self, rows: int, is_even: bool) -> Axis:
        """The ranks among which groups lie: as few as there are where all ranks have equally many samples."""
        data, plan = self._mesh.data, self._mesh.plan
        if rows * data.size == self.size:
            return data
        if is_even and rows and self.size % rows == 0 and data.size % (ranks := self.size // rows) == 0:
            inner = plan.dp_shard
            names = (f"dp_shard/{ranks}",) if inner % ranks == 0 else (f"dp_replicate/{ranks // inner}", "dp_shard")
            first = data.rank // ranks * ranks
            if (inner % ranks == 0 or ranks % inner == 0) and self._mesh.ranks_over(names) == data.ranks[
                first : first + ranks
            ]:
                return self._mesh[names]
        return data


def _on_borders(run: range, size: int, count: int) -> bool:
    """Whether a run of samples is whole groups; the last group of a batch may be smaller."""
    return not run or (run.start % size == 0 and (run.stop % size == 0 or run.stop == count))
