"""`weft config`: show a config, print the schema of config files, and import configs of other tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import print_line, split_words
from weft.config.files import format_config, run_name
from weft.config.rules.config_rules import config_problems
from weft.errors import ConfigError
from weft.interop.deepspeed import Imported

_STYLES = {"became": "green", "follows": "cyan", "nothing": "dim", "not built": "yellow", "removed": "dim"}


def print_import(imported: Imported, out: Path | None, as_json: bool) -> None:
    """Print the outcome of every key. Write the config to `out`, or print it if `out` is None.

    If stdout is not a terminal, outcomes are printed as TOML comments, so that stdout can be redirected to a config
    file. as_json: print JSON instead. Raise ConfigError if `out` exists or cannot be written.
    """
    config = imported.config()
    run = config.run.model_copy(update={"name": run_name(out or Path(imported.name)) or config.run.name})
    toml = format_config(config.model_copy(update={"run": run}), only_changes=True)
    document = _comments(imported) + toml
    if out is not None:
        _write(out, document)
    if as_json:
        typer.echo(json.dumps(_as_json(imported, toml), indent=2))
    elif sys.stdout.isatty():
        _print_table(imported)
        if out is None:
            typer.echo(f"\n{toml}", nl=False)
    else:
        typer.echo(document if out is None else _comments(imported), nl=False)
    if imported.typos:
        keys = "1 key is" if len(imported.typos) == 1 else f"{len(imported.typos)} keys are"
        names = ", ".join(line.key for line in imported.typos)
        print_line(f"warning: {keys} unknown to {imported.tool} and ignored: {names}.")
    if out is not None:
        print_line(f"wrote {out}.")


def refusals(imported: Imported) -> list[str]:
    """Return the messages of the rules that the imported config breaks."""
    return [problem.message for problem in config_problems(imported.config())]


def sections(imported: Imported) -> list[tuple[str, Sequence[str]]]:
    """Return the non-empty sections of notes that follow the table, as (title, lines)."""
    every = [
        ("Warning: typos", [f"{line.key}: {line.text[:1].upper()}{line.text[1:]}" for line in imported.typos]),
        ("Refused today", refusals(imported)),
        ("Left to you; Weft's defaults apply", [", ".join(imported.open)] if imported.open else []),
        ("Differences", imported.notes),
    ]
    return [(title, lines) for title, lines in every if lines]


def _comments(imported: Imported) -> str:
    lines = [f"Imported from {imported.name} by `weft config import`.", ""]
    lines += [str(line) for line in imported.lines]
    for title, texts in sections(imported):
        lines += ["", f"{title}:", *(f"  {text}" for text in texts)]
    return "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines) + "\n"


def _print_table(imported: Imported) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("key", "value", "outcome"):
        table.add_column(title, overflow="fold")
    for line in imported.lines:
        table.add_row(Text(line.key), Text(line.value), Text(line.sentence, style=_STYLES.get(line.kind, "bold red")))
    console = Console(highlight=False)
    console.print(table)
    for title, texts in sections(imported):
        console.print(Text(f"\n{title}", style="bold"))
        for text in texts:
            console.print(Text(f"  {text}"))


def _as_json(imported: Imported, toml: str) -> dict[str, object]:
    return {
        "file": imported.name,
        "plan": imported.plan,
        "settings": dict(imported.overrides),
        "keys": [
            {"key": line.key, "value": line.value, "outcome": line.kind, "text": line.text, "sets": list(line.fields)}
            for line in imported.lines
        ],
        "open": list(imported.open),
        "notes": list(imported.notes),
        "refused": refusals(imported),
        "toml": toml,
    }


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out {path}: the file exists. Give another name, or delete it.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"--out {path}: it cannot be written ({reason}). Name a file in an existing folder."
        ) from None


# `weft config`: show a run's complete config, and the schema of config files. Does not import torch.

app = typer.Typer(
    help="Show, check and explain configs.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [key=value ...]",
            help="A config file, and settings that override it. Without a file, the defaults.",
            show_default=False,
        ),
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="List every value with the file and line that set it.")
    ] = False,
) -> None:
    """Check a config and print it in full, as a TOML file."""
    from weft.config.files import format_config, load_config

    path, overrides = split_words(words or [])
    loaded = load_config(path, overrides)
    if not origin:
        typer.echo(format_config(loaded.config), nl=False)
        return
    rows = [(f"{key} = {value}", place) for key, value, place in loaded.rows()]
    width = min(60, max(len(text) for text, _ in rows))
    for text, place in rows:
        typer.echo(f"{text:<{width}}  # {place}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files, for editors that complete and check TOML."""
    import json

    from weft.config.files import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


class ConfigTool(StrEnum):
    """Tools whose configs are read."""

    deepspeed = "deepspeed"
    axolotl = "axolotl"
    llamafactory = "llamafactory"
    trl = "trl"


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A config of DeepSpeed (JSON), axolotl, LLaMA-Factory or TRL (YAML)."),
    ],
    source: Annotated[
        ConfigTool | None, typer.Option("--from", help="The tool; without it, the keys of the file decide.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="Number of ranks; without it, one axis of the plan is '*'.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the config here, as TOML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 2 if the file has unknown keys.")] = False,
) -> None:
    """Translate a config of another tool, and report the outcome of each key."""
    from weft.interop.trainers import import_config

    imported = import_config(file, world_size, source.value if source else None)
    print_import(imported, out, as_json)
    if strict and imported.typos:
        raise typer.Exit(2)
