"""The grammar of conditions, read by hand: nothing of a config is ever evaluated as code.

condition = all { "or" all }
all       = one { "and" one }
one       = "(" condition ")" | "event" EVENT | "no" FIGURE "for" TIME | FIGURE test
test      = OP NUMBER [ "of" ( "plan" | "median" "over" SPAN ) ] [ "for" SPAN ]
          | OP NUMBER "sigma" "over" SPAN [ "for" SPAN ]
          | "is" ( "nan" | "inf" | "not" "finite" ) [ "for" SPAN ]
          | "no" ( "better" | "higher" | "lower" ) "for" SPAN [ "by" AMOUNT ]
          | ( "rises" | "falls" ) "by" AMOUNT "over" SPAN
FIGURE    = name | name{label}          OP = > | >= | < | <=
SPAN      = TIME | N "steps" | N "evaluations"          TIME = 90s | 10m | 1h30m | ...
NUMBER    = 3 | 0.8 | 1e-4 | 20GiB | 90%          AMOUNT = NUMBER, where % is a share of the start or the best
"""

from __future__ import annotations

import re
from typing import Literal, cast

from weft.errors import did_you_mean
from weft.spec.figures.conditions import (
    EVENTS,
    Any_,
    Compare,
    Condition,
    Every,
    Happened,
    Missing,
    Operator,
    RunSpan,
    Series,
    State,
    Stuck,
    Trend,
)
from weft.spec.figures.figure import Figure, split_series
from weft.spec.figures.figure_table import FIGURES, SHORT
from weft.units import parse_bytes, parse_seconds

_TOKEN = re.compile(r"\s*(>=|<=|>|<|\(|\)|[A-Za-z_][A-Za-z0-9_.]*(?:\{[^{}]*\})?|-?[0-9.][^\s()<>]*)")
#: Readings that a span may ask for at most: they are kept in memory.
_MOST_READINGS = 100_000
_LONGEST_S = 30 * 86400.0
_DEEPEST = 20


