"""Reading a plan: its text as words, and words or a table as the values of its fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from weft.errors import PlanError, Problem, did_you_mean
from weft.spec.plan.plan_field import PlanField


def is_auto(text: str) -> bool:
    """Return whether the planner is to choose: "auto", or "auto" and fields that are decided ("auto zero=3")."""
    return text.split()[:1] == ["auto"]


def split_plan(text: str) -> tuple[dict[str, object], list[Problem]]:
    """Return the words of a plan's text as a table whose values are not yet checked, and what is wrong with the words.

    "tp=2 zero=3" -> {"tp": "2", "zero": "3"}. Wrong: a word without a value, a field given twice, and "auto".
    """
    table: dict[str, object] = {}
    problems: list[Problem] = []
    if is_auto(text):
        rule = "auto works only for a whole run, and an explicit plan is needed here. Use e.g. 'dp_replicate=*'."
        return table, [Problem("", f"plan=auto: {rule}")]
    for word in text.split():
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            rule = "a plan consists of name=value words. Write e.g. 'dp_replicate=4 precision=bf16'."
            problems.append(Problem(name, f"plan word {word!r}: {rule}"))
        elif name in table:
            problems.append(Problem(name, f"plan field {name!r} is given twice in {text!r}. Keep one."))
        else:
            table[name] = value
    return table, problems


def read_values(
    source: str | Mapping[str, object], known: Mapping[str, PlanField]
) -> tuple[dict[str, Any], str | None]:
    """The values of a plan's text or table in their normal form, and the axis that is `*`, where there is one.

    Raises PlanError with every mistake found.
    """
    table, problems = split_plan(source) if isinstance(source, str) else (source, [])
    problems += unknown_fields(table, known)
    values: dict[str, Any] = {}
    stars = [name for name, value in table.items() if value == "*"]
    for name, value in table.items():
        if name in known and name not in stars:
            kind = known[name].kind
            try:
                values[name] = kind.check(name, kind.read(value))
            except PlanError as error:
                problems += error.problems
    if len(stars) > 1 or not all(name in known and known[name].is_axis for name in stars):
        where = f"{' and '.join(stars)} have '*'" if len(stars) > 1 else f"{stars[0]}=*"
        rule = "only one mesh axis can take the remaining ranks. Use '*' once, on dp_replicate."
        problems.append(Problem(stars[-1], f"{where}: {rule}"))
    if problems:
        raise PlanError(problems)
    return values, stars[0] if stars else None


#: Words of other tools, and how a plan says them.
_ELSEWHERE = {
    "dp": " Write dp_shard=N (states are shared out) or dp_replicate=N (copies).",
    "fsdp": " Write dp_shard=N zero=3.",
    "mbs": " Write accumulation=N or microbatches=N; a microbatch is what the global batch leaves.",
    "micro_batch": " Write accumulation=N or microbatches=N; a microbatch is what the global batch leaves.",
    "vpp": " Write schedule=interleaved virtual_stages=N.",
    "dtype": " Write precision=bf16.",
}


def unknown_fields(names: Iterable[str], known: Collection[str]) -> list[Problem]:
    """What is wrong with names that no field has."""
    every = f" Known: {', '.join(known)}."
    return [
        Problem(name, f"unknown plan field {name!r}.{_ELSEWHERE.get(name) or did_you_mean(name, known) or every}")
        for name in names
        if name not in known
    ]
