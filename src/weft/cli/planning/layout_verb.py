"""`weft layout`: what tensor parallelism would cut in a model, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.errors import ModelError, did_you_mean


def layout(
    model: Annotated[
        str, typer.Argument(help="A size such as llama3-8b, a Hugging Face config folder, or package.module:function.")
    ],
    save: Annotated[Path | None, typer.Option(help="Write the layout to this file, for editing.")] = None,
    tp: Annotated[int, typer.Option(help="Check that the model can be split over this many ranks.")] = 0,
) -> None:
    """Print the tensor-parallel layout of a model: patterns of module paths, their styles, and the reasons.

    The model is built on the meta device and needs no memory. Use an edited file with layout="FILE" in a config,
    `weft verify --layout FILE`, or `run.parallelize(model, layout="FILE")`.
    """
    from weft.cli.console import say
    from weft.parallel.tensor import check_layout
    from weft.spec.model import size_hides
    from weft.structure import explain_layout

    if note := size_hides(model):
        say(note)
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
    """A model without numbers, and an example of its arguments where its function gave one.

    Raises ModelError where the name says no model.
    """
    import torch

    from weft.spec.model import model_names
    from weft.structure import hugging_face

    with torch.device("meta"):
        if ":" in name:
            return _from_function(name)
        folder = Path(name)
        if name in model_names():
            return _from_size(name), None
        if (folder / "config.json").exists() or folder.name == "config.json":
            return hugging_face.model_of_config(hugging_face.load_model_config(folder)), None
        return _from_size(name), None


def _from_size(name: str) -> Any:
    from weft.models import build_decoder
    from weft.spec import decoder_spec
    from weft.spec.model import model_names

    if name not in model_names():
        hint = did_you_mean(name, model_names()) or " `weft models` lists the sizes."
        raise ModelError(f"model={name}: not a size, a folder with a config.json, or package.module:function.{hint}")
    return build_decoder(decoder_spec(name), device="meta")


def _from_function(name: str) -> tuple[Any, Any]:
    from weft.structure import call_function

    built, rest = call_function(name)
    return built, rest[0] if rest and not callable(rest[0]) else None
