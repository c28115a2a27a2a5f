"""What all chance of a step comes from: seeds of torch's generators, one for each microbatch of a rank.

They are functions of (seed, step, first global sample), so nothing is left to save.
"""

from __future__ import annotations

from weft.errors import ModelError
from weft.mesh import Mesh
from weft.spec.config import RunConfig
from weft.train import Microbatches
from weft.train.engine import derive_seed


def seeds_by_place(config: RunConfig, mesh: Mesh, number: int) -> list[int]:
    """Return the seeds of microbatches of equally many samples.

    Args:
        config: of the run.
        mesh: where this rank stands on it.
        number: steps done before.
    """
    axis, num_micro = mesh.reader, mesh.plan.microbatches_per_step
    batch, seed = config.train.global_batch, config.seed
    per_micro = batch // (axis.size * num_micro)
    first = number * batch + axis.rank * per_micro
    part = _part(mesh)
    return [derive_seed(seed, number, first + micro * axis.size * per_micro, *part) for micro in range(num_micro)]


def seeds_by_sample(config: RunConfig, mesh: Mesh, number: int, whole: Microbatches) -> list[int]:
    """Return the seeds of microbatches that cost decides: by the first sample that each of them has.

    Args:
        config: of the run.
        mesh: where this rank stands on it.
        number: steps done before.
        whole: the microbatches.

    Raises:
        ModelError: where the task made new tensors, so that nobody knows whose samples they hold.
    """
    if whole.samples is None:
        raise ModelError(
            "data.batching=cost: before_step returned batches of new tensors, so Weft cannot tell whose samples "
            "they hold. Return changed ones with the old tensors among them, or leave data.batching out."
        )
    first, seed = number * config.train.global_batch, config.seed
    part = _part(mesh)
    return [
        derive_seed(seed, number, first + min(one.numbers, default=-1 - mesh.data.rank), *part) for one in whole.samples
    ]


def _part(mesh: Mesh) -> tuple[int, ...]:
    """Ranks of cp have different tokens of the same samples: what drops some of them must not drop alike."""
    return (mesh["cp"].rank,) if mesh.plan.cp > 1 else ()
