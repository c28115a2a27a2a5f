"""The Plan: how one model is laid over the machines. A frozen value without torch; everything else derives from it.

Text form: only what differs from the defaults, in the order of the fields, such as "dp_shard=4 tp=2 zero=3".
`Plan.parse(plan.format()) == plan` for every plan. What may be combined with what is in `rules.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

from weft.errors import PlanError, Problem, did_you_mean
from weft.spec.context import CP_MODES
from weft.spec.plan_values import (
    LARGEST,
    axis_names,
    choice,
    offload_words,
    recompute_word,
    refused,
    shown,
    split_counts,
)
from weft.spec.wires import WIRES

#: Mesh axes, outermost first where the plan says no other order. `ep` is a second view over dp_shard x cp x tp, so it
#: is no factor of the world size.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
#: What gradients travel as between ranks; under "fp32" as they are.
REDUCES = WIRES
RECOMPUTES = ("none", "full", "attention", "selective")
OFFLOADS = ("optimizer", "params", "activations")
#: When zero=3 lets gathered parameters go: from the least memory to the least communication.
RESHARDS = ("after_forward", "after_backward", "after_step")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_interleaved", "zb_v", "dualpipe_v")

#: Fields that are one of a few words.
CHOICES: Mapping[str, Sequence[str]] = {
    "reshard": RESHARDS,
    "cp_mode": CP_MODES,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "reduce": REDUCES,
}

_SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_COUNTS = re.compile(r"[1-9][0-9]{0,5}(\+[1-9][0-9]{0,5})*", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is laid over the machines.

    pp, dp_replicate, dp_shard, cp, tp: sizes of the mesh axes; their product is the world size.
    ep: expert-parallel size, a second view over dp_shard x cp x tp.
    order: the axes in use from outermost to innermost ("tp+dp_shard"); empty: the order in which they stand here.
        Ranks that are neighbours on the innermost axis are neighbours on the machine.
    zero: ZeRO stage; what is sharded over dp_shard (0 nothing, 1 optimizer, 2 + gradients, 3 + parameters).
    reshard: when zero=3 lets gathered parameters go: "after_forward" (least memory), "after_backward" (gathered
        once in a pass), "after_step" (once in a step, in which gradients travel once too). Under a pipeline the latter
        two are the same.
    sp: sequence parallel between tensor-parallel regions.
    cp_mode: how a sequence that is cut over cp attends to all of itself: "gather" (keys and values of all ranks),
        "ring" (they go around, under the computation), "ulysses" (all tokens of some heads, by all_to_all), or "auto":
        the one that suits heads, sequence and memory (`weft.spec.context.choose_cp_mode`).
    schedule, microbatches, virtual_stages: the pipeline's; microbatches per optimizer step.
    split: how many of the model's blocks each stage takes, in order ("3+4+4+3"); empty: stages of equal work.
    accumulation: forward-backward passes per optimizer step when there is no pipeline.
    precision: of forward and backward; master weights and optimizer states stay fp32 (fp64 under "fp64").
    reduce: the wire (`weft.spec.wires`) that gradients travel as between ranks: "fp32" (fp64 under "fp64") or "bf16",
        half the bytes. They are rounded for the collective alone, and accumulated and applied in fp32.
    recompute: "none", "full", "attention", "selective", each also for the first blocks of a rank alone ("full:8"), or
        a budget for saved activations ("12GiB", "50%").
    offload: what lives on the host: any of optimizer, params, activations, each whole or with a share of it
        ("optimizer:0.5"); `offload_share` reads it.
    compile: run blocks through torch.compile.
    Raises PlanError, with every field that cannot be used, when it is made.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    order: tuple[str, ...] = ()
    zero: int = 0
    reshard: str = "after_forward"
    sp: bool = False
    cp_mode: str = "auto"
    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    split: tuple[int, ...] = ()
    accumulation: int = 1
    precision: str = "fp32"
    reduce: str = "fp32"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    compile: bool = False

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        for name in plan_fields():
            try:
                object.__setattr__(self, name, _remembered(name, getattr(self, name)))
            except PlanError as error:
                problems += error.problems
        if problems:
            raise PlanError(problems)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the mesh axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def microbatches_per_step(self) -> int:
        """Forward passes per optimizer step on one data-parallel rank."""
        return self.microbatches if self.pp > 1 else self.accumulation

    @property
    def recompute_policy(self) -> str:
        """One of RECOMPUTES, or "budget"."""
        name = self.recompute.partition(":")[0]
        return name if name in RECOMPUTES else "budget"

    @property
    def recompute_blocks(self) -> int:
        """How many of a rank's blocks, from the first, have the policy; 0: all."""
        return int(self.recompute.partition(":")[2] or 0)

    def offload_share(self, name: str) -> float:
        """Which share of "optimizer", "params" or "activations" lives on the host: 0.0 to 1.0."""
        shares = [part.partition(":")[2] or "1" for part in self.offload if part.partition(":")[0] == name]
        return float(shares[0]) if shares else 0.0

    @property
    def axis_order(self) -> tuple[str, ...]:
        """All mesh axes, outermost first; those that `order` leaves out have one rank and come first."""
        return (*(axis for axis in AXES if axis not in self.order), *self.order)

    def axis_sizes(self) -> dict[str, int]:
        """Size of each mesh axis, outermost first."""
        return {axis: getattr(self, axis) for axis in self.axis_order}

    def replace(self, **changes: object) -> Plan:
        """A new plan with some fields changed."""
        problems = _unknown(changes)
        if problems:
            raise PlanError(problems)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> Plan:
        """Read the text form. One mesh axis may be `*`: it takes the ranks that the others leave.

        Where they leave one rank for `dp_shard=*`, zero is 0: "dp_shard=* zero=3" is a plan for any number of ranks.

        world_size: number of ranks; needed only where the text holds a `*`.
        Raises PlanError for an unknown field, a bad value, a repeated field, or a `*` that does not come out even.
        """
        return cls._close(text, world_size)

    @classmethod
    def from_mapping(cls, table: Mapping[str, object], world_size: int | None = None) -> Plan:
        """Read a table such as `[plan]` in TOML: {"dp_shard": 4, "tp": 2}. Values may be text."""
        return cls._close(table, world_size)

    @classmethod
    def _close(cls, source: str | Mapping[str, object], world_size: int | None) -> Plan:
        plan, open_axis = cls.read_open(source)
        if open_axis is None:
            return plan
        if world_size is None:
            raise refused(open_axis, f"{open_axis}=*: the number of ranks is not known here. Write the number.")
        rest = plan.world_size  # the open axis counts as 1 in it
        if world_size < 1 or world_size % rest:
            raise refused(
                open_axis,
                f"{open_axis}=*: the other axes ask for {rest} ranks, and {world_size} is not a multiple of {rest}. "
                f"Change them, or start a multiple of {rest} ranks.",
            )
        found: dict[str, object] = {open_axis: world_size // rest}
        if open_axis == "dp_shard" and world_size == rest and plan.cp == 1 and plan.zero:
            # One line from laptop to cluster: with nobody to share with, ZeRO has nothing to do.
            found |= {"zero": 0, "reshard": type(plan).__dataclass_fields__["reshard"].default}
        return plan.replace(**found)

    @classmethod
    def read_open(cls, source: str | Mapping[str, object]) -> tuple[Plan, str | None]:
        """Read text or a table while the number of ranks is unknown: the plan with its `*` as 1, and that axis's name.

        Raises PlanError with every mistake found.
        """
        table, problems = split_plan(source) if isinstance(source, str) else (source, [])
        problems += _unknown(table)
        values: dict[str, object] = {}
        stars = [name for name, value in table.items() if value == "*"]
        for name, value in table.items():
            if name in plan_fields() and name not in stars:
                try:
                    values[name] = _checked(name, _read(name, value))
                except PlanError as error:
                    problems += error.problems
        if len(stars) > 1 or not set(stars) <= set(AXES):
            where = f"{' and '.join(stars)} have '*'" if len(stars) > 1 else f"{stars[0]}=*"
            rule = "'*' stands for the remaining ranks of one mesh axis. Use it once, on dp_replicate."
            problems.append(Problem(stars[-1], f"{where}: {rule}"))
        if problems:
            raise PlanError(problems)
        return cls(**values), stars[0] if stars else None  # pyright: ignore[reportArgumentType]

    def format(self, open_axis: str | None = None) -> str:
        """The one-line text form; the empty string is the default plan (one rank, fp32).

        open_axis: a mesh axis to be written as `*`, so that `format(*read_open(text))` keeps the meaning.
        """
        words: list[str] = []
        for field in fields(self):
            value = "*" if field.name == open_axis else getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_word(value)}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.format() or "dp_replicate=1"


