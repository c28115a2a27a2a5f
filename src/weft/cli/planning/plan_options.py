"""Words and options of `weft plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="8xh100 (one node of 8), 2048x8xh100 (nodes x devices x type), here, 4xhere, a profile or a .toml file.",
        show_default=False,
    ),
]
MoreRuns = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="RUNS.csv", show_default=False)]
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
        help="Plan a whole run in days and dollars: tokens=, loss= or budget=5000usd; also mtbf= (of a device), "
        "restart=, save=, stall=, store= (bytes/s of checkpoints), grid= (g CO2 a kWh, or france). CLUSTER may be a "
        "list with commas.",
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
    Path | None, typer.Option("--draw", metavar="FILE.svg", help="Draw the best plan's pipeline schedule.")
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
Tier = Annotated[str, typer.Option("--tier", help="datasheet: data sheets only; tables: also published measurements.")]
Score = Annotated[
    list[Path] | None,
    typer.Option(
        "--score",
        metavar="RUNS.csv",
        help="Compare predictions with measured runs instead of planning; more files may follow.",
    ),
]
ExperienceFile = Annotated[
    Path | None,
    typer.Option(
        "--experience", metavar="FILE.toml", help="With --score: write what the errors on unseen runs teach the bands."
    ),
]
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
