"""The space of plans: which values each field may take, and every combination of them that the rules allow.

The space is homogeneous: all layers and stages are treated alike. It is built outside in: meshes, then passes of a
step, then schedules, then flags; a rule prunes as soon as what it reads is decided, and what it prunes is counted in
whole plans. Flags depend only on which axes are in use, so a block of the space is a table of meshes times a table
of flags, and rows are made only where they are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.planner.space.columns import Job
from weft.spec import ClusterSpec
from weft.spec.plan import PLAN_FIELDS, SearchFacts

Choices = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values that each field may take; axes and passes take every divisor.

    choices: by field, of those that are searched; where a field decides others too (`members`) its values are tuples.
    splits: how the data-parallel ranks may be split into replicas and shards: "all" divisors, or the "few" that lie
    on the borders of the machine. experts: the model is a mixture.
    fixed: fields that the user has decided. left_out: what was made narrower, in words.
    """

    choices: Choices
    splits: str = "all"
    experts: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()

    @classmethod
    def whole(cls, job: Job, cluster: ClusterSpec, fixed: Mapping[str, Any] | None = None) -> Space:
        """Return everything that the planner knows, for a job on a cluster.

        Args:
            job: model, sequence and batch.
            cluster: its devices.
            fixed: plan fields with decided values.
        """
        facts, given = search_facts(job, cluster), dict(fixed or {})
        choices = {
            name: _decided(name, tuple(each.searched(facts)), given)
            for name, each in PLAN_FIELDS.items()
            if each.searched
        }
        return cls(choices=choices, experts=bool(job.shape.num_experts), fixed=given)

    def narrower(self) -> Space | None:
        """Return the next smaller space: first goes what is hardly ever better.

        None where there is nothing left to take.
        """
        for words, changes in _NARROWER:
            if words not in self.left_out:
                return replace(self, **changes(self), left_out=(*self.left_out, words))
        return None

    def of_last_meshes(self) -> Space | None:
        """Return the part of this space whose splits and schedules are those that a narrower one keeps to the last.

        None where this space has no others.
        """
        narrow: Space | None = self
        while narrow is not None and narrow.splits == "all":
            narrow = narrow.narrower()
        if narrow is None or narrow is self:
            return None
        kept = {name: narrow.choices[name] for name in narrow.choices if PLAN_FIELDS[name].needs == ("pp",)}
        return replace(self, splits=narrow.splits, choices={**self.choices, **kept})


def search_facts(job: Job, cluster: ClusterSpec) -> SearchFacts:
    """What the values that are worth a search depend on, of a job on a cluster."""
    has = (name for name in ("bf16", "fp16") if cluster.device.peak_flops(name) is not None)
    return SearchFacts(layers=job.shape.layers, half_formats=tuple(has), flash=job.stack.flash)


@functools.cache
def members(name: str) -> tuple[str, ...]:
    """The fields that a searched field decides: itself, and those that are searched with it."""
    return (name, *(other for other, each in PLAN_FIELDS.items() if each.searched_with == name))


def as_values(name: str, chosen: Any) -> dict[str, Any]:
    """One of a searched field's choices as values of the fields that it decides."""
    names = members(name)
    return dict(zip(names, chosen, strict=True)) if len(names) > 1 else {name: chosen}


def default_choice(name: str) -> Any:
    """What a plan that names none of them has of the fields that a searched field decides."""
    defaults: tuple[Any, ...] = tuple(PLAN_FIELDS[member].default for member in members(name))
    return defaults if len(defaults) > 1 else next(iter(defaults))


def _decided(name: str, choices: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The choices that have every decided value; where none has, the decided values and otherwise defaults."""
    kept = tuple(
        one for one in choices
        if all(given.get(member, value) == value for member, value in as_values(name, one).items())
    )  # fmt: skip
    if kept:
        return kept
    values = {**as_values(name, default_choice(name)), **{key: given[key] for key in members(name) if key in given}}
    return (tuple(values.values()) if len(values) > 1 else values[name],)


def _without(name: str, *gone: Any) -> Callable[[Space], dict[str, Any]]:
    """Leave some values of a field out, but never all."""
    return _kept(name, lambda value: value not in gone)


def _kept(name: str, keeps: Callable[[Any], bool]) -> Callable[[Space], dict[str, Any]]:
    def change(space: Space) -> dict[str, Any]:
        kept = tuple(value for value in space.choices[name] if keeps(value))
        return {"choices": {**space.choices, name: kept or space.choices[name]}}

    return change


def _first(name: str) -> Callable[[Space], dict[str, Any]]:
    """Leave one value of a field."""
    return lambda space: {"choices": {**space.choices, name: space.choices[name][:1]}}


#: What leaves a space that is too large to be looked at whole, in this order; refinement comes back to it.
_NARROWER: tuple[tuple[str, Callable[[Space], dict[str, Any]]], ...] = (
    ("fp32 (half precision is faster)", _first("precision")),
    ("sp=off (sp=on needs less memory)", _without("sp", False)),
    ("schedule=gpipe", _without("schedule", ("gpipe", 1))),
    ("virtual_stages other than 1, 2, 4 and 8", _kept("schedule", lambda pair: pair[1] in (1, 2, 4, 8))),
    ("splits of data parallelism inside a node", lambda space: {"splits": "few"}),
    ("offloads of activations", _kept("offload", lambda names: "activations" not in names)),
    ("reshard=after_step", _without("zero", (3, "after_step"))),
    ("compile=off (compile=on is faster)", _without("compile", False)),
    ("cp by gather and ulysses", _first("cp_mode")),
    ("offload of parameters", _without("offload", ("params",))),
    ("zero=2", _without("zero", (2, "after_forward"))),
    ("offload", _without("offload", ("optimizer",))),
    ("recompute=selective", _without("recompute", "selective")),
)
