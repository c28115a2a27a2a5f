"""`weft models`: the sizes that have a name."""

from __future__ import annotations

from weft.spec import ModelSpec
from weft.spec.model import named_sizes
from weft.units import format_count


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
