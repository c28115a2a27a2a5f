"""`weft plan`: find the best plans for a model on a cluster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import env
from weft.cli.console import print_line
from weft.cli.planning.plan_compile import Compile, compiled_step, expect_alone, fits, jax_answer, jax_question
from weft.cli.planning.plan_generation import Batch, GenerationOptions, New, Prompt, Purpose, plan_generation
from weft.cli.planning.plan_view import (
    NOTHING_FITS,
    Findings,
    print_findings,
    print_fits,
    print_json,
    print_runs,
    write_files,
)
from weft.config.cluster import described_clusters
from weft.config.parsing import MODEL_CODE
from weft.config.shapes.model_spec import size_hides
from weft.config.shapes.traced_model import TracedModel
from weft.errors import ConfigError, PlanError, Problem, WeftError
from weft.hub import downloaded_folder
from weft.planner.measured.corrections import learn, lesson_words
from weft.planner.measured.machine_profile import default_path, load_profile
from weft.planner.report import scenario
from weft.planner.report.energy_front import SortBy, grid_of, ranked_by
from weft.planner.report.verdict import compare as compare_plans
from weft.planner.report.verdict import why_not as judge
from weft.planner.search.best_plans import answer
from weft.planner.search.model_source import PlannedModel, UnknownFamily, read_model
from weft.planner.search.question import Question, tuned_question

if TYPE_CHECKING:
    from weft.planner.mixed.answer import MixedAnswer
    from weft.planner.search.candidate import Answer, Candidate
    from weft.train.tasks.base import Task

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A size (`weft models`), a Hugging Face config folder, a config of Weft (.toml), package.module:function, "
        "or a file of --save-model.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Argument(
        metavar="CLUSTER",
        help="8xh100 (one node of 8), 2048x8xh100 (nodes x devices x type), v5p-16 (a TPU slice), here, 4xhere, a "
        "profile or a .toml file.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="'NAME memory=24GiB bf16=120TFLOPS bandwidth=800GB/s'",
        help="Describe a device that CLUSTER names: also link=, nic=, host= (rates), domain=, watts=, like=h100.",
        show_default=False,
    ),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True, show_default=False)]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens in a sequence.", show_default=False)]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", help="Sequences in an optimizer step.", show_default=False)
]
Documents = Annotated[
    str | None,
    typer.Option(
        "--documents",
        metavar="512:9,8k:1",
        help="Lengths of the documents packed into sequences, and how many there are of each: attention stays in each.",
        show_default=False,
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        "--tune",
        metavar="HOW",
        help="Fine-tune: full, lora, qlora (a base of 4 bits), or with a rank: lora=64. all: what fits on "
        "each CLUSTER of a list such as 1x4090,8xh100.",
        show_default=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="tokens=1T",
        help="Plan a complete run in days and dollars: tokens=, loss= or budget=5000usd; also mtbf= (of a device), "
        "restart=, save=, stall=, store= (bytes/s of checkpoints), grid= (g CO2 a kWh, or france). CLUSTER may "
        "be a list with commas.",
        show_default=False,
    ),
]
Fix = Annotated[
    str, typer.Option("--fix", metavar="WORDS", help="Fix these fields of the plan: 'tp=8 zero=1'.", show_default=False)
]
BuiltOnly = Annotated[
    bool, typer.Option("--built-only/--all-plans", help="Search only plans that Weft runs today, or all plans.")
]
Top = Annotated[int, typer.Option("--top", min=1, max=200, help="Number of layouts to list.")]
WhyNotPlan = Annotated[
    str | None, typer.Option("--why-not", metavar="PLAN", help="Explain why this plan was not chosen.")
]
Compare = Annotated[
    tuple[str, str] | None, typer.Option("--compare", metavar="A B", help="Compare two plans term by term.")
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if", metavar="gpus=16,nic=2x", help="Find the best plan for other hardware or sizes; may be repeated."
    ),
]
Reasons = Annotated[bool, typer.Option("--reasons", help="Count the refused plans by reason, with an example each.")]
Draw = Annotated[
    Path | None, typer.Option("--draw", metavar="FILE", help="Draw the best plan's pipeline schedule: .svg, .png.")
]
Pareto = Annotated[Path | None, typer.Option("--pareto", metavar="FILE", help="Draw memory against speed: .svg, .png.")]
Waterfall = Annotated[
    Path | None, typer.Option("--waterfall", metavar="FILE.svg", help="Draw the step time of the best plan by term.")
]
Memory = Annotated[
    Path | None, typer.Option("--memory", metavar="FILE.svg", help="Draw the memory of the best plan by rank.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help="Write answer, terms, reasons and pictures as one page, which needs nothing else.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE.toml", help="Write a config for `weft train`.")]
SaveModel = Annotated[
    Path | None,
    typer.Option(
        "--save-model",
        metavar="FILE.json",
        help="Write the traced description of the model; plans from it need no torch.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Price = Annotated[
    float | None, typer.Option("--price", min=0.0, help="Dollars per device and hour.", show_default=False)
]
Sort = Annotated[
    SortBy | None,
    typer.Option("--sort", help="Order of the plans: time, or energy or co2, which also show time against energy."),
]
Grid = Annotated[
    str | None,
    typer.Option("--grid", metavar="REGION", help="Grams of CO2 per kWh, or a region such as france: shows the CO2."),
]
Tier = Annotated[str, typer.Option("--tier", help="datasheet: data sheets only; tables: also published measurements.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE.json", help="A profile that `weft calibrate` wrote."),
]
Learn = Annotated[
    Path | None,
    typer.Option("--learn", metavar="RUN", help="First correct the profile by the measurements of a finished run."),
]
Refine = Annotated[
    float,
    typer.Option("--refine", min=0.0, max=3600.0, metavar="SECONDS", help="Seconds of annealing after the search."),
]


TablesFile = Annotated[
    Path | None,
    typer.Option(
        "--tables",
        metavar="FILE.toml",
        help="Choose styles of embedding tables instead: weft plan CLUSTER --tables FILE. Entries [[table]] have name, "
        "rows, width, and optionally ids (of a sample), zipf, sorted and style.",
        show_default=False,
    ),
]


# `weft plan --learn RUN`: update a profile with the measurements of a finished run.


def learn_from(run: Path, path: Path | None) -> None:
    """Write the profile with the run's measurements, and print the changes.

    Raises:
        ConfigError: if the run or the profile cannot be used.
    """
    path = path or default_path()
    profile = learn(run, load_profile(path))
    told = ", ".join(f"{part} x {ratio:.2f}" for part, ratio in profile.learned[-1].ratios) or ("no factor to learn")
    profile.save(path)
    print_line(f"{run} measured over planned: {told}")
    print_line(f"{path}: from now on {lesson_words(profile) or 'as it was measured'}")


# The command. It does not import torch.


def plan(
    model: Model = None,
    cluster: Cluster = None,
    more: More = None,
    device: Device = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    documents: Documents = None,
    tune: Tune = None,
    run: Run = None,
    fix: Fix = "",
    built_only: BuiltOnly = True,
    top: Top = 10,
    why_not: WhyNotPlan = None,
    compare: Compare = None,
    what_if: WhatIf = None,
    reasons: Reasons = False,
    draw: Draw = None,
    pareto: Pareto = None,
    waterfall: Waterfall = None,
    memory: Memory = None,
    html: Html = None,
    out: Out = None,
    save_model: SaveModel = None,
    json: Json = False,
    price: Price = None,
    sort: Sort = None,
    grid: Grid = None,
    tier: Tier = "tables",
    refine: Refine = 0.0,
    profile: ProfileFile = None,
    learn: Learn = None,
    purpose: Purpose = None,
    prompt: Prompt = None,
    new: New = None,
    batch: Batch = None,
    compiles: Compile = False,
    tables: TablesFile = None,
) -> None:
    """Find the best plans for a model on a cluster, with reasons."""
    texts, others = GenerationOptions(purpose, prompt, new, batch), {"compile": compiles}
    data = {"seq_len": seq_len, "global_batch": global_batch, "documents": documents, "refine_s": refine}
    settings = {"fixed": fix, "built_only": built_only, "tier": tier, "profile": profile}
    files = {"draw": draw, "waterfall": waterfall, "memory": memory, "out": out, "pareto": pareto, "html": html}
    others |= {"tune": tune, "run": run, "price": price, "compare": compare, "what_if": what_if, "why_not": why_not}
    with _errors_as_json() if json else nullcontext(), _light_start():
        alone = {**others, **data, **files, "cluster": cluster, "for": purpose}
        if _answers_alone(learn, profile, tables, model, device, alone, as_json=json):
            return
        model, cluster = _inputs(model, cluster, more, device)
        is_generation = texts.is_asked(data | files | others | {"sort": sort, "grid": grid})
        described = _described(model, save_model, caches=is_generation)
        if is_generation:
            plan_generation(texts, described, cluster, top=top, reasons=reasons, as_json=json, **settings)
            return
        if _answer_several_clusters(described, cluster, others, data | settings, as_json=json, sort=sort):
            return
        found = _ordered(_find(_question(described, cluster, tune, data | settings), others), sort, grid)
        _show(found, top, price, files, reasons=reasons, as_json=json)


def _answers_alone(
    learn: Path | None, profile: Path | None, tables: Path | None, model: str | None, device: str | None,
    others: dict[str, Any], *, as_json: bool,
) -> bool:  # fmt: skip
    """Learn from a run, and choose styles of tables, if the command requests it. Return True if nothing is left."""
    if learn is not None:
        learn_from(learn, profile)
    if tables is not None:
        _plan_tables(tables, model, device, others, as_json=as_json)
    return tables is not None or (learn is not None and model is None)


def _plan_tables(file: Path, cluster: str | None, device: str | None, others: dict[str, Any], as_json: bool) -> None:
    """Print styles of embedding tables. others: options that must have their defaults, except global_batch."""
    for name, value in others.items():
        if value and name != "global_batch":
            raise ConfigError(f"{name}={value}: --tables takes CLUSTER, --device and --global-batch. Leave it out.")
    if device is not None:
        cluster = described_clusters(device, cluster)
    if cluster is None:
        raise ConfigError("weft plan --tables needs CLUSTER. Write e.g. weft plan 8xh100 --tables tables.toml.")
    from weft.planner.report.table_plan import plan_tables

    found = plan_tables(file, cluster, others["global_batch"])
    typer.echo(dumps(found.as_table(), indent=2) if as_json else "\n".join(found.lines()))
    if not found.fits:
        raise typer.Exit(NOTHING_FITS)


def _ordered(found: Findings, sort: SortBy | None, grid: str | None) -> Findings:
    by = sort or "time"
    return replace(found, grid=grid_of(grid, by), answer=ranked_by(found.answer, by), sort=by)


def _show(
    found: Findings, top: int, price: float | None, files: dict[str, Path | None], *, reasons: bool, as_json: bool
) -> None:
    write_files(found, price, **files)
    if as_json:
        print_json(found, top, price)
    else:
        print_findings(found, top=top, reasons=reasons, hour_price=price)
    best, step = found.answer.best, found.compiled
    if (best is None and not found.only_judges) or (best is not None and step is not None and not fits(best, step)):
        raise typer.Exit(NOTHING_FITS)


def _question(model: Any, cluster: str, tune: str | None, settings: dict[str, Any]) -> Question:
    if tune is not None:
        return tuned_question(model, cluster, tune, **settings)
    return Question.of(model, cluster, **settings)


def _inputs(model: Model, cluster: Cluster, more: More, device: Device) -> tuple[str, str]:
    """Return the model and the clusters. Raise ConfigError if one is missing, or for further arguments."""
    if more:
        rule = "weft plan takes MODEL and CLUSTER; separate several clusters by commas"
        raise ConfigError([Problem(more[0], f"{more[0]}: {rule}. Leave it out.")])
    if device is not None:
        cluster = described_clusters(device, cluster)
    if model is None or cluster is None:
        raise ConfigError("weft plan needs MODEL and CLUSTER. Write e.g. weft plan llama3-8b 8xh100.")
    return model, cluster


@contextmanager
def _light_start() -> Iterator[None]:
    """Save startup time, and disable the garbage collector during a block.

    A plan makes many objects without cycles, and each collection would scan all of them.
    """
    if "numpy" not in sys.modules:  # starting BLAS threads, which stay idle, takes a third of the startup
        env.default_for_libraries(OPENBLAS_NUM_THREADS="1")
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _errors_as_json() -> Iterator[None]:
    """Print an error also as a JSON object on standard output, for programs."""
    try:
        yield
    except WeftError as error:
        problems = error.problems if isinstance(error, ConfigError | PlanError) else (Problem("", str(error)),)
        listed = [{"field": each.field, "message": str(each)} for each in problems]
        typer.echo(dumps({"errors": listed}, indent=2))
        raise


def _answer_several_clusters(
    model: Any, clusters: str, others: dict[str, Any], settings: dict[str, Any], *,
    as_json: bool, sort: SortBy | None = None,
) -> bool:  # fmt: skip
    """Print plans for each of several clusters, if the command requests that. Return True if it does."""
    tune, run, price = others["tune"], others["run"], others["price"]
    if others["compile"]:
        expect_alone({"tune": tune, "run": run, "documents": settings["documents"], "sort": sort})
    if tune is not None and run is not None:
        raise ConfigError(f"tune={tune}: --run plans the training of all weights. Use one of them.")
    if run is not None and not print_runs(model, clusters, run, price, settings, as_json=as_json, sort=sort or "time"):
        raise typer.Exit(NOTHING_FITS)
    if tune == "all" and sort is not None:
        raise ConfigError([Problem("sort", f"sort={sort}: --tune all has no order of plans. Use --tune lora or full.")])
    if tune == "all":
        found = scenario.what_fits(model, clusters, **settings)
        print_fits(found, as_json=as_json)
        if all(one.answer.best is None for one in found):
            raise typer.Exit(NOTHING_FITS)
    return run is not None or tune == "all"


def _described(model: str, save: Path | None, *, caches: bool) -> str | TracedModel | PlannedModel:
    """Return the model to plan for.

    User code is traced, and a config with a task is described by the task. A size, a folder or a saved model is read.
    The config of a text decoder is returned as its file name. Only tracing needs torch. A traced model is written to
    `save`, and other models raise ConfigError if `save` is given. For a config with a task, `save` is ignored.
    caches: True to measure the caches of generated texts, too, if a folder is traced.
    """
    if note := size_hides(model):
        print_line(note)
    found: str | TracedModel | PlannedModel = model
    if model.endswith(".toml"):
        task = _task_of(model)
        found = model if task is None else task.describe()
    elif MODEL_CODE.fullmatch(model):
        from weft.train.tasks.description import trace

        found = trace(model)
    else:
        model = downloaded_folder(model, "model", weights=False)
        try:
            found = read_model(model)
        except UnknownFamily:
            from weft.train.tasks.description import describe_folder

            found = describe_folder(Path(model))
            if caches:
                from weft.generation.cache_kinds import folder_caches

                found = replace(read_model(found), caches=folder_caches(Path(model)))
    if save is not None:
        _save(found, save)
    return found


def _save(found: str | TracedModel | PlannedModel, file: Path) -> None:
    """Write the traced description of a model. Raise ConfigError if it has no trace, or parts that a trace lacks."""
    traced, rule = found, "only what is traced is saved, and this model is read from a config"
    if isinstance(found, PlannedModel) and found.traced is not None:
        traced = replace(found.traced, limits=tuple(found.limits.items()))
        if found.adapter is not None or found.frozen is not None or found.texts > 1:
            rule = "the file has only the model, and the task adds an adapter, a second model or more texts per sample"
            traced = None
    if not isinstance(traced, TracedModel):
        raise ConfigError([Problem("", f"save-model={file}: {rule}. Leave it out.")])
    traced.save(file)
    print_line(f"wrote {file}.")


def _task_of(file: str) -> Task | None:
    from weft.config.files import load_config

    config = load_config(file, ["plan=auto"]).config
    if config.task.name is None and not config.model.path:
        return None
    from weft.train.folder import run_folder
    from weft.train.states.hub_names import download_all, resolved_config
    from weft.train.tasks.registry import find_task

    config = resolved_config(config, run_folder(config))
    # Planning a text decoder reads no data.
    download_all(config, print_line, weights=False, data=config.task.name is not None)
    return find_task(config)


def _find(asked: Question, others: dict[str, Any]) -> Findings:
    """Search for plans, and evaluate the plans named in options. If no implemented plan fits, search all plans.

    others: options of the command by name: why_not, compare, what_if, and compile.
    """
    if others["compile"]:
        asked = jax_question(asked)
    found = answer(asked)
    if found.best is None and asked.built_only:
        asked = replace(asked, built_only=False)
        found = answer(asked)
    step, pair = None, others["compare"]
    if others["compile"]:
        found = jax_answer(found)
        gc.enable()  # unlike plans, traces have cycles
        step = None if found.best is None else compiled_step(found.best)
    return Findings(
        answer=found,
        why_not=None if others["why_not"] is None else judge(others["why_not"], asked, found),
        comparison=None if pair is None else compare_plans(pair[0], pair[1], asked),
        scenarios=tuple(scenario.what_if(text, asked) for text in others["what_if"] or ()),
        compiled=step,
        mixed=_mixed(found),
    )


def _mixed(found: Answer[Candidate]) -> MixedAnswer | None:
    """Return the plan with unequal shares on a cluster of several kinds, or None for one kind."""
    if not found.question.cluster.kinds or found.best is None:
        return None
    from weft.planner.mixed.answer import mixed_answer

    return mixed_answer(found.question, found.ranked)
