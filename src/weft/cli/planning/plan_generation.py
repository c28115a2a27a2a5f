"""`weft plan --for generate` and `--for grpo`: plans for generating texts, alone or within training steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from weft.cli.planning.plan_view import NOTHING_FITS, assumed_words, console, print_reasons, table_of
from weft.errors import ConfigError
from weft.planner.report.explanation import TERM_WORDS, differences, fit_words, memory_bars, term_bars
from weft.planner.report.tables import question_table, refused_table
from weft.planner.search.generation import GenerationAnswer, GenerationCandidate, GenerationQuestion, answer_generation
from weft.units import format_bytes, format_count, format_seconds

Purpose = Annotated[
    str | None,
    typer.Option("--for", metavar="generate|grpo", help="Plan generation of texts, or steps of grpo.", show_default=""),
]
Prompt = Annotated[int | None, typer.Option("--prompt", help="With --for: tokens of a prompt.", show_default="1000")]
New = Annotated[int | None, typer.Option("--new", help="With --for: new tokens of a text.", show_default="250")]
Batch = Annotated[
    str | None,
    typer.Option("--batch", help="With --for: texts at once; for grpo PROMPTSxCOMPLETIONS.", show_default="64"),
]

#: Display text of the terms of generation.
_WORDS = {
    **TERM_WORDS,
    "attention": "attention, keys and values",
    "memory_bound": "norms, activations, sampling",
    "stages": "sends between stages",
    "dp_exposed": "gathering weights",
    "agree": "agreement on tokens",
    "joins": "copies of growing caches",
    "train": "training",
}
_TRUST = "predicted by formulas; docs/reference/inference_estimates.md compares them with the few known measurements"


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of `weft plan` about generation."""

    purpose: str | None
    prompt: int | None
    new: int | None
    batch: str | None

    def is_asked(self, others: Mapping[str, Any]) -> bool:
        """Return True if plans for generation are asked for. Raise ConfigError for options that do not belong together.

        others: options that plans for training alone have.
        """
        own = {name: value for name, value in asdict(self).items() if name != "purpose"}
        found = next((name for name, value in (own if self.purpose is None else others).items() if value), None)
        if found is not None:
            rule, remedy = "plans for training", "Leave it out, or leave out --for"
            if self.purpose is None:
                rule, remedy = "plans for generation", "Add --for generate or --for grpo"
            raise ConfigError(f"--{found.replace('_', '-')}: it belongs to {rule}. {remedy}.")
        return self.purpose is not None


def plan_generation(
    options: GenerationOptions, model: Any, cluster: str, *, top: int, reasons: bool, as_json: bool, **settings: Any
) -> None:
    """Print the best plans for generation. Exit with code 4 if none fits.

    Args:
        options: the texts.
        model, cluster: as in `Question.of`.
        top: number of plans to list.
        reasons: True to list why plans were refused.
        as_json: True for JSON.
        **settings: other options of `GenerationQuestion.of`.

    Raises:
        ModelError, ConfigError, PlanError: for bad input.
    """
    words = {"prompt": options.prompt, "new": options.new, "batch": options.batch}
    found = answer_generation(GenerationQuestion.of(options.purpose or "", model, cluster, **words, **settings))
    if as_json:
        typer.echo(json.dumps(_answer_table(found, top), indent=2))
    else:
        _print(found, top)
        if reasons:
            print_reasons(console(), found.refused)
    if not found.ranked:
        raise typer.Exit(NOTHING_FITS)


