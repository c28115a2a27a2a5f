"""The section [energy] of a run's config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from weft.config.sections import PositiveFloat, Section

_GRID = r"^([A-Za-z]{2,30}|([0-9]{1,5}(\.[0-9]{1,6})?|\.[0-9]{1,6})g?)$"
Grid = Annotated[
    str,
    BeforeValidator(lambda value: f"{value:g}" if type(value) in (int, float) else value),
    Field(pattern=_GRID, json_schema_extra={"x-rule": "grams of CO2 per kWh, or a region such as france"}),
]
Price = Annotated[str, Field(max_length=30, json_schema_extra={"x-rule": "a price of one kWh such as 0.25eur"})]


class EnergySection(Section):
    """Energy of the run: its meters, and their price, CO2 and limit."""

    meter: bool = True
    """Measure the energy of GPUs and CPU packages, and record it by cause in events.jsonl."""
    pue: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Power usage effectiveness of the building: energy at its meter over the energy of its machines. Reported kWh,
    cost and CO2 include it."""
    grid: Grid | None = Field(default=None, examples=["france"])
    """Carbon intensity of the electricity: grams of CO2 per kWh, or a region, such as france (means of 2023)."""
    price: Price | None = Field(default=None, examples=["0.25eur"])
    """Price of one kWh, such as 0.25eur."""
    budget: PositiveFloat | None = Field(default=None, examples=[10.0])
    """Energy of the whole run in kWh, over all its starts, at which it saves and pauses. `weft runs resume RUN
    energy.budget=KWH` continues it."""
    cpu_watts: PositiveFloat | None = Field(default=None, examples=[250.0])
    """Power of all CPU packages of a machine at full load, for an estimate if they have no readable counter."""
    gpu_watts: PositiveFloat | None = Field(default=None, examples=[300.0])
    """Power of one GPU at full load, for an estimate if it has no counter; by default its data sheet's."""
