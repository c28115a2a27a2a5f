"""Documents of mixed lengths, packed one after another into sequences: what attention sees of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import ConfigError, Problem
from weft.units import counted, parse_count

_EXAMPLE = "--documents 512:9,8k:1"


@dataclass(frozen=True, slots=True)
class DocumentMix:
    """How many documents have which length.

    counts: (tokens of a document, how many there are of it, relative to the others), shortest first.
    """

    counts: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> DocumentMix:
        """Return the mix of "512:9,8k:1": nine documents of 512 tokens for each of 8,000; "900": all of one length.

        Raises:
            ConfigError: for another text, or a length or count that is not above 0.
        """
        found: defaultdict[int, float] = defaultdict(float)
        for part in text.split(","):
            length, colon, count = (each.strip() for each in part.partition(":"))
            try:
                tokens, number = parse_count(length), float(count) if colon else 1.0
            except ValueError:
                tokens, number = 0, 0.0
            if tokens < 1 or not 0 < number < 1e18:
                rule = "a document's tokens and, after a colon, how many there are: numbers above 0, with commas"
                raise ConfigError([Problem("", f"documents={part.strip()}: {rule}. Write e.g. {_EXAMPLE}.")])
            found[tokens] += number
        return cls(tuple(sorted(found.items())))

    def pieces(self, seq_len: int) -> Iterator[tuple[int, float]]:
        """Yield (tokens, share of all tokens) of what a sequence holds in one piece, shortest first.

        A document longer than a sequence fills whole ones, and its rest is a piece of its own. Where packing cuts
        others at the end of a sequence, that is not counted.
        """
        tokens: defaultdict[int, float] = defaultdict(float)
        for length, count in self.counts:
            whole, rest = divmod(length, seq_len)
            tokens[seq_len] += count * whole * seq_len
            tokens[rest] += count * rest
        total = sum(tokens.values())
        yield from ((length, held / total) for length, held in sorted(tokens.items()) if held)

    def __str__(self) -> str:
        mean = sum(length * count for length, count in self.counts) / sum(count for _, count in self.counts)
        return f"documents of {counted(round(mean), 'token')} on average"
