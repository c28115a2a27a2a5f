"""A config as it was loaded: its values, and where each of them was typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from weft.errors import ConfigError, Problem
from weft.spec.cluster import DeviceSpec
from weft.spec.config import RunConfig
from weft.spec.rules import config_problems
from weft.spec.written import KeyPath, as_toml, dotted


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config, and where each of its values was typed.

    origins: dotted key of every value -> "default", "train.toml:12" or "command line".
    """

    config: RunConfig
    origins: Mapping[str, str]

    def check(self, *, world_size: int | None = None, device: DeviceSpec | None = None) -> None:
        """Ask the rules again once the ranks are known. Raises ConfigError with every problem and its origin."""
        problems = config_problems(self.config, origins=self.origins, world_size=world_size, device=device)
        if problems:
            raise ConfigError(sorted(problems, key=by_place))


def show_origins(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Return the rows of (dotted key, value as TOML, origin), in the order of the sections."""
    return [(dotted(path), as_toml(value), loaded.origins[dotted(path)]) for path, value in leaves(loaded.config)]


def leaves(config: RunConfig) -> list[tuple[KeyPath, object]]:
    """Every value of a config with its path, in the order of the sections; values that are not set are left out."""
    found: list[tuple[KeyPath, object]] = []

    def visit(path: KeyPath, value: object) -> None:
        elements = cast(tuple[object, ...], value) if isinstance(value, tuple) else ()
        if isinstance(value, dict) and value:
            for key, inside in cast(dict[str, object], value).items():
                visit((*path, key), inside)
        elif elements and isinstance(elements[0], dict):
            for index, inside in enumerate(elements):
                visit((*path, index), inside)
        else:
            found.append((path, cast(object, value)))

    visit((), config.model_dump(by_alias=True, exclude_none=True))
    return found


def by_place(problem: Problem) -> tuple[int, int]:
    """Return a key that sorts problems in the order of the file's lines; the command line comes last."""
    line = problem.origin.rpartition(":")[2]
    return (0, int(line)) if line.isdigit() else (1, 0)
