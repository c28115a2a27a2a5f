"""What checkpoints of an adapter hold in place of its base: what was adapted, and digests of the base's weights.

The digest of a weight is a sum over elements of hashes of (place, value), so that every rank digests what it holds and
the plan does not show. At most `SAMPLES` elements of a weight count, spread evenly, and of each its bfloat16 value:
frozen weights are held rounded under precision=bf16, and a base is the same base there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from weft.checkpoint.parts import Part
from weft.comm import all_reduce
from weft.errors import CheckpointError
from weft.models.adapters import Adapted, adapted
from weft.parallel import data_parallel
from weft.parallel.placement import is_attached, originals

#: Elements of one weight that its digest looks at.
SAMPLES = 2**14
#: Odd constants of the hash; those above 2^63 as the negative numbers that torch takes for them.
_PLACE, _VALUE, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def names_left_out(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that a checkpoint of the model leaves out: those of an adapter's frozen base."""
    if adapted(model) is None:
        return frozenset()
    if is_attached(model):
        return frozenset(name for name, one in originals(model).items() if one.is_parameter and not one.is_trained)
    return frozenset(name for name, param in model.named_parameters() if not param.requires_grad)


def adapter_state(model: nn.Module) -> dict[str, Any] | None:
    """Return what a checkpoint says of the model's adapter and its base, as JSON; None where it has no adapter.

    All ranks call it where the model is parallelized.
    """
    record = adapted(model)
    return None if record is None else {**record.said(), "base": _digests(model)}


def check_base(model: nn.Module, saved: Mapping[str, Any] | None, path: object) -> None:
    """Refuse a checkpoint of another base or adapter than the model's. All ranks call it.

    Args:
        model: with an adapter or not.
        saved: what `adapter_state` gave when the checkpoint was saved.
        path: of the checkpoint, for the error.

    Raises:
        CheckpointError: with the first thing that differs.
    """
    record = adapted(model)
    if record is None or saved is None:
        _refuse_one_alone(record, saved, path)
        return
    now = adapter_state(model) or {}
    for key in ("kind", "rank", "alpha"):
        if now[key] != saved[key]:
            raise CheckpointError(
                f"{path}: it holds an adapter with {key}={saved[key]}, and the model's has {key}={now[key]}. "
                f"Use {key}={saved[key]}."
            )
    if differing := sorted(now["layers"].keys() ^ saved["layers"].keys()):
        which = "does not adapt" if differing[0] in now["layers"] else "adapts"
        raise CheckpointError(
            f"{path}: its adapter {which} {differing[0]!r}, and the model's differs. Use the targets it was saved with."
        )
    for name, digest in now["base"].items():
        _expect_equal(name, digest, saved["base"], path)


def expect_same_base(name: str, tensor: torch.Tensor, base: Mapping[str, str], path: object) -> None:
    """Refuse a weight, whole, that is not the one beside which an adapter was trained.

    Args:
        name: of the weight.
        tensor: its values, in their own order.
        base: the digests that `adapter_state` gives.
        path: of the checkpoint, for the error.

    Raises:
        CheckpointError: for a weight with other values, or one that was not there.
    """
    digest = digest_of(tensor.detach().contiguous().view(-1), Part(tuple(tensor.shape)))
    _expect_equal(name, _as_text(digest), base, path)


def _expect_equal(name: str, digest: str, base: Mapping[str, str], path: object) -> None:
    if base.get(name) != digest:
        what = "had other values" if name in base else "was not there"
        raise CheckpointError(
            f"{path}: an adapter of another base: {name!r} {what} when it was saved. "
            "Start from the weights that the adapter was trained on."
        )


def _as_text(digest: int | torch.Tensor) -> str:
    return f"{int(digest) & (2**64 - 1):016x}"


def _refuse_one_alone(record: Adapted | None, saved: Mapping[str, Any] | None, path: object) -> None:
    if saved is not None:
        raise CheckpointError(
            f"{path}: it holds an adapter alone (kind={saved['kind']}, rank={saved['rank']}), and the model has none. "
            "Call add_adapter on the base before parallelize."
        )
    if record is not None:
        raise CheckpointError(
            f"{path}: it holds a whole model, and this one trains an adapter alone. Load it into a model without an "
            "adapter."
        )


def _digests(model: nn.Module) -> dict[str, str]:
    """Of each weight of the base, by name, in the order of the plain model."""
    if not is_attached(model):
        params = dict(model.named_parameters())
        sums = {name: digest_of(params[name].detach().contiguous().view(-1), Part(tuple(params[name].shape)))
                for name in sorted(names_left_out(model))}  # fmt: skip
        return {name: _as_text(total) for name, total in sums.items()}
    engine, wanted = data_parallel(model), names_left_out(model)
    names = sorted(name for name in wanted if originals(model)[name].first == name)
    place = {name: index for index, name in enumerate(names)}
    totals = torch.zeros(len(names), dtype=torch.int64, device=engine.axes.mesh.device)
    for one in engine.stretches():
        mine = one.mine(engine.axes.mesh.rank) if one.name in place else None
        if mine is not None:
            totals[place[one.name]] += digest_of(mine[1].detach(), one.part, mine[0]).to(totals.device)
    totals = all_reduce(totals, engine.axes.world)
    return {name: _as_text(total) for name, total in zip(names, totals.tolist(), strict=True)}


def digest_of(flat: torch.Tensor, part: Part, start: int = 0) -> torch.Tensor:
    """Return what a run of a part's line adds to the digest of its tensor, int64, 0-d.

    Args:
        flat: the run's elements, 1-D.
        part: which elements of the whole tensor the line holds.
        start: the run's first element, as a place in the line.
    """
    numel = torch.Size(part.shape).numel()
    step = max(1, -(-numel // SAMPLES)) | 1  # odd: else some columns would never be looked at
    places = torch.arange(0, numel, step, device=flat.device)
    line, here = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
    rest = places
    strides = part.strides()
    for dim in reversed(range(len(part.shape))):
        index, rest = rest % part.shape[dim], rest // part.shape[dim]
        if part.rows is not None and dim == part.dim:
            index, here = _in_rows(index, part.rows)
        line += index * strides[dim]
    here &= (line >= start) & (line < start + flat.numel())
    values = flat[line[here] - start]
    if values.is_floating_point():
        values = values.to(torch.float32).to(torch.bfloat16).view(torch.int16)
    mixed = (places[here] + 1) * _PLACE ^ (values.to(torch.int64) + 2**20) * _VALUE
    return ((mixed ^ mixed >> 31) * _MIX).sum()


def _in_rows(index: torch.Tensor, rows: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in joined ranges of rows, and whether a row is in one of them."""
    found, here, before = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for low, high in rows:
        inside = (index >= low) & (index < high)
        found, here, before = found.where(~inside, index - low + before), here | inside, before + high - low
    return found, here
