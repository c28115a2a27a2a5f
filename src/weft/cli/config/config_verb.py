"""`weft config`: show what a run would be made of, and the schema of config files. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.command_words import split_words

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
    from weft.spec.files import format_config, load_config, show_origins

    path, overrides = split_words(words or [])
    loaded = load_config(path, overrides)
    if not origin:
        typer.echo(format_config(loaded.config), nl=False)
        return
    rows = [(f"{key} = {value}", place) for key, value, place in show_origins(loaded)]
    width = min(60, max(len(text) for text, _ in rows))
    for text, place in rows:
        typer.echo(f"{text:<{width}}  # {place}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files, for editors that complete and check TOML."""
    import json

    from weft.spec.files import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DeepSpeed config, such as ds_config.json.")],
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="Number of ranks; without it, one axis of the plan is '*'.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the config here, as TOML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 2 if the file has unknown keys.")] = False,
) -> None:
    """Translate a DeepSpeed config, and say what became of each key."""
    from weft.cli.config.config_import import print_import
    from weft.deepspeed import import_deepspeed

    imported = import_deepspeed(file, world_size)
    print_import(imported, out, as_json)
    if strict and imported.typos:
        raise typer.Exit(2)
