"""The event that describes a failed step, made from the ranks' findings: module, rank and samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.train.engine import TraceKind

#: A sample is an outlier only if its loss exceeds the median of the others by this factor.
_STANDS_OUT = 1.5
#: For a loss spike, a module is named if its output is larger or smaller than for other samples by this factor.
_UNUSUAL = 2.0
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class LossPart:
    """One rank's result for some samples: sum of the losses, their number, and True if all outputs were finite."""

    loss_sum: float
    count: float
    is_finite: bool = True

    @classmethod
    def joined(cls, parts: Sequence[LossPart]) -> LossPart:
        """Combine the results of ranks that compute parts of the same samples."""
        return cls(
            math.fsum(part.loss_sum for part in parts)
            if all(math.isfinite(part.loss_sum) for part in parts)
            else math.nan,
            math.fsum(part.count for part in parts),
            all(part.is_finite for part in parts),
        )

    @property
    def is_bad(self) -> bool:
        """True if a value is not finite."""
        return not (self.is_finite and math.isfinite(self.loss_sum))

    @property
    def mean(self) -> float:
        """The mean loss, or -inf without losses."""
        return self.loss_sum / self.count if self.count else -math.inf


def worst(parts: Sequence[LossPart]) -> int:
    """Return the index of the first part that is not finite, or else of the part with the highest mean loss."""
    bad = [place for place, part in enumerate(parts) if part.is_bad]
    return bad[0] if bad else max(range(len(parts)), key=lambda place: parts[place].mean)


@dataclass(frozen=True, slots=True)
class RankFinding:
    """One rank's findings about the samples that it recomputed.

    Attributes:
        data, stage, place: index of the rank among ranks with different samples, in the pipeline, and within its stage.
        order, module: index and module of the first call with a nonfinite output; -1 and "" if all were finite.
        got_finite: True if the input of that module was finite.
        input_finite: True if the batch was finite.
        weights, gradients: parameters with nonfinite values, or nonfinite gradients, on this rank.
        sizes: sizes of modules' outputs, if this rank has no other samples to compare with.
        unusual: (module, size, usual size) or None.
        error: why results are missing, or "".
    """

    data: int
    stage: int
    place: int
    order: int = -1
    module: str = ""
    got_finite: bool = True
    input_finite: bool = True
    weights: Sequence[str] = ()
    gradients: Sequence[str] = ()
    sizes: Mapping[str, float] | None = None
    unusual: Sequence[Any] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TracedSamples:
    """The samples that caused the failure.

    Attributes:
        data: index of the ranks that read them.
        microbatch: index of their microbatch.
        numbers: indices of the samples in the global batch.
        mean: mean loss of the samples.
        losses: the finite mean losses of all compared parts of the batch.
        all_bad: True if several parts of the batch were compared, and each gave values that are not finite.
    """

    data: int
    microbatch: int
    numbers: Sequence[int]
    mean: float
    losses: Sequence[float]
    all_bad: bool


def judge(kind: TraceKind, samples: TracedSamples, findings: Sequence[RankFinding]) -> dict[str, Any]:
    """Return the event's fields: cause, module, rank, parameters, numbers and text."""
    failed = next((one.error for one in findings if one.error), "")
    ranks = [rank for rank, one in enumerate(findings) if one.data == samples.data]
    first = ranks[0]
    if failed:
        return _to_json("unknown", first, "", f"the second forward that looks for the cause failed ({failed})")
    if kind == "spike":
        return _spike(samples, findings, ranks)
    bad = [rank for rank in ranks if findings[rank].order >= 0]
    unread = [rank for rank in ranks if not findings[rank].input_finite]
    if unread:
        return _to_json("input", unread[0], "", "the batch already has values that are not finite")
    if bad:
        rank = min(bad, key=lambda one: (findings[one].stage, findings[one].order, one))
        return _of_module(findings[rank], rank, samples, findings)
    last = max(ranks, key=lambda rank: (findings[rank].stage, -rank))
    if kind == "gradient":
        return _gradient(findings, last)
    if not math.isfinite(samples.mean):
        text = "all modules have finite outputs, but the loss computed from them is not finite"
        return _to_json("loss", last, "", text)
    return _to_json(
        "unknown", first, "", "a second forward of the same samples, in evaluation mode, gave finite numbers"
    )


