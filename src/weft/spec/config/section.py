"""What all sections of a config have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, documented by attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "300" is no number, and true is not 1
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )
