"""The Plan: how one model is laid over the machines. A frozen value without torch; everything else derives from it.

Text form: only what differs from the defaults, in the order of the fields, such as "dp_shard=4 tp=2 zero=3".
`Plan.parse(plan.format()) == plan` for every plan.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from weft import units
from weft.errors import PlanError, did_you_mean

#: Mesh axes, outermost first. `ep` is a second view over dp_shard x cp x tp, so it is no factor of the world size.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
RECOMPUTES = ("none", "full", "attention", "selective")
OFFLOADS = ("optimizer", "params", "activations")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_interleaved", "zb_v", "dualpipe_v")

_SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_FRACTION = re.compile(r"^(0?\.\d+|\d{1,2}%)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is laid over the machines.

    pp, dp_replicate, dp_shard, cp, tp: sizes of the mesh axes; their product is the world size.
    ep: expert-parallel size, a second view over dp_shard x cp x tp.
    zero: ZeRO stage; what is sharded over dp_shard (0 nothing, 1 optimizer, 2 + gradients, 3 + parameters).
    sp: sequence parallel between tensor-parallel regions.
    schedule, microbatches, virtual_stages: the pipeline's; microbatches per optimizer step.
    accumulation: forward-backward passes per optimizer step when there is no pipeline.
    precision: of forward and backward; master weights and optimizer states stay fp32 (fp64 under "fp64").
    recompute: "none", "full", "attention", "selective", or a budget for saved activations ("12GiB", "50%").
    offload: what lives on the host: any of optimizer, params, activations.
    compile: run blocks through torch.compile.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    accumulation: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    compile: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _checked(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

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

    def axis_sizes(self) -> dict[str, int]:
        """Size of each mesh axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def replace(self, **changes: object) -> Plan:
        """A new plan with some fields changed."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> Plan:
        """Read the text form. One mesh axis may be `*`: it takes the ranks that the others leave.

        world_size: number of ranks; needed only where the text holds a `*`.
        Raises PlanError for an unknown field, a bad value, a repeated field, or a `*` that does not come out even.
        """
        return cls.from_mapping(_split(text), world_size)

    @classmethod
    def from_mapping(cls, table: Mapping[str, object], world_size: int | None = None) -> Plan:
        """Read a table such as `[plan]` in TOML: {"dp_shard": 4, "tp": 2}. Values may be text."""
        _refuse_unknown(table)
        values = {name: _read(name, value) for name, value in table.items() if value != "*"}
        stars = [name for name, value in table.items() if value == "*"]
        if stars:
            values[stars[0]] = _fill(stars, values, world_size)
        return cls(**values)  # pyright: ignore[reportArgumentType]

    def format(self) -> str:
        """The one-line text form; the empty string is the default plan (one rank, fp32)."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_word(value)}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.format() or "dp_replicate=1"


def plan_fields() -> tuple[str, ...]:
    """Names of the plan's fields, in the order in which they are printed."""
    return tuple(field.name for field in fields(Plan))


def _split(text: str) -> dict[str, object]:
    table: dict[str, object] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise PlanError(f"plan word {word!r}: a plan is made of name=value words. Write e.g. 'dp_shard=4 zero=3'.")
        if name in table:
            raise PlanError(f"plan field {name!r} is given twice in {text!r}. Keep one.")
        table[name] = value
    return table


def _refuse_unknown(table: Mapping[str, object]) -> None:
    for name in table:
        if name not in plan_fields():
            hint = did_you_mean(name, plan_fields()) or f" Known: {', '.join(plan_fields())}."
            raise PlanError(f"unknown plan field {name!r}.{hint}")


def _fill(stars: list[str], values: Mapping[str, object], world_size: int | None) -> int:
    name = stars[0]
    if len(stars) > 1 or name not in AXES:
        where = f"{' and '.join(stars)} have '*'" if len(stars) > 1 else f"{name}=*"
        raise PlanError(f"{where}: '*' stands for the remaining ranks of one mesh axis. Use it once, on dp_replicate.")
    if world_size is None:
        raise PlanError(f"{name}=*: the number of ranks is not known here. Write the number.")
    rest = 1
    for axis in AXES:
        rest *= int(values.get(axis, 1))  # pyright: ignore[reportArgumentType]
    if rest == 0 or world_size % rest:
        raise PlanError(
            f"{name}=*: the other axes ask for {rest} ranks, and {world_size} ranks is not a multiple of {rest}. "
            f"Change them, or start a multiple of {rest} ranks."
        )
    return world_size // rest


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _read(name: str, value: object) -> object:
    """Turn one value of a text or table into the field's type."""
    if name in ("sp", "compile"):
        if isinstance(value, bool):
            return value
        switch = _SWITCHES.get(str(value).lower())
        if switch is None:
            raise PlanError(f"{name}={value}: this is a switch. Use {name}=on or {name}=off.")
        return switch
    if name == "offload":
        if isinstance(value, str):
            return tuple(part for part in value.split("+") if part != "none")
        if isinstance(value, list | tuple):
            return tuple(str(part) for part in value)
        raise PlanError(f"offload={value}: name what lives on the host. Use e.g. offload=optimizer+activations.")
    if name in ("schedule", "precision", "recompute"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str) or not re.fullmatch(r"\d{1,9}", str(value)):
        raise PlanError(f"{name}={value}: a whole number is needed. Use e.g. {name}=1.")
    return int(value)


def _checked(name: str, value: object) -> object:
    """The value in its normal form, or PlanError."""
    if name == "zero":
        if value not in (0, 1, 2, 3) or isinstance(value, bool):
            raise PlanError(f"zero={value}: ZeRO has the stages 0 to 3. Use zero=0, 1, 2 or 3.")
        return value
    if name in ("sp", "compile"):
        if not isinstance(value, bool):
            raise PlanError(f"{name}={value}: this is a switch. Use {name}=on or {name}=off.")
        return value
    if name == "precision":
        return _choice(name, value, PRECISIONS)
    if name == "schedule":
        return _choice(name, value, SCHEDULES)
    if name == "recompute":
        return _recompute(value)
    if name == "offload":
        parts = value if isinstance(value, tuple) else (value,)
        chosen = {str(_choice(name, part, OFFLOADS)) for part in parts}
        return tuple(part for part in OFFLOADS if part in chosen)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value}: a whole number of at least 1 is needed. Use {name}=1 to leave it out.")
    return value


def _choice(name: str, value: object, known: tuple[str, ...]) -> object:
    if value not in known:
        raise PlanError(
            f"{name}={value}: not one of {', '.join(known)}.{did_you_mean(str(value), known) or f' Use {known[0]}.'}"
        )
    return value


def _recompute(value: object) -> object:
    if value in RECOMPUTES or (isinstance(value, str) and _FRACTION.match(value)):
        return value
    try:
        budget_bytes = units.parse_bytes(value) if isinstance(value, str) and not value.isdigit() else 0
    except ValueError:
        budget_bytes = 0
    if budget_bytes <= 0:
        raise PlanError(
            f"recompute={value}: not one of {', '.join(RECOMPUTES)}, nor a budget. "
            f"Use one of them, or e.g. recompute=12GiB or recompute=50%."
        )
    return value.replace(" ", "") if isinstance(value, str) else value
