"""`weft eval`: tasks of EleutherAI's lm-evaluation-harness on a trained model, with data on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import env
from weft.cli.console import print_line, table
from weft.cli.inference.generate import source_folder
from weft.cli.inference.score import DTYPE_HELP, PLAN_HELP, is_first_rank
from weft.errors import ConfigError, MissingExtra, did_you_mean

if TYPE_CHECKING:
    from weft.train.folder import RunFolder

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# lm-eval is an optional dependency.


def evaluate(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="Folder of a run, a Hugging Face folder or OWNER/NAME."),
    ],
    tasks: Annotated[str, typer.Option(help="Names of tasks of lm-eval, with commas.")],
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with tasks of your own: YAML files as lm-eval reads them.")
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt.", show_default="task's")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.", show_default="all")] = None,
    plan: Annotated[str, typer.Option("--plan", "-p", help=PLAN_HELP)] = "",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Questions that are computed together.", show_default="by their tokens")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")] = False,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP, show_default=False)] = None,
    device: Annotated[str, typer.Option(help="As launch.device: auto, cpu, cuda ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained model with lm-eval on local data. Nothing is downloaded."""
    env.default_for_libraries(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1", DISABLE_MULTIPROC="1")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks: it names no task. Use --tasks arc_easy or a task of --task-folder.")
    known = _known_tasks(task_folder)
    for name in names:
        if not known.match_tasks([name]):
            hint = did_you_mean(name, known.all_tasks) or " `lm-eval ls tasks` lists those that lm-eval has."
            raise ConfigError(f"--tasks={name}: lm-eval has no such task.{hint}")
    folder, step = _source(run)
    from weft.inference.ranks import inference_plan, read_plan, run_on_ranks

    settled, notes = inference_plan(read_plan(plan), dtype)
    _expect_data(known, names)
    from weft.checkpoint.load import load_checkpoint
    from weft.inference.lm_eval_model import evaluate_on_rank
    from weft.train.tasks.generation import find_checkpoint, open_run

    opened = open_run(folder, "be evaluated")
    if opened is not None:
        step = load_checkpoint(find_checkpoint(opened, step), verify=True).step
    for note in notes if is_first_rank() else ():
        print_line(note)
    settings = {"num_fewshot": few_shot, "limit": limit, "apply_chat_template": chat}
    where = str(task_folder) if task_folder is not None else None
    found = run_on_ranks(
        evaluate_on_rank, settled, str(folder), step, names, where, batch_size, settings, device=device
    )
    if found is None:  # another rank of torchrun than the first
        return
    file = _keep(opened, step, found) if opened is not None and step is not None else None
    if as_json:
        print(json.dumps({"step": step, "tasks": found}, indent=1))
        return
    for line in _table(found):
        print(line)
    if file is not None:
        print_line(f"step {step} of {folder}: also in {file}.")


def _source(run: str) -> tuple[Path, int | None]:
    """Return the folder and the step of RUN@STEP. Without a step, and for a folder with @ in its name, it is None."""
    word, at, number = run.rpartition("@")
    if at and number.isdecimal() and not Path(run).exists():
        return source_folder(word, int(number)), int(number)
    return source_folder(run), None


def _keep(run: RunFolder, step: int, found: dict[str, dict[str, Any]]) -> Path:
    """Add figures to the run's file of a step, which may have other tasks, and return its path."""
    file = run.path / "evals" / f"step_{step:08d}.json"
    file.parent.mkdir(exist_ok=True)
    before = json.loads(file.read_text()) if file.is_file() else {}
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(before | found, indent=1) + "\n")
    os.replace(draft, file)
    return file


def _known_tasks(folder: Path | None) -> Any:
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder={folder}: there is no such folder. Give one with YAML files of tasks.")
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets", "accelerate"):
            raise
        raise MissingExtra("lm-eval", "eval", "weft eval") from error
    return TaskManager(include_path=str(folder) if folder is not None else None)


def _expect_data(known: Any, names: Sequence[str]) -> None:
    try:
        known.load(known.match_tasks(list(names)))
    except Exception as error:  # data readers may raise any exception
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"--tasks={','.join(names)}: their data cannot be read ({said.rstrip('.')}). Weft downloads nothing: "
            "fetch it with the datasets package before, or give a --task-folder whose tasks name local files."
        ) from error


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [("task", "figure", "value", "+-")]
    for task, figures in found.items():
        for key, value in figures.items():
            if isinstance(value, float) and "_stderr" not in key:
                name, _, kind = key.partition(",")
                error = figures.get(f"{name}_stderr" + (f",{kind}" if kind else ""))
                rows.append((task, key, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "-"))
    return table(rows, right=(2, 3))
