"""Records of `weft score`: texts, completions and choices of a JSONL file, their tokens, and figures of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.text.tokenizer import Tokenizer
from weft.errors import ModelError, Problem
from weft.inference.json_lines import read_lines, refuse_lines
from weft.inference.score import ScoredSpan

_FORMS = 'Write {"text": ...}, {"prompt": ..., "completion": ...} or {"prompt": ..., "choices": [...], "answer": 0}'


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """One line of the data.

    Attributes:
        line: number of the line, from 1.
        kind: "text", "completion" or "choices".
        prompt: text before the scored one; "" for a text.
        scored: the text, the completion, or the choices.
        answer: index of the right choice, or None.
    """

    line: int
    kind: str
    prompt: str
    scored: tuple[str, ...]
    answer: int | None = None


def read_records(path: Path) -> list[ScoreRecord]:
    """Read the records of a JSONL file. Empty lines are skipped.

    Raises:
        DataError: if the file cannot be read or has no records.
        ConfigError: with each bad record and its line.
    """
    return read_lines(path, "data", _FORMS, _read)


def _read(number: int, said: dict[str, Any]) -> ScoreRecord:
    """Return the record of a line. Raise ValueError with the rule that it breaks."""
    kinds = [kind for kind in ("text", "completion", "choices") if kind in said]
    if len(kinds) != 1 or ("prompt" in said) != (kinds != ["text"]):
        raise ValueError(f"its keys are {', '.join(map(repr, said)) or 'missing'}. {_FORMS}")
    kind, value = kinds[0], said[kinds[0]]
    scored = value if kind == "choices" else [value]
    if not isinstance(scored, list) or (kind == "choices" and len(scored) < 2):
        raise ValueError('"choices": it must be a list of at least two texts. Write ["yes", "no"]')
    prompt, answer = said.get("prompt", ""), said.get("answer")
    for key, one in (("prompt", prompt), *((kind, one) for one in scored)):
        if not isinstance(one, str):
            raise ValueError(f'"{key}": {json.dumps(one)[:60]} is not text. Write a string')
        if not one and key != "prompt":
            raise ValueError(f'"{key}": an empty text has no log-likelihood. Write some text, or remove the record')
    if kind != "choices" or answer is None:
        return ScoreRecord(number, kind, prompt, tuple(scored))
    if type(answer) is not int or not 0 <= answer < len(scored):
        rule = f"it must be the index of one of {len(scored)} choices"
        raise ValueError(f'"answer": {json.dumps(answer)[:60]}: {rule}. Write 0 to {len(scored) - 1}')
    return ScoreRecord(number, kind, prompt, tuple(scored), answer)


def spans_of(records: Sequence[ScoreRecord], tokenizer: Tokenizer, num_ids: int, path: Path) -> list[list[ScoredSpan]]:
    """Return the spans of each record: one, or one for each choice.

    A text without a prompt follows the tokens that begin a document, or the end token if the tokenizer does not begin
    documents. A token that spans the end of a prompt is scored.

    Args:
        records: the records.
        tokenizer: the model's tokenizer.
        num_ids: number of token ids that the model reads.
        path: the records' file, for errors.

    Raises:
        ConfigError: with each record without tokens, or with ids outside the model's vocabulary.
    """
    begin = tuple(tokenizer.begin_ids.tolist())
    encoded = iter(tokenizer.encode_answers([(record.prompt, one) for record in records for one in record.scored]))
    found: list[list[ScoredSpan]] = []
    problems: list[Problem] = []
    for record in records:
        spans: list[ScoredSpan] = []
        for _ in record.scored:
            ids, is_scored = next(encoded)
            first = begin or (() if not is_scored.all() else (tokenizer.end_id,))
            spans.append(ScoredSpan((*first, *ids.tolist()), int(is_scored.sum())))
        found.append(spans)
        highest = max(max(span.ids) for span in spans)
        why = ""
        if not all(span.num_scored for span in spans):
            why = f'"{record.kind}": the tokenizer makes no tokens of it. Remove the record'
        elif highest >= num_ids:
            why = f"token id {highest}: the model reads ids below {num_ids}. Give the tokenizer of this model"
        if why:
            problems.append(Problem("data", f"{why}.", f"{path}:{record.line}"))
    refuse_lines(problems)
    return found


def refuse_long(
    records: Sequence[ScoreRecord], spans: Sequence[Sequence[ScoredSpan]], longest: int, path: Path
) -> None:
    """Raise ConfigError with each record that is longer than the model's context."""
    problems: list[Problem] = []
    for record, several in zip(records, spans, strict=True):
        most = max(len(span.ids) - 1 for span in several)
        if most > longest:
            rule = f"{most} tokens: the model reads {longest}. Leave --no-windows out, or shorten the text."
            problems.append(Problem("data", rule, f"{path}:{record.line}"))
    refuse_lines(problems)