def _print(found: GenerationAnswer, top: int) -> None:
    screen, asked = console(), found.question.asked
    screen.print(
        f"[bold]{asked.model.name}[/], {format_count(asked.job.shape.num_params)} parameters, on "
        f"[bold]{asked.cluster}[/]: {found.question.work}{assumed_words(asked)}"
    )
    refused = sum(each.count for each in found.refused)
    screen.print(f"{found.num_plans:,} plans: {refused:,} refused; all figures are predictions", style="dim")
    if not found.ranked:
        screen.print(f"\n[bold red]No plan fits[/] {asked.model.name} on {asked.cluster}.")
        least = next(iter(found.too_large), None)
        if least is None:
            text = "Each plan breaks a rule, or does not fit for training (--reasons)."
        else:
            size, most = format_bytes(least.total_bytes), format_bytes(least.usable_bytes)
            text = f"The smallest needs {size} of {most}: {least.plan}. Use more devices, or fewer or shorter texts."
        screen.print(text, markup=False, soft_wrap=True)
        return
    is_grpo = found.question.kind == "grpo"
    numbers = [*(("step", "sampling") if is_grpo else ()), "first token", "tokens/s", "a text", "prefill", "memory"]
    table = table_of(("#",), numbers, "plan", "slower by")
    for place, one in enumerate(found.ranked[:top], start=1):
        cells = [format_seconds(one.total_s), f"{one.generation_s / one.total_s:.0%}"] if is_grpo else []
        cells += [format_seconds(one.first_s), format_count(one.tokens_per_s), f"{1 / one.token_s:,.3g}/s"]
        cells += [f"{one.prefill:.0%}", format_bytes(one.total_bytes)]
        table.add_row(str(place), *cells, _slower_by(one, found.ranked[0]), str(one.plan))
    screen.print(table)
    screen.print("\n" + "\n".join(_details(found.ranked[0], asked.cluster.num_devices)), markup=False, soft_wrap=True)


def _slower_by(one: GenerationCandidate, best: GenerationCandidate) -> str:
    """Return the term that costs a plan the most time beyond the best plan's, as text."""
    pair = ({**each.terms, "train": each.step.step_s if each.step else 0.0} for each in (best, one))
    name, before, after = max(differences(*pair), key=lambda row: row[2] - row[1], default=("", 0.0, 0.0))
    return f"{_WORDS.get(name, name)} +{format_seconds(after - before)}" if after > before else ""


def _details(one: GenerationCandidate, devices: int) -> list[str]:
    estimate = one.estimate
    waves = f", {estimate.waves} times" if estimate.waves > 1 else ""
    copied = "; each rank with a whole copy of the weights" if one.is_copied else ""
    option = f" (weft generate --rows {estimate.rows})" if one.step is None else ""
    lines = [
        f"plan    {one.plan}",
        f"rows    {estimate.rows} texts at once on a data rank{waves}{copied}{option}",
        f"speed   {format_count(one.tokens_per_s)} tokens/s ({format_count(one.tokens_per_s / devices)} per device), "
        f"{1 / one.token_s:,.3g} tokens/s of one text; {fit_words(one.fits)}",
        f"time    {format_seconds(one.generation_s)}: {one.prefill:.0%} until the first tokens, "
        f"{1 - one.prefill:.0%} for the others",
    ]
    if one.step is not None:
        parts = f"{format_seconds(one.generation_s)} of sampling, {format_seconds(one.step.step_s)} of training"
        lines.append(f"step    {format_seconds(one.total_s)}: {parts}")
    lines += [f"trust   {_TRUST}", "", *term_bars("first", estimate.first, _WORDS), ""]
    return [*lines, *term_bars("token", estimate.token, _WORDS), "", *memory_bars(one)]


def _answer_table(found: GenerationAnswer, top: int) -> dict[str, Any]:
    question = question_table(found.question.asked) | asdict(found.question.texts)
    return {
        "question": question | {"for": found.question.kind, "completions": found.question.completions},
        "is_prediction": True,
        "num_plans": found.num_plans,
        "plans": [_candidate_table(one) for one in found.ranked[:top]],
        "refused": refused_table(found.refused),
        "nearest": _candidate_table(found.too_large[0]) if found.too_large else None,
    }


def _candidate_table(one: GenerationCandidate) -> dict[str, Any]:
    names = (
        "first_s",
        "token_s",
        "generation_s",
        "total_s",
        "tokens_per_s",
        "is_copied",
        "total_bytes",
        "usable_bytes",
    )
    found = {"plan": str(one.plan), **{name: getattr(one, name) for name in names}, **asdict(one.estimate)}
    return found | {"prefill_share": one.prefill, "memory": dict(one.memory), "fits_probability": one.fits}
