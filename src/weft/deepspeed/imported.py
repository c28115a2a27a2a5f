"""A DeepSpeed config as Weft's plan and settings, with one outcome for each of its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from weft import env
from weft.deepspeed.batch import read_batch
from weft.deepspeed.json_source import Source, read_source
from weft.deepspeed.outcome import BECAME, NOT_BUILT, TYPO, Outcome
from weft.deepspeed.plan_fields import read_axes, read_precision, read_recompute, read_zero
from weft.deepspeed.reading import MOST, Reading
from weft.deepspeed.training import read_clipping, read_optimizer, read_scheduler
from weft.errors import ConfigError, PlanError, Problem
from weft.spec import RunConfig
from weft.spec.files import by_place
from weft.spec.plan import Plan
from weft.spec.rules import NOT_BUILT as NOT_BUILT_RULES
from weft.spec.rules import Facts, Rule, check


@dataclass(frozen=True, slots=True)
class Imported:
    """What a DeepSpeed config is to Weft.

    name: of the file. plan: its text; one axis is `*` where the file leaves the number of ranks open.
    overrides: dotted setting of a RunConfig -> value. lines: one outcome for each key, in the file's order.
    open: settings that the file leaves to "auto", or to the number of ranks: Weft's own values stand in them.
    notes: where the two frameworks differ though no key says so.
    """

    name: str
    plan: str
    overrides: Mapping[str, object]
    lines: tuple[Outcome, ...]
    open: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def typos(self) -> tuple[Outcome, ...]:
        """The keys that DeepSpeed does not know."""
        return tuple(line for line in self.lines if line.kind == TYPO)

    def config(self) -> RunConfig:
        """Return the run that the file describes, with Weft's defaults for what a DeepSpeed config does not say.

        No rule has been asked; `config_rules.config_problems` tells which ones refuse it today.
        """
        tables: dict[str, object] = {"plan": self.plan}
        for setting, value in self.overrides.items():
            section, _, name = setting.partition(".")
            cast(dict[str, object], tables.setdefault(section, {}))[name] = value
        return RunConfig.model_validate(tables)


def import_deepspeed(
    source: Path | str | Mapping[str, object],
    world_size: int | None = None,
    *,
    not_built: Sequence[Rule] = NOT_BUILT_RULES,
) -> Imported:
    """Read a DeepSpeed config: a path, JSON text, or a dict.

    Args:
        source: the config.
        world_size: number of ranks that will be started; None where it is not known.
        not_built: the rules of what the plan can say and the runtime cannot do; a key that such a rule refuses is
            translated, and said to be not built.

    Raises:
        ConfigError: with every mistake found, each with its file and line.
    """
    read = read_source(source)
    reading = Reading(read)
    if world_size is not None and not 1 <= world_size <= MOST:
        rule = (
            f"world_size={world_size}: the number of ranks must be a whole number from 1 to {MOST}. "
            f"Give the number of ranks that you start."
        )
        reading.problems.append(Problem("world_size", rule))
        world_size = None
    read_precision(reading)
    read_axes(reading)
    read_recompute(reading)
    data_ranks = read_batch(reading, world_size)
    read_zero(reading, data_ranks)
    read_clipping(reading)
    read_scheduler(reading, read_optimizer(reading))
    if reading.problems:
        raise ConfigError(sorted(dict.fromkeys(reading.problems), key=by_place))
    plan, open_axis = Plan.read_open(reading.plan)
    lines = _mark_not_built(reading, plan, open_axis, not_built)
    return Imported(
        name=_name(read),
        plan=plan.format(open_axis) or str(plan),
        overrides=reading.settings,
        lines=lines,
        open=tuple(setting for setting in dict.fromkeys(reading.open) if setting not in reading.settings),
        notes=tuple(reading.notes),
    )


def _name(source: Source) -> str:
    return source.name or "ds_config"


def _mark_not_built(
    reading: Reading, plan: Plan, open_axis: str | None, not_built: Sequence[Rule]
) -> tuple[Outcome, ...]:
    """The lines in the file's order; what became a field of the plan that a rule refuses is not built yet."""
    refused = {f"plan.{violation.field}" for violation in check(plan, Facts(open_axis=open_axis), not_built)}
    lines = [reading.lines[key] for key in reading.order if key in reading.lines]
    return tuple(
        replace(line, kind=NOT_BUILT, text=f"{line.text}; the plan contains it, and Weft refuses the plan until then")
        if line.kind == BECAME and refused & {*line.fields}
        else line
        for line in lines
    )


def plan_from_deepspeed(source: Path | str | Mapping[str, object], world_size: int | None = None) -> Plan:
    """Return the plan that a DeepSpeed config asks for: a path to ds_config.json, its text, or the dict of it.

    world_size: number of ranks; by default the number that torchrun, srun or `weft train` started, or that the
    file's batch sizes say. `import_deepspeed` also gives the settings and what each key became.

    Raises:
        ConfigError: with every mistake in the file.
        PlanError: where the number of ranks is not known.
    """
    place = env.rank_env() if world_size is None else None
    plan, open_axis = Plan.read_open(import_deepspeed(source, place.world_size if place else world_size).plan)
    if open_axis is not None:
        rule = "the file leaves the number of ranks open. Give world_size=, or start the ranks with torchrun."
        raise PlanError(f"{open_axis}=*: {rule}")
    return plan
