"""The table of famous runs: it can be read, its bands hold as many as they promise, and the page in the docs is its."""

from __future__ import annotations

from benchmarks.famous_runs import PAGE, famous


def test_twenty_runs_are_predicted_and_most_lie_in_their_bands():
    found = famous(search=False)
    assert len(found) == 20
    assert sum(one.is_inside for one in found) >= 15
    for one in found:
        assert one.row["source"]
        assert 0.5 < one.unseen_s / one.measured_s < 1.6
        # What is shipped has not moved far from what the page was written with.
        assert abs(one.shipped.step_s / one.unseen_s - 1) < 0.25


def test_the_page_names_every_run_with_what_was_measured():
    page = PAGE.read_text(encoding="utf-8")
    for one in famous(search=False):
        begin = f"| {one.name} | {one.run.num_devices} "
        (row,) = [line for line in page.splitlines() if line.startswith(begin)]
        assert f" {one.run.precision} | " in row
        assert f"{one.unseen_s / one.measured_s - 1:+.0%} |" in row
