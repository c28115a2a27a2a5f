"""Carbon intensity of electricity grids, prices of energy, and the power that a device draws."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from weft.errors import did_you_mean
from weft.units import parse_price

J_PER_KWH = 3.6e6
#: Share of its rated power that a device draws while it waits inside a training run.
IDLE_SHARE = 0.3


def drawn_watts(rated: float, busy: float) -> float:
    """Return the estimated power (W) of a device that computes for a share `busy` of the time.

    The estimate is busy x rated + (1 - busy) x 0.3 x rated.
    """
    return rated * (IDLE_SHARE + (1 - IDLE_SHARE) * busy)


@functools.cache
def grids() -> dict[str, float]:
    """Return the grams of CO2 equivalents per kWh of the listed grids, by name."""
    return tomllib.loads(Path(__file__).with_name("grids.toml").read_text(encoding="utf-8"))


def carbon_intensity(text: str) -> float:
    """Return the grams of CO2 equivalents per kWh of a grid's name, or of a number such as "369" or "369g".

    Raises:
        ValueError: if it is neither a listed grid nor a number above 0. The message has the rule and the remedy.
    """
    known = grids().get(text.lower())
    if known is not None:
        return known
    number = text.removesuffix("g")
    if re.fullmatch(r"\d+(\.\d+)?|\.\d+", number) and 0 < float(number) < 1e5:
        return float(number)
    hint = did_you_mean(text.lower(), grids()) or f" Use a number, or one of {', '.join(grids())}."
    raise ValueError(f"it is neither grams of CO2 per kWh above 0 nor a known grid.{hint}")


@dataclass(frozen=True, slots=True)
class EnergyPrice:
    """Price of one kWh. `currency` is three capital letters."""

    per_kwh: float
    currency: str

    @classmethod
    def parse(cls, text: str) -> EnergyPrice:
        """Parse a price of a kWh such as "0.25eur", "$0.12" or "0.3 CHF/kWh".

        Raises:
            ValueError: if the text is not a price.
        """
        parsed = parse_price(text)
        if parsed is None or parsed[2].lower() not in ("", "kwh"):
            raise ValueError("a price is a number and a currency, for one kWh. Use such as 0.25eur.")
        return cls(parsed[0], parsed[1])