def parse_condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        ValueError: says what is wrong and what to write; without the text itself and its place.
    """
    return _Reader(text).whole()


class _Reader:
    """Reads one text, word by word."""

    def __init__(self, text: str):
        if len(text) > 1000:
            raise ValueError("a condition has at most 1000 letters. Make several alerts of it")
        self._words, at = list[str](), 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:].strip()[:20]!r} is no word of a condition. Write e.g. {_EXAMPLE}")
            self._words.append(match[1])
            at = match.end()
        self._at = self._depth = 0

    def whole(self) -> Condition:
        if not self._words:
            raise ValueError(f"a condition is needed. Write e.g. {_EXAMPLE}")
        found = self._any()
        if self._at < len(self._words):
            raise ValueError(
                f"{self._peek()!r} does not belong after what stands before it. Join conditions with and, or"
            )
        return found

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def _takes(self, *words: str) -> bool:
        """Go past the words where they are next."""
        if tuple(self._words[self._at : self._at + len(words)]) != words:
            return False
        self._at += len(words)
        return True

    def _expect(self, *words: str) -> str:
        word = self._take()
        if word not in words:
            known = words[0] if len(words) == 1 else f"one of {', '.join(words)}"
            raise ValueError(f"{known} is needed {f'in the place of {word!r}' if word else 'at the end'}")
        return word

    def _any(self) -> Condition:
        parts = [self._all()]
        while self._takes("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else Any_(tuple(parts))

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._takes("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _one(self) -> Condition:
        if self._takes("("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise ValueError(f"brackets are nested more than {_DEEPEST} deep. Write a simpler condition")
            inside = self._any()
            self._expect(")")
            self._depth -= 1
            return inside
        if self._takes("event"):
            word = self._take()
            if word not in EVENTS:
                raise ValueError(
                    f"there is no event {word!r}.{did_you_mean(word, EVENTS)} Use one of {', '.join(EVENTS)}"
                )
            return Happened(word)
        if self._takes("no"):
            series, _ = self._figure()
            self._expect("for")
            return Missing(series, self._span(times_only=True))
        series, figure = self._figure()
        return self._test(series, figure)

    def _test(self, series: Series, figure: Figure) -> Condition:
        word = self._take()
        if word in (">", ">=", "<", "<="):
            return self._compare(series, figure, word)
        if word == "is":
            if self._takes("not", "finite"):
                return State(series, "not finite", self._hold())
            state = self._expect("nan", "inf", "not finite")
            return State(series, cast(Literal["nan", "inf"], state), self._hold())
        if word == "no":
            return self._stuck(series, figure)
        if word in ("rises", "falls"):
            self._expect("by")
            by, relative = self._amount(figure)
            self._expect("over")
            return Trend(series, word == "rises", by, relative, self._span())
        raise ValueError(
            f"after {series} {f'{word!r} is no test' if word else 'a test is needed'}. Write >, <, 'is nan', "
            f"'no better for', 'rises by' or 'falls by'"
        )

    def _compare(self, series: Series, figure: Figure, operator: Operator) -> Compare:
        value = self._number(figure)
        if self._takes("sigma"):
            self._expect("over")
            return Compare(series, operator, value, "sigma", self._span(), self._hold())
        if self._takes("of"):
            if self._expect("plan", "median") == "plan":
                return Compare(series, operator, value, "plan", None, self._hold())
            self._expect("over")
            return Compare(series, operator, value, "median", self._span(), self._hold())
        return Compare(series, operator, value, hold=self._hold())

    def _stuck(self, series: Series, figure: Figure) -> Stuck:
        word = self._expect("better", "higher", "lower")
        if word == "better" and not figure.worse:
            raise ValueError(f"nothing says which way {series} is better. Write 'no higher' or 'no lower'")
        way = ("lower" if figure.worse == "high" else "higher") if word == "better" else word
        self._expect("for")
        span = self._span()
        by, relative = self._amount(figure) if self._takes("by") else (0.0, False)
        return Stuck(series, cast(Literal["higher", "lower"], way), span, by, relative)

    def _hold(self) -> RunSpan | None:
        return self._span() if self._takes("for") else None

    def _figure(self) -> tuple[Series, Figure]:
        word = self._take()
        if not word:
            raise ValueError(f"a figure is needed at the end. Write e.g. {_EXAMPLE}")
        try:
            name, label = split_series(word)
        except ValueError:
            raise ValueError(f"{word!r} is no figure. Write a name such as loss or gpu.temperature") from None
        name = SHORT.get(name, name)
        if name.startswith("eval.") and name not in FIGURES:
            name, label = "eval.metric", name.removeprefix("eval.")
        figure = FIGURES.get(name)
        if figure is None:
            hint = did_you_mean(name, [*FIGURES, *SHORT])
            raise ValueError(f"there is no figure {name!r}.{hint or ' `weft alerts figures` lists them.'}".rstrip("."))
        if label and not figure.label:
            raise ValueError(f"{name} has no label, so {{{label}}} means nothing. Write {name}")
        return Series(name, label), figure

    def _number(self, figure: Figure) -> float:
        word = self._take()
        percent = word.endswith("%")
        try:
            return float(word[:-1]) / 100 if percent else float(word)
        except ValueError:
            pass
        try:
            return float(parse_bytes(word)) if figure.unit.startswith("bytes") else parse_seconds(word)
        except ValueError:
            unit = "a size such as 20GiB" if figure.unit.startswith("bytes") else "a number"
            where = f"in the place of {word!r}" if word else "at the end"
            raise ValueError(f"{unit} is needed {where}") from None

    def _amount(self, figure: Figure) -> tuple[float, bool]:
        relative = self._peek().endswith("%")
        value = self._number(figure)
        if not value > 0:
            raise ValueError(f"{value:g} is no amount to rise or fall by. Write one above 0")
        return value, relative

    def _span(self, *, times_only: bool = False) -> RunSpan:
        word = self._take()
        example = "10m" if times_only else "200 steps, 3 evaluations or 10m"
        unit = self._peek()
        if unit in ("step", "steps", "evaluation", "evaluations") and not times_only:
            self._at += 1
            if not re.fullmatch(r"[0-9]{1,9}", word) or not 1 <= int(word) <= _MOST_READINGS:
                raise ValueError(f"{word} {unit}: a whole number from 1 to {_MOST_READINGS} is needed")
            return RunSpan(float(word), "steps" if unit.startswith("step") else "evaluations")
        try:
            seconds = parse_seconds(word) if re.search(r"[a-z]", word) else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= _LONGEST_S:
            what = f"in the place of {word!r}" if word else "at the end"
            raise ValueError(f"a span is needed {what}. Write e.g. {example}")
        return RunSpan(seconds, "s")


_EXAMPLE = "'eval.loss no better for 3 evaluations' or 'gpu.temperature > 87 for 60s'"
