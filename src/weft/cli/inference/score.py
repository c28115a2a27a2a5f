"""`weft score`: log-likelihoods of texts, completions and choices under a trained model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import env
from weft.cli.console import print_line, table
from weft.cli.inference.generate import source_folder
from weft.errors import ConfigError

PLAN_HELP = 'Plan of the ranks, such as "tp=2" or "dp_shard=2 zero=3"; by default one rank.'
DTYPE_HELP = "Precision of weights and forward: fp32, bf16, fp16 or fp64; by default the plan's."


def score(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder such as runs/quickstart, a Hugging Face folder or OWNER/NAME.")
    ],
    data: Annotated[Path, typer.Option("--data", "-d", help="JSONL file of texts, completions or choices.")],
    plan: Annotated[str, typer.Option("--plan", "-p", help=PLAN_HELP)] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL file for the result of each record.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP, show_default=False)] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the model reads at once.", show_default="the model's")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens scored in each further window of a long text.", show_default="half of them"),
    ] = None,
    no_windows: Annotated[bool, typer.Option("--no-windows", help="Refuse texts longer than the context.")] = False,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch on a data rank.", show_default="1024; 16384 on a GPU"),
    ] = None,
    device: Annotated[str, typer.Option(help="As launch.device: auto, cpu, cuda ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute log-likelihoods, perplexities and accuracies of a JSONL file under a model."""
    folder = source_folder(run, step)
    from weft.inference.ranks import inference_plan, read_plan, run_on_ranks

    settled, notes = inference_plan(read_plan(plan), dtype)
    if settled.world_size > 1 and env.rank_env() is None:
        from weft.verify.rank_pool import start_imports

        start_imports(str(folder) if (folder / "config.json").is_file() else None)
    from weft.inference.open_model import read_facts
    from weft.inference.score import score_on_ranks
    from weft.inference.score_data import read_records, refuse_long, results_of, spans_of

    records, facts = read_records(data), read_facts(folder)
    longest = min(context or facts.max_positions, facts.max_positions)
    spans = spans_of(records, facts.tokenizer, facts.num_ids, data)
    if no_windows:
        refuse_long(records, spans, longest, data)
    _refuse_out(out)
    for note in notes if is_first_rank() else ():
        print_line(note)
    stride = min(stride or max(1, longest // 2), longest)
    every = [span for several in spans for span in several]
    began = time.perf_counter()
    scores = run_on_ranks(
        score_on_ranks, settled, str(folder), step, every, longest, stride, batch_tokens, device=device
    )
    if scores is None:  # another rank of torchrun than the first
        return
    found, figures = results_of(records, spans, iter(scores), data)
    figures["seconds"] = time.perf_counter() - began
    if out is not None:
        _write(out, found)
    print(json.dumps(figures, indent=1) if as_json else "\n".join(_lines(figures)))


def is_first_rank() -> bool:
    """Return True unless this process is a rank of a launcher other than the first."""
    place = env.rank_env()
    return place is None or place.rank == 0


def _refuse_out(out: Path | None) -> None:
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        why = "it is a folder" if out.is_dir() else "its folder does not exist"
        raise ConfigError(f"--out={out}: {why}. Give the path of a file.")


def _write(out: Path, found: Sequence[dict[str, Any]]) -> None:
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    draft.write_text("".join(json.dumps(one) + "\n" for one in found), "utf-8")
    os.replace(draft, out)


def _lines(figures: dict[str, Any]) -> list[str]:
    rows = [("of", "figure", "value")]
    for kind, values in figures.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            shown = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append((kind, name.replace("_", " "), shown))
    return table(rows, right=(2,))
