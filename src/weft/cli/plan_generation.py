"""`weft plan --for generate` and `--for grpo`: plans for generating texts, alone or within training steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from weft.cli.plan_view import assumed_words, console, print_reasons, table_of
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.report.explanation import TERM_WORDS, differences, fit_words, memory_bars, term_bars
from weft.planner.report.tables import refused_table
from weft.planner.search.generation import (
    GenerationAnswer,
    GenerationCandidate,
    GenerationQuestion,
    answer_generation,
    generation_candidate,
    rule_against,
)
from weft.units import format_bytes, format_count, format_seconds

Purpose = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="generate|grpo",
        help="Plan generation of texts, or steps of grpo with it, instead of training.",
        show_default=False,
    ),
]
Prompt = Annotated[int | None, typer.Option("--prompt", help="With --for: tokens of a prompt.", show_default="1000")]
New = Annotated[int | None, typer.Option("--new", help="With --for: new tokens of a text.", show_default="250")]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="With --for: texts at once; for grpo PROMPTSxCOMPLETIONS.",
        show_default="64 or 8x8",
    ),
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
}
#: What users must know about each figure.
_TRUST = "predicted by formulas; compared with few measurements of generation (docs/reference/inference_estimates.md)"


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
        if self.purpose is None:
            named = {"prompt": self.prompt, "new": self.new, "batch": self.batch}
            found = next((name for name, value in named.items() if value is not None), "")
            if found:
                raise ConfigError(f"--{found}: it belongs to plans for generation. Add --for generate or --for grpo.")
            return False
        found = next((name for name, value in others.items() if value), "")
        if found:
            name = found.replace("_", "-")
            raise ConfigError(f"--{name}: it belongs to plans for training. Leave it out, or leave out --for.")
        return True


def plan_generation(
    options: GenerationOptions, model: Any, cluster: str, *, top: int, why_not: str | None, reasons: bool,
    as_json: bool, **settings: Any,
) -> bool:  # fmt: skip
    """Print the best plans for generation. Return True if a plan fits.

    Args:
        options: the texts.
        model, cluster: as in `Question.of`.
        top: number of plans to list.
        why_not: a plan to judge, or None.
        reasons: True to list why plans were refused.
        as_json: True for JSON.
        **settings: other options of `GenerationQuestion.of`.

    Raises:
        ModelError, ConfigError, PlanError: for bad input.
    """
    asked = GenerationQuestion.of(
        options.purpose or "", model, cluster, prompt=options.prompt, new=options.new, batch=options.batch, **settings
    )
    found = answer_generation(asked)
    verdict = None if why_not is None else judge(why_not, found)
    if as_json:
        typer.echo(json.dumps(_answer_table(found, top) | ({} if verdict is None else {"why_not": verdict}), indent=2))
        return found.best is not None or verdict is not None
    _print(found, top)
    if reasons:
        print_reasons(console(), found.refused)
    if verdict is not None:
        console().print(f"\nplan    {why_not}\nwhy not {verdict}", markup=False, soft_wrap=True)
    return found.best is not None or verdict is not None


def judge(text: str, found: GenerationAnswer) -> str:
    """Return why a plan was not chosen.

    Raises:
        PlanError: if the text is not a plan.
        ConfigError: for grpo, whose plans are training plans.
    """
    asked, best = found.question, found.best
    if asked.kind == "grpo":
        raise ConfigError(
            "--why-not: for grpo only the best training plans are compared. Leave out --for, or --why-not."
        )
    plan = Plan.parse(text, asked.asked.cluster.num_devices)
    if broken := rule_against(asked, plan):
        return broken[1]
    one = generation_candidate(asked, plan)
    if one.fits < asked.asked.fits:
        return f"out of memory: {format_bytes(one.total_bytes)} of {format_bytes(one.usable_bytes)}."
    if best is None or one.total_s <= best.total_s:
        return "it is as fast as the best plan."
    return f"{one.total_s / best.total_s:.2f}x the time of {best.plan}: {_lost_by(one, best)}."


def _lost_by(one: GenerationCandidate, best: GenerationCandidate) -> str:
    """Return the term that costs a plan the most time beyond the best plan's, as text."""
    pairs = (dict(each.terms) | ({"train": each.step.step_s} if each.step else {}) for each in (best, one))
    most = max(differences(*pairs), key=lambda row: row[2] - row[1], default=None)
    if most is None or most[2] <= most[1]:
        return ""
    return f"{_WORDS.get(most[0], 'training' if most[0] == 'train' else most[0])} +{format_seconds(most[2] - most[1])}"


