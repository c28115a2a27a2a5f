"""Precision and recall of the standard alerts on runs on paper: 200 with a known fault, 50 healthy ones.

    python benchmarks/alerts.py

Each fault begins at a known step and must be found within a window: a spike 5 steps, NaN 1, a slow rank 90, a leak 3100
(so long it takes to grow by a quarter), a plateau 36 evaluations,
of which the last 10 are no better. An alarm is right where its fault has begun.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.monitor.alert_curves import FOUND_WITHIN, scored


def main() -> None:
    """Print the metrics. Exit with code 1 after a missed fault or a false alarm."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    score = scored()
    print(f"faults   {score.found} of {score.found + score.late} found within their window: recall {score.recall:.3f}")
    print(f"alarms   {score.right} right, {score.wrong} wrong: precision {score.precision:.3f}")
    print(f"healthy  {score.num_clean} runs")
    for fault, lags in score.lags.items():
        window = FOUND_WITHIN[fault]
        print(f"{fault:<10} found after {statistics.median(lags):g} steps (median), {max(lags)} at most, of {window}")
    for line in score.messages:
        print("!", line)
    sys.exit(1 if score.messages else 0)


if __name__ == "__main__":
    main()
