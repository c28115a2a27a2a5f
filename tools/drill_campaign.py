"""Run `weft drill` many times: each kind of fault, at several random steps, under three plans, on a tiny decoder.

    python tools/drill_campaign.py run FOLDER                    30 kinds x 5 rounds x 3 plans, about 70 min
    python tools/drill_campaign.py run FOLDER --plan 2 --part 1/3  rounds 1, 4, ... of the second plan
    python tools/drill_campaign.py table FOLDER                  the results in FOLDER, as in docs/reference/faults.md

Faults whose results are in FOLDER are not run again. A stopped campaign can thus continue, and several machines that
share FOLDER can each run a part of it. The number of a round is the seed that chooses the step and the rank of each
fault. `equal` means that the last checkpoint has the same bytes as without a fault or, where a rank was lost
permanently, that the last loss differs by at most 1e-3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft import env
from weft.cli.drill import KINDS, ROWS_NAME

PLANS = ("dp_shard=2 zero=3", "tp=2 dp_replicate=2", "pp=2 dp_replicate=2")
CONFIG = """
[model]
name = "tiny"
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
ffn_dim = 64
[tokenizer]
kind = "bytes"
[data]
holdout = 0.2
[train]
seq_len = 32
global_batch = 8
[eval]
every = 0
batches = 1
[launch]
device = "cpu"
"""

Row = dict[str, Any]


def rows_of(folder: Path) -> dict[tuple[int, int, str], Row]:
    """Return the newest row of the campaign by (plan, round, kind). Plans and rounds are counted from 1."""
    found: dict[tuple[int, int, str], Row] = {}
    for path in sorted(folder.glob(f"plan*/round*/*/{ROWS_NAME}"), key=lambda path: path.stat().st_mtime):
        plan, turn = (int(path.parents[up].name.removeprefix(word)) for up, word in ((2, "plan"), (1, "round")))
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # not a line that was being written when the campaign was stopped
                row = json.loads(line)
                found[plan, turn, row["kind"]] = row
    return found


def run(folder: Path, plans: Iterable[int], turns: Sequence[int], kinds: Sequence[str], timeout_s: int) -> None:
    """Run the missing faults, round by round, so that a stopped campaign has tried each plan about as often."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(CONFIG)
    (folder / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(400)))
    for turn in turns:
        for plan in plans:
            done = rows_of(folder)
            missing = [kind for kind in kinds if not done.get((plan, turn, kind), {}).get("survived")]
            if missing:
                place = folder / f"plan{plan}" / f"round{turn}" / str(time.time_ns())
                place.parent.mkdir(parents=True, exist_ok=True)
                drill(folder, place, PLANS[plan - 1], turn, missing, timeout_s)


def drill(folder: Path, place: Path, plan: str, turn: int, kinds: Sequence[str], timeout_s: int) -> None:
    """Run one round of faults under one plan."""
    print(f"{time.strftime('%H:%M:%S')} plan {plan}, round {turn}: {len(kinds)} faults", flush=True)
    settings = [str(folder / "small.toml"), f"plan={plan}", f"data.train={folder / 'text.jsonl'}"]
    options = {"faults": ",".join(kinds), "seed": turn, "timeout": timeout_s, "limit": 120, "keep": place}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "weft", "drill", *settings, *words, "--json"]
    variables = env.child_env(WEFT_HOME=str(folder / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        sys.exit(f"weft drill ended with exit code {done.returncode}")


def table(folder: Path) -> list[str]:
    """Return a Markdown table, with a line for each kind, and then a line for each fault that was not survived.

    It has a column for each plan, with the numbers of survived and of tried faults, and columns for medians of times
    and for lost steps.
    """
    found = rows_of(folder)
    lines = ["| fault | " + " | ".join(f"`{plan}`" for plan in PLANS) + " | detected in | back in | steps lost |",
             "|---|" + "---|" * (len(PLANS) + 3)]  # fmt: skip
    for kind in KINDS:
        rows = [row for (_, _, name), row in found.items() if name == kind]
        cells = [counted([row for (of, _, name), row in found.items() if (of, name) == (plan, kind)])
                 for plan in range(1, len(PLANS) + 1)]  # fmt: skip
        times = [median([row[name] for row in rows]) for name in ("detected_s", "back_s")]
        lost = [row["steps_lost"] for row in rows]
        span = "-" if not lost else str(lost[0]) if min(lost) == max(lost) else f"{min(lost)} to {max(lost)}"
        lines.append(f"| `{kind}`: {KINDS[kind]} | " + " | ".join([*cells, *times, span]) + " |")
    total = [counted([row for (of, _, _), row in found.items() if of == plan]) for plan in range(1, len(PLANS) + 1)]
    lines.append("| all | " + " | ".join(total) + " | | | |")
    bad = [(key, row) for key, row in found.items() if not row["survived"]]
    told = [f"plan {PLANS[plan - 1]}, round {turn}, {kind}: {row['error'] or row['state']}, {row['left']} left"
            for (plan, turn, kind), row in bad]  # fmt: skip
    return [*lines, "", *told]


def counted(rows: Sequence[Row]) -> str:
    """Return "5 of 5" if all of 5 faults were survived, or "-" if none was tried."""
    return f"{sum(row['survived'] for row in rows)} of {len(rows)}" if rows else "-"


def median(values: Iterable[float | None]) -> str:
    """Return the median such as "0.2 s", or "-" if at least half of the rows have no value.

    A row has none if the fault needed no restart.
    """
    values = list(values)
    there = [value for value in values if value is not None]
    return f"{statistics.median(there):.1f} s" if 2 * len(there) > len(values) else "-"


def part(text: str) -> tuple[int, int]:
    """Parse '1/3' as (1, 3). Raise ValueError for other text."""
    which, of = (int(word) for word in text.split("/"))
    if not 1 <= which <= of:
        raise ValueError(text)
    return which, of


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("act", choices=("run", "table"))
    words.add_argument("folder", type=Path)
    words.add_argument("--plan", type=int, choices=range(1, len(PLANS) + 1), help="one plan; all")
    words.add_argument("--part", type=part, default=(1, 1), metavar="j/k", help="each k-th round, from the j-th on")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--faults", default=",".join(KINDS), help="kinds, with commas between; all")
    words.add_argument("--timeout", type=int, default=5, help="launch.timeout (s): more on a busy machine")
    chosen = words.parse_args()
    if chosen.act == "run":
        plans = [chosen.plan] if chosen.plan else range(1, len(PLANS) + 1)
        which, of = chosen.part
        turns = range(which, chosen.rounds + 1, of)
        run(chosen.folder.resolve(), plans, turns, chosen.faults.split(","), chosen.timeout)
    print("\n".join(table(chosen.folder)))


if __name__ == "__main__":
    main()
