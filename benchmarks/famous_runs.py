"""Famous training runs beside predictions, and the plan that Weft would choose on the same machines.

python benchmarks/famous_runs.py                         print the table of docs/reference/famous_runs.md
python benchmarks/famous_runs.py --write                 write it, with today's date
python benchmarks/famous_runs.py --learn RUNS.csv ...    first predict each run without its publisher, from these tables

The runs are rows of famous_runs.csv, as their sources print them. `unseen_iter_s` there is what was predicted when
nothing of the publisher took part in any fitted factor: `--learn` fills it in, from tables of published runs that
`tools/planner/score.py` reads.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.planner.metrics import Prediction, context
from tools.planner.published_runs import PublishedRun, read_runs
from tools.planner.scores import predict_run, score
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Candidate, flops_per_token
from weft.planner.search.question import Question
from weft.planner.uncertainty import Band, time_bands
from weft.units import format_seconds

RUNS = Path(__file__).with_name("famous_runs.csv")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "famous_runs.md"
UNSEEN, NAME = "unseen_iter_s", "name"
LEVEL = 0.8
MEASURED = """\
{runs} published training runs, as of {today}. *Predicted* is the step time by factors that were fitted without the
run's publisher, with an 80 % prediction interval (*band*). Of several runs of one model by one source, it has the
one on most devices.

The mean error is {error:.0%}, and the intervals contain {inside} of {runs}. Nemotron-4 340B, Grok-1, OLMo 2 and OPT are
missing, because no table has their plan and a step time. Llama 3 405B at 131,072 tokens is published in FLOP/s, without
the convention for attention. The table assumes full attention; causal attention would give {half} as measured time.
"""
CHOSEN = """\
The plan that Weft's search finds for the same model, batch and machines, among those that its runtime runs today, and
the step time that both plans are expected to take by the same constants. *Less time* compares two predictions; it is
not a measurement. Weft's own speed on these machines is not measured yet. Weft multiplies in bf16, so if a run used
fp8, its plan is slower. Old runs used no fused attention and recomputed everything, which explains most of their
gain.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Famous:
    """One run. unseen_s: predicted without its publisher. shipped: by this version's constants. best: Weft's plan."""

    name: str
    row: dict[str, str]
    run: PublishedRun
    unseen_s: float
    shipped: Prediction
    band: Band
    best: Candidate | None

    @property
    def measured_s(self) -> float:
        """Seconds of a step."""
        assert self.run.measured_s is not None
        return self.run.measured_s

    @property
    def is_inside(self) -> bool:
        """Whether the band holds what was measured."""
        return self.band.low * self.unseen_s <= self.measured_s <= self.band.high * self.unseen_s

    @property
    def gain(self) -> float | None:
        """How much less time Weft's plan takes than the published one, both by this version's constants."""
        return None if self.best is None else 1 - self.best.step_s / self.shipped.step_s


def rows() -> list[dict[str, str]]:
    """The rows of famous_runs.csv."""
    with RUNS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def learn(tables: Sequence[Path]) -> None:
    """Predict each run without its publisher, and write that into famous_runs.csv."""
    unseen = score(*tables).refitted.publisher_out
    table = rows()
    for row in table:
        row[UNSEEN] = f"{unseen[row['id']]:.4g}"
    with RUNS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def famous(*, search: bool = True) -> list[Famous]:
    """Every run with its prediction. search: also the plan that Weft would choose, which takes a minute."""
    runs, skipped = read_runs(RUNS)
    assert not skipped, skipped
    found: list[Famous] = []
    for row, run in zip(rows(), runs, strict=True):
        one = Famous(
            name=row[NAME],
            row=row,
            run=run,
            unseen_s=float(row[UNSEEN]),
            shipped=predict_run(run, "tables"),
            band=time_bands(context(run))[LEVEL],
            best=chosen(run) if search else None,
        )
        found.append(one)
    return found


def chosen(run: PublishedRun) -> Candidate | None:
    """The best plan of Weft's for the run's model, batch and machines; None where it does not run on these."""
    if run.cluster.device.name.startswith("tpu"):
        return None
    job = run.job
    question = Question.of(job.shape, run.cluster, seq_len=job.seq_len, global_batch=job.global_batch)
    return answer(question).best


def causal_s(found: Sequence[Famous]) -> float:
    """What was measured of Llama 3 405B at 131,072 tokens, if the printed FLOP/s count half of attention."""
    one = next(each for each in found if each.run.id == "llama3-003")
    job = one.run.job
    whole, half = (flops_per_token(job.shape, job.seq_len, causal=causal) for causal in (False, True))
    return one.measured_s * half / whole


def page(found: Sequence[Famous]) -> str:
    """The table as Markdown."""
    today = datetime.date.today().isoformat()
    inside = sum(one.is_inside for one in found)
    errors = [abs(one.unseen_s / one.measured_s - 1) for one in found]
    lines = [
        "<!-- Written by benchmarks/famous_runs.py; change that, not this page. -->",
        "",
        "# Famous runs, measured and predicted",
        MEASURED.format(
            runs=len(found),
            today=today,
            error=sum(errors) / len(errors),
            inside=inside,
            half=format_seconds(causal_s(found)),
        ),
        "| run | devices | tokens in a sequence | plan as published | measured | predicted | band | error |",
        "|---|---|---:|---|---:|---:|---|---:|",
        *map(_measured_row, found),
        "",
        "## What Weft would choose",
        CHOSEN,
        "| run | format | published plan | Weft's plan | less time | plan |",
        "|---|---|---:|---:|---:|---|",
        *map(_chosen_row, found),
        "",
        "## Sources",
        *(f"- {one.name}: {one.row['source']}, {one.row['table']}" for one in found),
    ]
    return "\n".join(lines) + "\n"


def _measured_row(one: Famous) -> str:
    run = one.run
    words = [f"{name}={size}" for name, size in (("tp", run.tp), ("pp", run.pp), ("cp", run.cp), ("dp", run.dp))]
    words += [f"ep={run.ep}"] if run.ep and run.ep > 1 else []
    plan = " ".join(word for word in words if not word.endswith("=1")) or "dp=1"
    low, high = (format_seconds(one.unseen_s * factor) for factor in (one.band.low, one.band.high))
    cells = (
        one.name,
        f"{run.num_devices} {run.cluster.device.name.rstrip('*')}",
        f"{run.job.seq_len:,}",
        f"{plan} {run.precision}",
        format_seconds(one.measured_s),
        format_seconds(one.unseen_s),
        f"{low} to {high}" + ("" if one.is_inside else ": missed"),
        f"{one.unseen_s / one.measured_s - 1:+.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _chosen_row(one: Famous) -> str:
    cells = [one.name, one.run.precision, format_seconds(one.shipped.step_s)]
    if one.best is None:
        why = "Weft does not run on TPUs" if one.run.cluster.device.name.startswith("tpu") else "no plan fits"
        return f"| {' | '.join([*cells, '-', '-', why])} |"
    assert one.gain is not None
    return f"| {' | '.join([*cells, format_seconds(one.best.step_s), f'{one.gain:+.0%}', f'`{one.best.plan}`'])} |"


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--learn", nargs="+", type=Path, metavar="RUNS.csv", help="tables of published runs")
    asked = parser.parse_args()
    if asked.learn:
        learn(asked.learn)
    text = page(famous())
    if asked.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
