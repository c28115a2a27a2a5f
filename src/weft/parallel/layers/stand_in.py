"""What stands in the place of a module that this rank does not hold: techniques that look at modules skip it."""

from __future__ import annotations

from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Answers for another module: its attributes are that module's, its parameters are none. path: of that module."""

    def __init__(self, module: nn.Module, path: str):
        super().__init__()
        # In a tuple: a module set as an attribute would become a part of the model.
        self.__dict__["_for"] = (module, path)

    @property
    def stands_for(self) -> nn.Module:
        """The module whose place this takes."""
        return self.__dict__["_for"][0]

    @property
    def path(self) -> str:
        """Its path in the whole model."""
        return self.__dict__["_for"][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_for"][0], name)