def plan_fields() -> tuple[str, ...]:
    """Names of the plan's fields, in the order in which they are printed."""
    return tuple(field.name for field in fields(Plan))


def is_auto(text: str) -> bool:
    """Whether the planner is to choose: "auto", or "auto" and fields that are decided ("auto zero=3")."""
    return text.split()[:1] == ["auto"]


def auto_fields(text: str) -> dict[str, object]:
    """The fields that an auto plan decides, with their values. Raises PlanError where they cannot be read."""
    words, problems = split_plan(text.partition("auto")[2])
    if problems:
        raise PlanError(problems)
    plan = Plan.from_mapping(words)
    return {name: getattr(plan, name) for name in words}


def split_plan(text: str) -> tuple[dict[str, object], list[Problem]]:
    """The words of a plan's text as a table whose values are not yet checked, and what is wrong with the words.

    "tp=2 zero=3" -> {"tp": "2", "zero": "3"}. Wrong: a word without a value, a field given twice, and "auto".
    """
    table: dict[str, object] = {}
    problems: list[Problem] = []
    if is_auto(text):
        rule = "the planner chooses for a whole run, and here a plan itself is needed. Use e.g. 'dp_replicate=*'."
        return table, [Problem("", f"plan=auto: {rule}")]
    for word in text.split():
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            rule = "a plan is made of name=value words. Write e.g. 'dp_replicate=4 precision=bf16'."
            problems.append(Problem(name, f"plan word {word!r}: {rule}"))
        elif name in table:
            problems.append(Problem(name, f"plan field {name!r} is given twice in {text!r}. Keep one."))
        else:
            table[name] = value
    return table, problems


