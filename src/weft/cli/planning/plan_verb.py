"""`weft plan`: the best plans for a model on a cluster, and why. Needs no torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft import env
from weft.cli.planning import plan_options as options
from weft.cli.planning.findings import Findings
from weft.errors import ConfigError, PlanError, Problem, WeftError

if TYPE_CHECKING:
    from weft.planner.search import PlannedModel, Question
    from weft.spec import TracedModel
    from weft.train import Task

#: Exit code where no plan fits: as of a rank that runs out of memory.
NOTHING_FITS = 4
_NOTHING_TO_WRITE = "{}: no plan fits, so there is nothing to write. Leave it out to see what would fit."


def plan(
    model: options.Model = None,
    cluster: options.Cluster = None,
    more: options.MoreRuns = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    documents: options.Documents = None,
    tune: options.Tune = None,
    run: options.Run = None,
    fix: options.Fix = "",
    built_only: options.BuiltOnly = True,
    top: options.Top = 10,
    why_not: options.WhyNotPlan = None,
    compare: options.Compare = None,
    what_if: options.WhatIf = None,
    reasons: options.Reasons = False,
    draw: options.Draw = None,
    pareto: options.Pareto = None,
    waterfall: options.Waterfall = None,
    memory: options.Memory = None,
    html: options.Html = None,
    out: options.Out = None,
    save_model: options.SaveModel = None,
    json: options.Json = False,
    price: options.Price = None,
    tier: options.Tier = "tables",
    refine: options.Refine = 0.0,
    score: options.Score = None,
    experience: options.ExperienceFile = None,
    profile: options.ProfileFile = None,
    learn: options.Learn = None,
) -> None:
    """Find the best plans for a model on a cluster, and say why."""
    if "numpy" not in sys.modules:  # its threads for products of matrices would be a third of its start, and idle
        env.default_for_libraries(OPENBLAS_NUM_THREADS="1")
    with _errors_as_json() if json else nullcontext(), _without_collections():
        if _needs_no_question(score, experience, (learn, profile), [model, cluster, *(more or ())], as_json=json):
            return
        if model is None or cluster is None:
            raise ConfigError("weft plan takes MODEL and CLUSTER. Write e.g. weft plan llama3-8b 8xh100.")
        sizes = {"seq_len": seq_len, "global_batch": global_batch, "documents": documents}
        search = {"fixed": fix, "built_only": built_only, "tier": tier, "refine_s": refine, "profile": profile}
        described = _described(model, save_model)
        if _told_as_list(described, cluster, (tune, run, price), {**sizes, **search}, as_json=json):
            return
        found = _find(_asked(described, cluster, tune, {**sizes, **search}), why_not, compare, what_if or [])
        _write_files(found, draw=draw, pareto=pareto, waterfall=waterfall, memory=memory, out=out)
        if html is not None:
            _write_page(found, html, price)
        if json:
            from weft.cli.planning.plan_json import print_json

            print_json(found, top, price)
        else:
            from weft.cli.planning.plan_view import print_findings

            print_findings(found, top=top, reasons=reasons, hour_price=price)
        if found.answer.best is None and not found.only_judges:
            raise typer.Exit(NOTHING_FITS)


def _needs_no_question(
    score: list[Path] | None,
    experience: Path | None,
    lesson: tuple[Path | None, Path | None],
    words: list[str | None],
    *,
    as_json: bool,
) -> bool:
    """Score, or teach a profile; whether that was all. words: further files where runs are scored."""
    learn, profile = lesson
    if score:
        from weft.cli.planning.plan_score import score_runs

        score_runs([*score, *(Path(each) for each in words if each)], as_json, experience)
        return True
    if len(words) > 2:
        rule = "there are MODEL and CLUSTER alone, and several clusters have commas between them"
        raise ConfigError([Problem(str(words[2]), f"{words[2]}: {rule}. Leave it out.")])
    if learn is None:
        return False
    from weft.cli.planning.plan_learn import learn_from

    learn_from(learn, profile)
    return words[0] is None


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let the garbage collector rest: a plan makes many values and no circles, and it would look through them all."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _errors_as_json() -> Iterator[None]:
    """Tell programs what people read: an error is an object on standard output too."""
    try:
        yield
    except WeftError as error:
        problems = error.problems if isinstance(error, ConfigError | PlanError) else (Problem("", str(error)),)
        listed = [{"field": each.field, "message": str(each)} for each in problems]
        typer.echo(dumps({"errors": listed}, indent=2))
        raise


def _asked(model: Any, cluster: str, tune: str | None, settings: dict[str, Any]) -> Question:
    from weft.planner.search import Question, tuned_question

    if tune is None:
        return Question.of(model, cluster, **settings)
    return tuned_question(model, cluster, tune, **settings)


def _told_as_list(
    model: Any, clusters: str, asked: tuple[str | None, str | None, float | None], settings: dict[str, Any], *,
    as_json: bool,
) -> bool:  # fmt: skip
    """Answer for each of several clusters where that is asked; whether it was."""
    tune, run, price = asked
    if tune is not None and run is not None:
        raise ConfigError(f"tune={tune}: --run plans the training of all weights. Use one of them.")
    if run is not None:
        from weft.cli.planning.run_view import tell_runs

        if not tell_runs(model, clusters, run, price, settings, as_json=as_json):
            raise typer.Exit(NOTHING_FITS)
    if tune == "all":
        _tell_what_fits(model, clusters, settings, as_json=as_json)
    return run is not None or tune == "all"


def _tell_what_fits(model: Any, clusters: str, settings: dict[str, Any], *, as_json: bool) -> None:
    """Print the table of what fits on what; exit code as where no plan fits."""
    from weft.cli.planning import tune_view
    from weft.planner.search import what_fits

    found = what_fits(model, clusters, **settings)
    (tune_view.print_fits_json if as_json else tune_view.print_fits)(found)
    if all(one.best is None for one in found):
        raise typer.Exit(NOTHING_FITS)


def _described(model: str, save: Path | None) -> str | TracedModel | PlannedModel:
    """The model's name, or what tracing finds where the name is that of code, or of a config with a task of its own:
    that alone needs torch."""
    from weft.cli.console import say
    from weft.planner.search import PlannedModel, UnknownFamily, read_model
    from weft.spec import TracedModel
    from weft.spec.model import size_hides
    from weft.spec.written import MODEL_CODE

    if note := size_hides(model):
        say(note)
    if model.endswith(".toml") and (task := _task_of(model)) is not None:
        return task.describe()
    found: str | TracedModel | PlannedModel = model
    if MODEL_CODE.fullmatch(model):
        from weft.train.task import trace

        found = trace(model)
    elif not model.endswith(".toml"):
        try:
            found = read_model(model)
        except UnknownFamily:
            from weft.train.task import describe_folder

            found = describe_folder(Path(model))
    if save is None:
        return found
    traced = found.traced if isinstance(found, PlannedModel) else found
    if not isinstance(traced, TracedModel):
        rule = "only what is traced is saved, and this model is read from a config"
        raise ConfigError([Problem("", f"save-model={save}: {rule}. Leave it out.")])
    traced.save(save)
    say(f"wrote {save}.")
    return found


def _task_of(file: str) -> Task | None:
    """The task that a config names, or None."""
    from weft.spec.files import load_config

    config = load_config(file, ["plan=auto"]).config
    if config.task.name is None and not config.model.path:
        return None
    from weft.train.tasks import find_task

    return find_task(config)


def _find(asked: Question, plan_text: str | None, pair: tuple[str, str] | None, changes: list[str]) -> Findings:
    """Search, and judge the plans that were named. Where nothing that is built fits, all plans are looked at."""
    from weft.planner.search import answer

    found = answer(asked)
    if found.best is None and asked.built_only:
        asked = replace(asked, built_only=False)
        found = answer(asked)
    judged = comparison = None
    if plan_text is not None:
        from weft.planner.tell import why_not

        judged = why_not(plan_text, asked, found)
    if pair is not None:
        from weft.planner.tell import compare

        comparison = compare(*pair, asked)
    scenarios = ()
    if changes:
        from weft.planner.tell import what_if

        scenarios = tuple(what_if(text, asked) for text in changes)
    return Findings(answer=found, why_not=judged, comparison=comparison, scenarios=scenarios)


def _write_page(found: Findings, path: Path, hour_price: float | None) -> None:
    """The page of an answer. Raises ConfigError where there is no plan to show."""
    from weft.cli.planning import plan_files

    if found.answer.best is None:
        raise ConfigError(_NOTHING_TO_WRITE.format(path))
    plan_files.write_page(found.answer, path, hour_price)


def _write_files(
    found: Findings,
    *,
    draw: Path | None,
    pareto: Path | None,
    waterfall: Path | None,
    memory: Path | None,
    out: Path | None,
) -> None:
    """The files that were asked for."""
    from weft.cli.planning import plan_files

    for path, write in (
        (draw, plan_files.write_schedule),
        (waterfall, plan_files.write_waterfall),
        (memory, plan_files.write_memory),
        (out, plan_files.write_config),
    ):
        if path is not None and found.answer.best is not None:
            write(found.answer.best, path)
        elif path is not None:
            raise ConfigError(_NOTHING_TO_WRITE.format(path))
    if pareto is not None:
        plan_files.write_pareto(found.answer, pareto)
