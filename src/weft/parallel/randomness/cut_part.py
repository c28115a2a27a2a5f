"""Where a rank is in the parts of a model that tensor parallelism cut, for what draws random numbers there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.mesh import Axis

_PART = "_weft_cut_part"


class CutPart:
    """Where this rank is in the cut parts of one model: what draws random numbers there asks for it.

    is_open: it is between a column-cut layer and the row-cut one after it, where it has its own heads or features.
    is_whole: what is drawn for now is cut in neither way, wherever it is. sequences: how many the
    microbatch has, where tokens are cut; what a model flattens to (batch * tokens, features) no longer says it.
    """

    def __init__(self, axis: Axis):
        self.axis = axis
        self.is_open = self.is_whole = False
        self.sequences = 0
        self.token_paths: tuple[str, ...] = ()  # modules in which each rank has its part of the tokens
        self.whole_paths: tuple[str, ...] = ()  # modules there, or in a cut part, that get all tokens and features

    def __deepcopy__(self, memo: dict[int, Any]) -> CutPart:
        return self  # a copy of the module runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def at(self, *, is_open: bool, is_whole: bool = False) -> Iterator[None]:
        """Let this rank stand elsewhere in the cut part, such as in front of a layer again."""
        before = self.is_open, self.is_whole
        self.is_open, self.is_whole = is_open, is_whole
        try:
            yield
        finally:
            self.is_open, self.is_whole = before

    def sees_cut_tokens(self, path: str) -> bool:
        """Return whether the module of that path is given this rank's part of the tokens."""
        return _is_in(path, self.token_paths) and not self.sees_all(path)

    def sees_all(self, path: str) -> bool:
        """Return whether the module of that path is given what one process would give it, wherever it stands."""
        return _is_in(path, self.whole_paths)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def keep_part(model: nn.Module, part: CutPart) -> None:
    """Leave it on the model, for `cut_part_of`."""
    setattr(model, _PART, part)


def cut_part_of(model: nn.Module) -> CutPart | None:
    """Return what tensor parallelism left on this model; None where nothing was cut."""
    return getattr(model, _PART, None)
