"""What became of one key of a DeepSpeed config."""

from __future__ import annotations

from dataclasses import dataclass

BECAME = "became"
FOLLOWS = "follows"
NOTHING = "nothing"
NOT_BUILT = "not built"
REMOVED = "removed"
TYPO = "typo"

#: How an outcome is said; its text goes on from there.
PHRASES = {
    BECAME: "became",
    FOLLOWS: "follows from",
    NOTHING: "has no effect in Weft:",
    NOT_BUILT: "not supported yet:",
    REMOVED: "removed from DeepSpeed:",
    TYPO: "typo:",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one key of the file is to Weft; a key that holds a table may stand for all that is in it.

    key: dotted, as it is in the file. value: as it was typed, cut short. kind: a key of PHRASES.
    text: goes on from the kind's phrase. fields: what it set, such as "plan.zero" or "optimizer.lr".
    """

    key: str
    value: str
    kind: str
    text: str
    fields: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """'became optimizer.lr=0.0001'."""
        return f"{PHRASES[self.kind]} {self.text}"

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.sentence}"
