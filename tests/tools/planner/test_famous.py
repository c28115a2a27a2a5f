"""Table of famous runs: it is readable, its bands have the promised coverage, and the docs page matches it."""

from __future__ import annotations

from benchmarks.famous_runs import PAGE, famous


def test_twenty_runs_are_predicted_and_most_are_in_their_bands():
    found = famous(search=False)
    assert len(found) == 20
    assert sum(one.is_inside for one in found) >= 15
    for one in found:
        assert one.row["source"]
        assert 0.5 < one.unseen_s / one.measured_s < 1.6
        # The shipped error model is close to the one that the page was written with.
        assert abs(one.shipped.step_s / one.unseen_s - 1) < 0.25


def test_page_lists_every_run_with_its_measurement():
    page = PAGE.read_text(encoding="utf-8")
    for one in famous(search=False):
        begin = f"| {one.name} | {one.run.num_devices} "
        (row,) = [line for line in page.splitlines() if line.startswith(begin)]
        assert f" {one.run.precision} | " in row
        assert f"{one.unseen_s / one.measured_s - 1:+.0%} |" in row
