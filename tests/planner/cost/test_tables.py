"""Device constants: their sources, and errors for invalid profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import device, devices
from weft.errors import ConfigError
from weft.planner.cost.machine import Tables


def test_every_device_has_constants_in_both_tiers():
    for spec in devices().values():
        for tier in ("datasheet", "tables"):
            tables = Tables.of(spec, tier)
            assert 0.3 < tables.gemm_ceiling < 1
            assert tables.flops["fp8"] >= tables.flops["bf16"] >= tables.flops["fp32"] > tables.flops["fp64"]


def test_measured_matmuls_belong_to_the_second_tier():
    a100 = device("a100")
    assert Tables.of(a100, "datasheet").rungs["gemm_ceiling"] == "common"
    assert Tables.of(a100).rungs["gemm_ceiling"] == "table"
    assert Tables.of(a100).gemm_ceiling == pytest.approx(271 / 312)


def test_profile_takes_precedence():
    tables = Tables.of(device("a100"), profile={"gemm_ceiling": 0.5, "link_rate": 1e11})
    assert (tables.gemm_ceiling, tables.link_rate) == (0.5, 1e11)
    assert tables.rungs["gemm_ceiling"] == tables.rungs["link_rate"] == "here"


def test_modified_device_keeps_constants_of_its_model():
    tables = Tables.of(replace(device("h100"), name="h100*", memory_bytes=96 * 2**30))
    assert (tables.sms, tables.memory_bytes) == (132, 96 * 2**30)


def test_invalid_names_are_reported():
    with pytest.raises(ConfigError, match=r"tier=tabels: not one of datasheet, tables\. Did you mean 'tables'\?"):
        Tables.of(device("a100"), "tabels")
    with pytest.raises(ConfigError, match=r"profile\.gemm_celing: no such constant\. Did you mean 'gemm_ceiling'\?"):
        Tables.of(device("a100"), profile={"gemm_celing": 0.5})