@dataclass(slots=True)
class _Sums:
    """Sums over the texts or the completions of a data set."""

    records: int = 0
    log_likelihood: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    def add(self, log_likelihood: float, tokens: int, text: str) -> None:
        self.records += 1
        self.log_likelihood += log_likelihood
        self.tokens += tokens
        self.words += len(text.split())
        self.bytes += len(text.encode())

    def figures(self) -> dict[str, Any]:
        per = {"token": self.tokens, "word": self.words, "byte": self.bytes}
        found = {f"perplexity_per_{name}": _perplexity(self.log_likelihood, number) for name, number in per.items()}
        bits = -self.log_likelihood / (math.log(2) * self.bytes)
        counts = {one: getattr(self, one) for one in self.__slots__}
        return {**counts, "log_likelihood": _finite(self.log_likelihood), **found, "bits_per_byte": _finite(bits)}


def _finite(value: float) -> float | None:
    """Return the value, or None for the infinite one of an impossible token, which JSON cannot write."""
    return value if math.isfinite(value) else None


def _perplexity(log_likelihood: float, number: int) -> float | None:
    """Return the perplexity, or None if nothing was counted or it overflows."""
    mean = -log_likelihood / number if number else math.inf
    return math.exp(mean) if mean < 700 else None


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def results_of(
    records: Sequence[ScoreRecord],
    spans: Sequence[Sequence[ScoredSpan]],
    scores: Iterator[tuple[float, bool]],
    path: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a result for each record, and figures over all of them.

    Args:
        records: the records.
        spans: the spans of each record.
        scores: log-likelihood of each span, and whether each of its tokens is the likeliest.
        path: the records' file, for errors.

    Raises:
        ModelError: if a log-likelihood is NaN.
    """
    sums = {"text": _Sums(), "completion": _Sums()}
    right: list[tuple[bool, bool]] = []
    found: list[dict[str, Any]] = []
    num_choices = 0
    for record, several in zip(records, spans, strict=True):
        own = [next(scores) for _ in several]
        if any(math.isnan(value) for value, _ in own):
            raise ModelError(
                f"{path}:{record.line}: its log-likelihood is NaN. Use another precision, or check the weights."
            )
        one: dict[str, Any] = {"line": record.line}
        if record.kind != "choices":
            (value, is_greedy), tokens = own[0], several[0].num_scored
            sums[record.kind].add(value, tokens, record.scored[0])
            one |= {"log_likelihood": _finite(value), "tokens": tokens, "perplexity": _perplexity(value, tokens)}
            if record.kind == "completion":
                one["is_greedy"] = is_greedy
        else:
            num_choices += 1
            raw = [value for value, _ in own]
            per_byte = [value / len(text.encode()) for value, text in zip(raw, record.scored, strict=True)]
            best, best_per_byte = raw.index(max(raw)), per_byte.index(max(per_byte))
            one |= {"log_likelihoods": [_finite(value) for value in raw], "best": best}
            one |= {"per_byte": [_finite(value) for value in per_byte], "best_per_byte": best_per_byte}
            if record.answer is not None:
                one["answer"] = record.answer
                right.append((best == record.answer, best_per_byte == record.answer))
        found.append(one)
    figures: dict[str, Any] = {f"{kind}s": one.figures() for kind, one in sums.items() if one.records}
    if num_choices:
        raw, per_byte = ([one[place] for one in right] for place in (0, 1))
        figures["choices"] = {"records": num_choices, "answered": len(right), "accuracy": _share(raw),
                              "accuracy_per_byte": _share(per_byte)}  # fmt: skip
    return found, figures
