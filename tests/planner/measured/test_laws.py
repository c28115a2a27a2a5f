"""Cost laws: they reproduce their samples, are never negative, and depend on contention."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.measured.synthetic import BYTES, CALL, FLOPS, VALUES, profile
from weft.errors import ConfigError
from weft.planner.measured.laws import Laws, fit_law
from weft.planner.measured.machine_profile import Measurement


def test_law_reproduces_its_samples() -> None:
    laws = Laws.of(profile())
    product = laws.seconds("linear_f", 300.0, 200.0, 100.0, active=1)
    assert float(product) == pytest.approx(CALL + 12e6 / FLOPS, rel=1e-6)
    assert float(laws.seconds("norm_b", 300.0, 200.0, active=2)) == pytest.approx(CALL + 6e4 / VALUES, rel=1e-6)
    found = laws.transfer_s("all_reduce", np.array([4e6]), group=2, active=2)
    assert found == pytest.approx([CALL + 4e6 / BYTES], rel=1e-6)


def test_coefficients_are_never_negative() -> None:
    falling = [Measurement(op="add", size=(size, 8), seconds=1.0 / size) for size in (1, 2, 4, 8)]
    law = fit_law("add", falling)
    assert min(law.coefficients) >= 0
    assert law.error > 0.1


def test_more_ranks_than_cores_share_them() -> None:
    laws = Laws.of(profile())
    one, two, three, four, eight = laws.seconds("linear_f", 512.0, 512.0, 512.0, active=np.array([1, 2, 3, 4, 8]))
    assert one == pytest.approx(two)
    assert three == pytest.approx(1.5 * two)
    assert four == pytest.approx(2 * two)
    assert eight == pytest.approx(4 * two)  # extrapolated in proportion


def test_longer_computation_waits_longer() -> None:
    laws = Laws.of(profile(waiting=0.03))
    short, long = laws.waiting(np.array([1.0, 4.0]), group=4, active=4)
    assert long == pytest.approx(0.03 * 2.0, rel=0.1)  # minus the wait after one product
    assert long == pytest.approx(2 * short, rel=0.1)
    assert laws.waiting(4.0, group=4, active=8) == pytest.approx(2 * long)
    assert laws.waiting(1e-6, group=4, active=4) == 0.0
    assert laws.waiting(4.0, group=1, active=4) == 0.0
    assert Laws.of(profile()).waiting(4.0, group=4, active=4) == 0.0  # a profile of an earlier version


def test_unmeasured_operations_are_reported() -> None:
    with pytest.raises(ConfigError, match="no all_reduce between ranks"):
        Laws.of(profile((1,))).transfer_s("all_reduce", 100.0, group=2, active=2)
    made = profile((1, 2))
    alone = tuple(replace(each, dtype="bf16") for each in made.samples if each.ranks == 1)
    laws = Laws.of(replace(made, samples=(*made.samples, *alone)))
    size = (64.0, 64.0, 64.0)
    assert laws.seconds("linear_f", *size, active=1, dtype="bf16") == laws.seconds("linear_f", *size, active=1)
    with pytest.raises(ConfigError, match=r"linear_f in bf16 is not measured with 2 ranks at work \(only with 1\)"):
        laws.seconds("linear_f", *size, active=2, dtype="bf16")
    with pytest.raises(ConfigError, match="linear_f in bf16 is not measured with 1 rank at work"):
        Laws.of(made).seconds("linear_f", *size, active=1, dtype="bf16")
    assert float(laws.seconds("adamw", 1024.0, active=2, dtype="bf16")) > 0  # the optimizer computes in fp32
    one = profile((1,))
    bare = type(one)(machine=one.machine, samples=(), made="", took_s=0.0, path="p.json")
    with pytest.raises(ConfigError, match="it has no measured matrix products"):
        Laws.of(bare)
