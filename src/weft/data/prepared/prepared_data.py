"""Tokenised data of a run as a value: where it lies, what it holds, and in what it differs from other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from weft.data.shards import SplitCounts, verify_split
from weft.data.tokens import Tokenizer
from weft.errors import DataError
from weft.units import counted, format_count


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """One split of one tokenised source. folder: where its shards are. packing: how its documents become sequences.

    kind: of its records, as the schema calls it.
    """

    name: str
    folder: Path
    weight: float | None
    pad_id: int
    end_id: int
    counts: SplitCounts
    packing: str = "concat"
    kind: str = ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the split."""
        return self.counts.num_tokens

    @property
    def num_documents(self) -> int:
        """The number of documents in the split."""
        return self.counts.num_documents

    @property
    def content(self) -> str:
        """Digest of the stored tokens, wherever they lie and whatever the files were called."""
        files = sorted((name, digest) for name, (_, digest) in self.counts.files.items())
        return key_of(
            files, self.counts.dtype, self.pad_id, self.end_id, *map(list, filter(None, [self.counts.weights]))
        )

    def __str__(self) -> str:
        documents = counted(self.num_documents, "document")
        return f"{self.name} ({documents}, {format_count(self.num_tokens)} tokens)"


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data of a run. train, eval: the sources; eval is empty where there is nothing to evaluate on.

    summary: sentences for people: which schema was found where, counts, what was quarantined.
    """

    train: tuple[PreparedSource, ...]
    eval: tuple[PreparedSource, ...]
    tokenizer_dir: Path
    vocab_size: int
    summary: list[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, read from its folder."""
        return Tokenizer.load(self.tokenizer_dir)

    @property
    def digest(self) -> str:
        """Names the content of all tokens: equal for two preparations that give the same batches."""
        return key_of(self.vocab_size, [[(s.content, s.packing) for s in split] for split in (self.train, self.eval)])

    def changes_from(self, before: PreparedData) -> list[str]:
        """Return one phrase for each source whose tokens or packing are not those of `before`, with its config key."""
        found = _changes("data.train", before.train, self.train) or _changes("data.eval", before.eval, self.eval)
        if not found and before.digest != self.digest:
            found.append(f"tokenizer: it has {self.vocab_size} entries, and {before.vocab_size} before")
        return found

    def to_json(self) -> str:
        """Return JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PreparedData:
        """Read what `to_json` wrote.

        Raises:
            DataError: with the reason alone, for any other text.
        """
        try:
            values = json.loads(text)
            train, evaluation = (
                tuple(
                    PreparedSource(
                        **{**entry, "folder": Path(entry["folder"]), "counts": SplitCounts.from_dict(entry["counts"])}
                    )
                    for entry in values[split]
                )
                for split in ("train", "eval")
            )
            return cls(train, evaluation, Path(values["tokenizer_dir"]), values["vocab_size"], values["summary"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"it cannot be read: {error}") from error


def _changes(key: str, before: Sequence[PreparedSource], now: Sequence[PreparedSource]) -> list[str]:
    found = []
    for number, (old, new) in enumerate(zip_longest(before, now)):
        if old is None or new is None:
            found.append(f"{key}.{number}: it is {new or 'not there'}, and was {old or 'not there'}")
        elif old.content != new.content:
            same_size = old.num_tokens == new.num_tokens
            found.append(f"{key}.{number}: it is {new}{' with other tokens' if same_size else ''}, and was {old}")
        elif old.packing != new.packing:
            found.append(f"{key}.{number}: its packing is {new.packing}, and data.packing={old.packing} was used")
    return found


def verify_data(prepared: PreparedData) -> list[str]:
    """Read all shards and compare their digests; one sentence for each damaged file."""
    problems = []
    for source in (*prepared.train, *prepared.eval):
        problems += [f"{source.folder}: {problem}" for problem in verify_split(source.folder, source.counts)]
    try:
        Tokenizer.load(prepared.tokenizer_dir)
    except DataError as error:
        problems.append(str(error))
    return problems


def key_of(*parts: Any) -> str:
    """A short name for values that JSON can write; equal values, equal names."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()
