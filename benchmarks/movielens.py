"""Quality of task=recommend on MovieLens 100k, which the wheel of RecBole contains.

    pip download recbole --no-deps
    python benchmarks/movielens.py recbole-*.whl

Writes ratings.csv into the folder --out, trains with `weft train`, and prints the last evaluation of each run: DLRM and
DeepFM predict ratings of 4 and 5 stars, for 10 % of the ratings at random and for the latest 10 %. Two towers and
SASRec rank all films: two towers for 10 % of those ratings at random, SASRec for each user's last film.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
NAMES = ["user_id", "item_id", "rating", "timestamp", "age", "gender", "occupation", "release_year", "genres"]
PAIRS = ['task.options.user=["user_id", "gender", "occupation", "age"]',
         'task.options.item=["item_id", "release_year", "genres"]']  # fmt: skip
SEQUENCES = ['task.options.columns=["user_id=id", "item_id=id", "timestamp=time"]', 'task.options.user=["user_id"]',
             'task.options.item=["item_id"]', "task.options.dim=64", "task.options.dropout=0.3",
             "task.options.split=last",
             "layout=tables.item=rows", "train.global_batch=128", "train.epochs=60", "optimizer.lr=1e-3",
             "tables.lr=1e-3", "eval.every=400"]  # fmt: skip
RUNS = {
    "dlrm, random": ["task.options.model=dlrm"],
    "dlrm, time": ["task.options.model=dlrm", "task.options.split=time"],
    "deepfm, random": [],
    "deepfm, time": ["task.options.split=time"],
    "two_tower, random": ["task.options.model=two_tower", "layout=*.tables.*=rows", *PAIRS],
    "sasrec, last": ["task.options.model=sasrec", *SEQUENCES],
}


def read(wheel: zipfile.ZipFile, suffix: str) -> list[dict[str, str]]:
    """Return the records of one of RecBole's files, without the kinds in its header."""
    with wheel.open(f"{FOLDER}.{suffix}") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, "utf-8", newline=""), delimiter="\t")
        names = [name.partition(":")[0] for name in next(rows)]
        return [dict(zip(names, row, strict=True)) for row in rows]


def write_ratings(wheel: Path, out: Path) -> None:
    """Write one row for each rating, with the columns of its user and its film."""
    with zipfile.ZipFile(wheel) as files:
        ratings, users, films = (read(files, suffix) for suffix in ("inter", "user", "item"))
    by_user, by_film = {row["user_id"]: row for row in users}, {row["item_id"]: row for row in films}
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, NAMES, extrasaction="ignore")
        writer.writeheader()
        for row in ratings:
            film = by_film[row["item_id"]]
            writer.writerow({**by_user[row["user_id"]], **film, "genres": film["class"], **row})


def train(name: str, settings: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Train a run, and return its last evaluation."""
    run = name.replace(", ", "_")
    command = [
        sys.executable, "-m", "weft", "train", str(ROOT / "configs" / "recommend.toml"), f"run.dir={args.out}",
        f"run.name={run}", f"data.train={args.out / 'ratings.csv'}", f"plan=dp_replicate={args.ranks}",
        "launch.device=cpu", *settings, *args.set,
    ]  # fmt: skip
    with (args.out / f"{run}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    with (args.out / run / "events.jsonl").open() as lines:
        return [event for event in map(json.loads, lines) if event["event"] == "eval"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="RecBole's wheel")
    parser.add_argument("--out", type=Path, default=Path("movielens"), help="folder for data and runs")
    parser.add_argument(
        "--ranks", type=int, default=1, help="data-parallel ranks, each with a range of the tables' rows"
    )
    parser.add_argument("--only", default="", help="train only runs whose name begins with this, such as deepfm")
    parser.add_argument("--set", action="append", default=[], help="another setting, such as train.epochs=1")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_ratings(args.wheel, args.out / "ratings.csv")
    for name, settings in RUNS.items():
        if name.startswith(args.only):
            found = train(name, settings, args)
            figures = [
                f"{key} {value:.4f}" for key, value in found.items() if isinstance(value, float) and key != "time"
            ]
            print(f"{name:<20} {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
