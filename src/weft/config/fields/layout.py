"""Layout: how each module is sharded, by module path. Only data; `parallel/` applies it.

Text form: a sequence of `pattern=style` items; the first matching pattern applies. In a pattern `*` matches one part of
a path and `{q,k,v}` one of several names: "embed=vocab blocks.*.attn.{q,k,v}=colwise blocks.*.attn.o=rowwise". For a
fused layer, the number of its segments follows the style: "h.*.attn.c_attn=colwise:3".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.errors import LayoutError, did_you_mean

#: colwise: shard the output features; rowwise: shard the input features, outputs are partial sums; vocab: shard the
#: rows of an embedding or head; replicate: full copy on every rank; partial: full copy on every rank, each rank uses
#: only its own heads or features, so gradients are summed; expert: distribute experts; spread: full encoder on every
#: rank, each rank computes some of its inputs; spread:data: also inputs of other data ranks.
#: Embedding tables over the data ranks: rows, columns: shard their rows or columns; one: one rank holds the table.
TABLE_STYLES = ("rows", "columns", "one")
STYLES = ("colwise", "rowwise", "vocab", "replicate", "partial", "expert", "spread", "spread:data", *TABLE_STYLES)
#: The style of a fused layer includes the number of equal segments, or their sizes: colwise:3, colwise:64+16+16.
_FUSED = re.compile(r"colwise:(?:[1-9][0-9]*)(?:\+[1-9][0-9]*)*", re.ASCII)

_PART = r"(?:\*|[A-Za-z0-9_]+|\{[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\})"
_PATTERN = re.compile(rf"{_PART}(?:\.{_PART})*", re.ASCII)

_LLAMA = (
    ("embed", "vocab"),
    ("blocks.*.{norm1,norm2}", "replicate"),
    ("blocks.*.attn.{q,k,v}", "colwise"),
    ("blocks.*.attn.o", "rowwise"),
    ("blocks.*.mlp.{gate,up}", "colwise"),
    ("blocks.*.mlp.down", "rowwise"),
    ("norm", "replicate"),
    ("head", "vocab"),
)
#: Patterns in addition to the llama patterns, because a model with experts may also have dense layers.
_MOE = (
    *_LLAMA,
    ("blocks.*.mlp.router", "replicate"),
    ("blocks.*.mlp.experts", "expert"),
    ("blocks.*.mlp.shared.{gate,up}", "colwise"),
    ("blocks.*.mlp.shared.down", "rowwise"),
)
_GPT2 = (
    ("embed", "vocab"),
    ("pos_embed", "replicate"),
    ("blocks.*.{norm1,norm2}", "replicate"),
    ("blocks.*.attn.{q,k,v}", "colwise"),
    ("blocks.*.attn.o", "rowwise"),
    ("blocks.*.mlp.up", "colwise"),
    ("blocks.*.mlp.down", "rowwise"),
    ("norm", "replicate"),
    ("head", "vocab"),
)


class Style(NamedTuple):
    """A style and, for a fused layer, its segments: the number of equal segments, or the size of each."""

    name: str
    segments: tuple[int, ...] = ()

    def sizes(self, total: int) -> tuple[int, ...]:
        """Return the rows of each segment of a layer with `total` rows, or () for a layer that is not fused.

        Raises:
            LayoutError: if the segments do not add up to `total`.
        """
        if not self.segments:
            return ()
        count = self.segments[0]
        sizes = self.segments if len(self.segments) > 1 else (total // count,) * count
        if sum(sizes) != total:
            text = "+".join(map(str, self.segments))
            raise LayoutError(f"{self.name}:{text}: the layer has {total} outputs. Give segments that add up to that.")
        return sizes


@dataclass(frozen=True, slots=True)
class Layout:
    """Ordered pairs of module-path pattern and style. Hashable; `Layout.parse(layout.format()) == layout`.

    Raises:
        LayoutError: for a pattern or style that cannot be used, or a pattern given twice.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for pattern, style in self.pairs:
            _check_pair(pattern, style)
            if pattern in seen:
                raise LayoutError(f"layout pattern {pattern!r} is set twice. Keep one.")
            seen.add(pattern)
        if self.is_of_tables:
            for pattern, style in self.pairs:
                if style not in (*TABLE_STYLES, "replicate"):
                    raise LayoutError(
                        f"{pattern}={style}: a layout of embedding tables has the styles {', '.join(TABLE_STYLES)} and "
                        "replicate only. Leave this entry out, or the tables."
                    )

    @property
    def is_of_tables(self) -> bool:
        """True if the layout shards embedding tables over the data ranks. `replicate` then means a table too."""
        return any(style in TABLE_STYLES for _, style in self.pairs)

    def match(self, path: str) -> str | None:
        """Return the style of the module at `path`, or None if no pattern matches."""
        return next((style for pattern, style in self.pairs if _compiled(pattern).fullmatch(path)), None)

    def style(self, path: str) -> Style | None:
        """Return the style's name and the segments of a fused layer, or None if no pattern matches."""
        text = self.match(path)
        if text is None:
            return None
        name, _, parts = text.partition(":")
        return Style(name, tuple(int(part) for part in parts.split("+")) if parts and name != "spread" else ())

    def divided_modules(self, paths: Iterable[str]) -> dict[str, bool]:
        """Return the encoders whose inputs are distributed over ranks, each with True if also over data ranks."""
        found = {path: self.match(path) for path in paths}
        return {path: style == "spread:data" for path, style in found.items() if style and style.startswith("spread")}

    @property
    def without_distributed(self) -> Layout:
        """Return the layout without encoders that are distributed over ranks."""
        return Layout(tuple(pair for pair in self.pairs if not pair[1].startswith("spread")))

    def unused(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns that match none of the module paths, as in a layout made for another model."""
        known = list(paths)
        return tuple(pattern for pattern, _ in self.pairs if not any(map(_compiled(pattern).fullmatch, known)))

    def fitted(self, paths: Iterable[str]) -> Layout:
        """Return the layout without patterns that match none of the module paths."""
        unused = self.unused(paths)
        return Layout(tuple(pair for pair in self.pairs if pair[0] not in unused))

    @classmethod
    def named(cls, name: str) -> Layout:
        """Return the layout of a model family of Weft: "llama", "gpt2", or "moe" (llama with experts).

        Raises:
            LayoutError: for an unknown family.
        """
        known = {"llama": _LLAMA, "gpt2": _GPT2, "moe": _MOE}
        if name not in known:
            hint = did_you_mean(name, known) or f" Known: {', '.join(known)}."
            raise LayoutError(f"layout={name}: no layout has this name.{hint}")
        return cls(known[name])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form.

        Raises:
            LayoutError: for an item that is not pattern=style, or as in `Layout`.
        """
        pairs: list[tuple[str, str]] = []
        for word in text.split():
            pattern, equals, style = word.partition("=")
            if not equals:
                raise LayoutError(
                    f"layout entry {word!r}: a layout consists of pattern=style entries. Use e.g. embed=vocab."
                )
            pairs.append((pattern, style))
        return cls(tuple(pairs))

    @classmethod
    def read(cls, source: str | Path) -> Layout:
        """Return the layout from the value of a setting: its text, or the path of a file that contains the text.

        `weft layout MODEL --save` writes such files, in which '#' starts a comment.

        Raises:
            LayoutError: for a file that cannot be read, or as in `parse`.
        """
        text = str(source)
        if "=" in text and not Path(text).is_file():
            return cls.parse(text)
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise LayoutError(
                f"layout={text}: this file cannot be read ({reason}). Use pattern=style entries, or a file that "
                "`weft layout MODEL --save FILE` wrote."
            ) from error
        return cls.parse(" ".join(line.partition("#")[0] for line in lines))

    @classmethod
    def from_mapping(cls, table: Mapping[str, object]) -> Layout:
        """Read a table such as `[layout]` in TOML: {"embed" = "vocab", "blocks.*.attn.o" = "rowwise"}."""
        return cls(tuple((name, style if isinstance(style, str) else repr(style)) for name, style in table.items()))

    def format(self) -> str:
        """Return the one-line text form."""
        return " ".join(f"{pattern}={style}" for pattern, style in self.pairs)

    def __str__(self) -> str:
        return self.format()


def _check_pair(pattern: str, style: str) -> None:
    if not _PATTERN.fullmatch(pattern):
        raise LayoutError(
            f"layout pattern {pattern!r}: a module path is needed, and '*' or {{a,b}} may replace its parts. Use e.g. "
            "'blocks.*.attn.q'."
        )
    if style not in STYLES and not _FUSED.fullmatch(style):
        hint = did_you_mean(style, STYLES) or f" Use {pattern}=replicate."
        raise LayoutError(f"{pattern}={style}: not one of {', '.join(STYLES)}.{hint}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    names = [f"(?:{part[1:-1].replace(',', '|')})" if part.startswith("{") else part for part in pattern.split(".")]
    return re.compile(r"\.".join(r"[^.]+" if name == "*" else name for name in names))


# Divisors, for rules that require even division.


def common_divisors(*numbers: int) -> list[int]:
    """Return the common divisors of `numbers`, ascending; only some of them for extremely large numbers."""
    smallest = min(numbers)
    low = [divisor for divisor in range(1, min(math.isqrt(smallest), 10_000) + 1) if smallest % divisor == 0]
    every = sorted({*low, *(smallest // divisor for divisor in low)})
    return [divisor for divisor in every if all(number % divisor == 0 for number in numbers)]


def nearest(values: Iterable[int], wanted: int) -> int:
    """Return the value closest to the wanted one; of two equally close values, the smaller."""
    return min(values, key=lambda value: (abs(value - wanted), value))