def _of_module(
    found: RankFinding, rank: int, samples: TracedSamples, findings: Sequence[RankFinding]
) -> dict[str, Any]:
    holders = [place for place, one in enumerate(findings) if _own(one.weights, found.module)]
    every = ", for every sample" if samples.all_bad else ""
    if holders:
        rank = rank if rank in holders else holders[0]
        names = _own(findings[rank].weights, found.module)
        text = f"{', '.join(names[:_MOST_NAMED])} has values that are not finite on {_ranks(holders)}, so the output "
        text += f"of {found.module} is not finite either{every}"
        return _to_json("weights", rank, found.module, text, parameters=names[:_MOST_NAMED])
    if not found.got_finite:
        parent = found.module.rpartition(".")[0]
        text = f"the input of {found.module} is the first value that is not finite{every}: {parent or 'the model'} "
        return _to_json("module", rank, parent, text + "computes it outside its modules")
    text = f"the output of {found.module} is the first that is not finite{every}; its input and its weights are finite"
    return _to_json("module", rank, found.module, text)


def _gradient(findings: Sequence[RankFinding], last: int) -> dict[str, Any]:
    """Return the event of the first nonfinite gradient in backward, which is the last one in the model's order."""
    held = [rank for rank, one in enumerate(findings) if one.gradients]
    text = "the loss and the outputs of all modules are finite, but the gradient is not"
    if not held:
        return _to_json("gradient", last, "", f"{text}; the samples named have the highest loss")
    rank = max(held, key=lambda one: (findings[one].stage, -one))
    name = findings[rank].gradients[-1]
    text += f": that of {name} is the first in backward's order; the samples named have the highest loss"
    return _to_json("gradient", rank, name.rpartition(".")[0], text, parameters=[name])


def _spike(samples: TracedSamples, findings: Sequence[RankFinding], ranks: Sequence[int]) -> dict[str, Any]:
    # Losses without the highest one, which belongs to these samples.
    others = sorted(loss for loss in samples.losses if math.isfinite(loss))[:-1]
    usual = statistics.median(others) if others else None
    rank, found = ranks[0], None
    for one in ranks:
        seen = findings[one].unusual or _compared_with_others(findings[one], findings)
        if seen and (found is None or _factor(seen) > _factor(found)):
            rank, found = one, seen
    figures: dict[str, float] = {"loss": samples.mean} if math.isfinite(samples.mean) else {}
    if usual is None:
        text = "the step has no other samples to compare with"
        return _to_json("unknown", rank, "", text, figures=figures)
    figures["usual_loss"] = usual
    if samples.mean < _STANDS_OUT * usual:
        text = (
            f"no sample differs clearly (highest loss {samples.mean:.4g}, median of the others {usual:.4g}): "
            "look at the "
        )
        text += "last updates of the weights, not at the data"
        return _to_json("weights", rank, "", text, figures=figures)
    text = f"the loss of the samples named is {samples.mean:.4g}; the median of the others is {usual:.4g}"
    if found is None:
        return _to_json("samples", rank, "", text, figures=figures)
    if _factor(found) < _UNUSUAL:
        text += "; no module's output is unusual, so look at their labels and at the loss function"
        return _to_json("samples", rank, "", text, figures=figures)
    module, size, normal = found
    figures |= {"size": size, "usual_size": normal}
    text += f"; the output of {module} is the most unusual: its size is {size:.4g}, the others' median {normal:.4g}"
    return _to_json("samples", rank, module, text, figures=figures)


def _compared_with_others(own: RankFinding, findings: Sequence[RankFinding]) -> Sequence[Any] | None:
    """Compare with ranks that ran the same part of the model on other samples; return (module, size, usual) or None."""
    peers = [
        one.sizes for one in findings
        if one.sizes and one.data != own.data and (one.stage, one.place) == (own.stage, own.place)
    ]  # fmt: skip
    return unusual(own.sizes, peers) if own.sizes and peers else None


def unusual(sizes: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> tuple[str, float, float] | None:
    """Return (module, size, usual size) of the output that deviates most, or None without a comparison.

    Args:
        sizes: sizes of outputs by module.
        others: the same for other samples.
    """
    found = None
    for module, size in sizes.items():
        known = [one[module] for one in others if module in one and math.isfinite(one[module])]
        if known and math.isfinite(size):
            seen = (module, size, statistics.median(known))
            # Take the first of equally large deviations, because later modules only propagate it.
            if found is None or _factor(seen) > 1.05 * _factor(found):
                found = seen
    return found


def _factor(seen: Sequence[Any]) -> float:
    _, size, usual = seen
    if not size or not usual:
        return 1.0 if size == usual else math.inf
    return max(size / usual, usual / size)


def _own(names: Sequence[str], module: str) -> list[str]:
    return [name for name in names if name.startswith(f"{module}.")]


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (" and others" if len(ranks) > _MOST_NAMED else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"


def _to_json(cause: str, rank: int, module: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "cause": cause,
        "rank": rank,
        "module": module,
        **{key: one for key, one in more.items() if one},
        "text": text,
    }