def _print(found: GenerationAnswer, top: int) -> None:
    screen, asked = console(), found.question
    job = asked.asked.job
    screen.print(
        f"[bold]{asked.asked.model.name}[/], {format_count(job.shape.num_params)} parameters, on "
        f"[bold]{asked.asked.cluster}[/]: {asked.work}{assumed_words(asked.asked)}"
    )
    num_fit, refused = len(found.ranked), sum(each.count for each in found.refused)
    screen.print(f"{found.num_plans:,} plans: {refused:,} refused, {num_fit:,} listed; all figures are predictions",
                 style="dim")  # fmt: skip
    best = found.best
    if best is None:
        screen.print(f"\n[bold red]No plan fits[/] {asked.asked.model.name} on {asked.asked.cluster}.")
        for one in found.too_large[:1]:
            screen.print(
                f"The plan that needs the least memory: {one.plan}\n  {format_bytes(one.total_bytes)} on the fullest "
                f"rank, of {format_bytes(one.usable_bytes)}. Use more devices, fewer texts or shorter ones.",
                markup=False,
            )
        return
    screen.print(_ranking(found, top))
    screen.print()
    screen.print("\n".join(_details(best)), markup=False, soft_wrap=True)


def _ranking(found: GenerationAnswer, top: int) -> Table:
    is_grpo = found.question.kind == "grpo"
    numbers = ["first token", "tokens/s", "a text", "prefill", "memory"]
    table = table_of(("#",), [*(("step", "sampling") if is_grpo else ()), *numbers], "plan", "slower by")
    for place, one in enumerate(found.ranked[:top], start=1):
        cells = [format_seconds(one.total_s), f"{one.generation_s / one.total_s:.0%}"] if is_grpo else []
        cells += [format_seconds(one.first_s), format_count(one.tokens_per_s), f"{one.text_tokens_per_s:,.3g}/s"]
        cells += [f"{one.prefill:.0%}", format_bytes(one.total_bytes)]
        table.add_row(str(place), *cells, _lost_by(one, found.ranked[0]), str(one.plan))
    return table


def _details(one: GenerationCandidate) -> list[str]:
    estimate, devices = one.estimate, one.question.asked.cluster.num_devices
    copied = ", each rank with a whole copy of the weights" if one.is_copied else ""
    waves = f", {estimate.waves} times" if estimate.waves > 1 else ""
    lines = [
        f"plan    {one.plan}",
        f"rows    {estimate.rows} texts at once on a data rank{waves}{copied}"
        + (f" (weft generate --rows {estimate.rows})" if one.step is None else ""),
        f"speed   {format_count(one.tokens_per_s)} tokens/s ({format_count(one.tokens_per_s / devices)} per device), "
        f"{one.text_tokens_per_s:,.3g} tokens/s of one text, {fit_words(one.fits)}",
        f"time    {format_seconds(one.generation_s)}: {one.prefill:.0%} until the first tokens, {1 - one.prefill:.0%} for "
        "the others",
    ]
    if one.step is not None:
        share = one.generation_s / one.total_s
        lines.append(
            f"step    {format_seconds(one.total_s)}: {format_seconds(one.generation_s)} of sampling ({share:.0%}), "
            f"{format_seconds(one.step.step_s)} of training"
        )
    lines.append(f"trust   {_TRUST}")
    parts = (("first", estimate.first), ("token", estimate.token))
    return [*lines, *(line for name, part in parts for line in ("", *term_bars(name, part, _WORDS))), "",
            *memory_bars(one)]  # fmt: skip


def _answer_table(found: GenerationAnswer, top: int) -> dict[str, Any]:
    asked, texts = found.question, found.question.texts
    return {
        "question": {
            "for": asked.kind, "model": asked.asked.model.name, "num_params": asked.asked.job.shape.num_params,
            "cluster": str(asked.asked.cluster), "num_devices": asked.asked.cluster.num_devices,
            "prompt": texts.prompt, "new": texts.new, "texts": texts.batch, "completions": asked.completions,
            "assumed": list(asked.asked.assumed),
        },
        "is_prediction": True,
        "num_plans": found.num_plans,
        "seconds": found.seconds,
        "plans": [_candidate_table(one) for one in found.ranked[:top]],
        "refused": refused_table(found.refused),
        "nearest": _candidate_table(found.too_large[0]) if found.too_large else None,
    }  # fmt: skip


def _candidate_table(one: GenerationCandidate) -> dict[str, Any]:
    return {
        "plan": str(one.plan),
        "rows": one.estimate.rows,
        "waves": one.estimate.waves,
        "whole_copies": one.is_copied,
        "first_token_s": one.first_s,
        "token_s": one.token_s,
        "generation_s": one.generation_s,
        "training_s": None if one.step is None else one.step.step_s,
        "tokens_per_s": one.tokens_per_s,
        "text_tokens_per_s": one.text_tokens_per_s,
        "prefill_share": one.prefill,
        "first_terms_s": dict(one.estimate.first),
        "token_terms_s": dict(one.estimate.token),
        "memory_bytes": dict(one.memory),
        "total_bytes": one.total_bytes,
        "usable_bytes": one.usable_bytes,
        "fits_probability": one.fits,
    }
