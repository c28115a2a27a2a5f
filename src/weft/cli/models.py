"""`weft models` and `weft layout`: the built-in sizes, and the tensor-parallel layout of a model with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.config.shapes.model_spec import ModelSpec, named_sizes
from weft.errors import ModelError, did_you_mean
from weft.hub import downloaded_folder, is_hub_text
from weft.units import format_count


def layout(
    model: Annotated[
        str,
        typer.Argument(
            help="A size such as llama3-8b, a Hugging Face folder or OWNER/NAME, or package.module:function."
        ),
    ],
    save: Annotated[Path | None, typer.Option(help="Write the layout to this file, for editing.")] = None,
    tp: Annotated[int, typer.Option(help="Check that the model can be split over this many ranks.")] = 0,
) -> None:
    """Print the tensor-parallel layout of a model: patterns of module paths, their styles, and the reasons.

    The model is built on the meta device and needs no memory. Use an edited file with layout="FILE" in a config,
    `weft verify --layout FILE`, or `run.parallelize(model, layout="FILE")`.
    """
    from weft.cli.console import print_line
    from weft.config.shapes.model_spec import size_hides
    from weft.models.inspect.find_layout import explain_layout
    from weft.parallel.tensor.read_layout import check_layout

    if note := size_hides(model):
        print_line(note)
    built, example = build_model(model)
    found = explain_layout(built, example)
    width = max(len(pattern) for pattern, _ in found.layout.pairs)
    styles = max(len(style) for _, style in found.layout.pairs)
    print(f"{type(built).__name__}: {found.source}")
    for pattern, style in found.layout.pairs:
        print(f"  {pattern:{width}}  {style:{styles}}  {found.reasons.get(pattern, '')}".rstrip())
    legal = check_layout(built, found.layout, tp)
    print(f"legal values of tp: {', '.join(map(str, legal))}")
    if save is not None:
        save.write_text("\n".join(f"{pattern}={style}" for pattern, style in found.layout.pairs) + "\n")
        print(f"wrote {save}")


def build_model(name: str) -> tuple[Any, Any]:
    """Return a model on the meta device, and example arguments if its function provides them.

    Raises:
        ModelError: if the name is not a model.
    """
    import torch

    from weft.config.shapes.model_spec import model_names
    from weft.models.inspect import hugging_face

    with torch.device("meta"):
        if ":" in name and not is_hub_text(name):
            from weft.models.inspect.dry_run import call_function

            built, rest = call_function(name)
            return built, rest[0] if rest and not callable(rest[0]) else None
        folder = Path(downloaded_folder(name, "model", weights=False))
        if name not in model_names() and ((folder / "config.json").exists() or folder.name == "config.json"):
            return hugging_face.model_of_config(hugging_face.load_model_config(folder)), None
        return _from_size(name), None


def _from_size(name: str) -> Any:
    from weft.config.shapes.model_spec import decoder_spec, model_names
    from weft.models.registry import build_decoder

    if name not in model_names():
        hint = did_you_mean(name, model_names()) or " `weft models` lists the sizes."
        raise ModelError(f"model={name}: not a size, a folder with a config.json, or package.module:function.{hint}")
    return build_decoder(decoder_spec(name), device="meta")


# `weft models`: the named model sizes.


def list_models() -> None:
    """List the model sizes with their shapes and parameter counts."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("family")
    for title in ("parameters", "dim", "layers", "heads", "vocab", "context"):
        table.add_column(title, justify="right", no_wrap=True)
    for size in named_sizes():
        spec = size.spec
        table.add_row(
            size.name,
            spec.family,
            format_count(ModelSpec.of_decoder(spec).num_params),
            str(spec.dim),
            str(spec.num_layers),
            str(spec.num_heads) if spec.num_heads == spec.num_kv_heads else f"{spec.num_heads}/{spec.num_kv_heads}",
            f"{spec.vocab_size}*" if size.open_vocab else str(spec.vocab_size),
            str(spec.max_seq_len),
        )
    console = Console()
    console.print(table)
    console.print("heads: query/key-value.  *: the tokenizer sets the vocabulary size.", style="dim", highlight=False)
