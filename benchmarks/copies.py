"""What copies in memory (checkpoint.peer_every) are worth when a rank is lost: the same faults with and without them.

    python benchmarks/copies.py                      kill_rank, 3 rounds, a checkpoint every 40 steps, a copy every step
    python benchmarks/copies.py --faults kill_rank,hang,kill_launcher --rounds 5

Each round is one `weft drill` without copies and one with them, in turn; a round chooses the step and the rank. back:
from the fault to the first new step, so that loading torch and the steps done again are in it. stall: training waited
for one copy. whole after: until it could be gone on from. shm, left: new names in /dev/shm, and processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft import env
from weft.monitor.events import read_events

CONFIG = """
plan = "dp_shard=2 zero=3"
[model]
name = "small"
dim = 256
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_dim = 1024
[tokenizer]
kind = "bytes"
[data]
holdout = 0.2
[train]
seq_len = 128
global_batch = 8
[eval]
every = 0
batches = 1
[launch]
device = "cpu"
"""

Row = dict[str, Any]


def drill(folder: Path, name: str, faults: str, every: int, copies: int, seed: int) -> list[Row]:
    """The rows of one drill, with what it left in /dev/shm and what copies cost."""
    place, before = folder / name, set(Path("/dev/shm").iterdir())
    words = [str(folder / "small.toml"), f"data.train={folder / 'text.jsonl'}", f"checkpoint.peer_every={copies}"]
    options = {"faults": faults, "seed": seed, "every": every, "steps": 3 * every, "timeout": 10, "keep": place}
    command = [sys.executable, "-m", "weft", "drill", *words, "--json"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    variables = env.child_env(WEFT_HOME=str(folder / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    rows: list[Row] = json.loads(done.stdout)
    for row in rows:
        events = [one for one in read_events(place / row["kind"] / "events.jsonl") if one["event"] in ("copy", "step")]
        row["shm"] = len(set(Path("/dev/shm").iterdir()) - before)
        row["stall_s"], row["durable_s"] = ([one[key] for one in events if one["event"] == "copy"]
                                            for key in ("stall_s", "durable_s"))  # fmt: skip
        row["step_s"] = [one["seconds"]["total"] for one in events if one["event"] == "step"]
    return rows


def line(kind: str, copies: int, rows: list[Row]) -> str:
    """Markdown."""

    def ms(key: str) -> str:
        found = [value for row in rows for value in row[key]]
        return f"{1000 * statistics.median(found):.0f} ms" if found else "-"

    lost = sorted(row["steps_lost"] for row in rows)
    back = [row["back_s"] for row in rows if row["back_s"] is not None]
    told = f"{statistics.median(back):.1f} s" if back else "-"
    survived, left = sum(row["survived"] for row in rows), sum(row["left"] for row in rows)
    cells = [f"`{kind}`", f"every {copies}" if copies else "none", f"{survived} of {len(rows)}",
             ", ".join(map(str, lost)), told, ms("step_s"), ms("stall_s"), ms("durable_s"),
             f"{sum(row['shm'] for row in rows)}, {left}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--faults", default="kill_rank")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--every", type=int, default=40, help="steps between checkpoints")
    words.add_argument("--copies", type=int, default=1, help="steps between copies")
    chosen = words.parse_args()
    found: dict[tuple[str, int], list[Row]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "small.toml").write_text(CONFIG)
        (folder / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(4000)))
        for seed in range(chosen.rounds):
            for copies in (0, chosen.copies):
                for row in drill(folder, f"{seed}-{copies}", chosen.faults, chosen.every, copies, seed):
                    found.setdefault((row["kind"], copies), []).append(row)
    print("| fault | copies | survived | steps lost | back in | a step | stall | whole after | shm, left |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(line(kind, copies, rows) for (kind, copies), rows in sorted(found.items())))


if __name__ == "__main__":
    main()