def _unknown(names: Iterable[str]) -> list[Problem]:
    known = plan_fields()
    every = f" Known: {', '.join(known)}."
    return [
        Problem(name, f"unknown plan field {name!r}.{did_you_mean(name, known) or every}")
        for name in names
        if name not in known
    ]


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)


def _read(name: str, value: object) -> object:
    """Turn one value of a text or table into the field's type, where it can be; `_checked` refuses the rest."""
    if name in ("sp", "compile") and isinstance(value, str):
        return _SWITCHES.get(value.lower(), value)
    if name == "offload" and isinstance(value, str):
        return tuple(part for part in value.split("+") if part != "none")
    if name == "split" and isinstance(value, str) and _COUNTS.fullmatch(value):
        return tuple(map(int, value.split("+")))
    if name == "order" and isinstance(value, str):
        return tuple(value.split("+"))
    if name in ("offload", "order", "split") and isinstance(value, list):
        return tuple(cast(list[object], value))
    if name in CHOICES or name == "recompute":
        return value
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value


def _remembered(name: str, value: object) -> object:
    """`_checked`, of values that may have been seen: a search makes thousands of plans of few values.

    Tuples are looked at each time: (1, 2) and (True, 2) would be one entry.
    """
    return _checked_once(name, value) if isinstance(value, (str, int)) else _checked(name, value)


def _checked(name: str, value: object) -> object:
    """The value in its normal form, or PlanError."""
    if name in ("sp", "compile"):
        if not isinstance(value, bool):
            raise refused(name, f"{name}={shown(value)}: this is a switch. Use {name}=on or {name}=off.")
        return value
    if name in CHOICES:
        return choice(name, value, CHOICES[name])
    if name == "recompute":
        return recompute_word(value, RECOMPUTES)
    if name == "offload":
        return offload_words(value, OFFLOADS)
    if name == "split":
        return split_counts(value)
    if name == "order":
        return axis_names(value, AXES)
    low, high = (0, 3) if name == "zero" else (1, LARGEST)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        size = f"a whole number from 1 to {high} is needed. Use {name}=1 to leave it out."
        rule = "ZeRO has the stages 0 to 3. Use zero=0, 1, 2 or 3." if name == "zero" else size
        raise refused(name, f"{name}={shown(value)}: {rule}")
    return value


_checked_once = functools.lru_cache(maxsize=4096, typed=True)(_checked)
