"""Records of a small recommender, and the configs of its models."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

USERS, ITEMS, EVENTS = 17, 11, 300

COLUMNS = 'columns=["user=id", "item=id", "age=number", "tags=ids unknown=map", "rating=label>=4", "at=time"]'
PAIRS = ['user=["user", "age"]', 'item=["item", "tags"]']
MODELS = {
    "dlrm": [COLUMNS, "model=dlrm"],
    "deepfm": [COLUMNS, "model=deepfm", "split=time"],
    "two_tower": [COLUMNS, "model=two_tower", *PAIRS, "k=[1, 3]"],
    "sasrec": ['columns=["user=id", "item=id", "at=time"]', "model=sasrec", 'user=["user"]', 'item=["item"]',
               "length=6", "heads=2", "k=[2]"],
    "sampled": ['columns=["user=id", "item=id", "at=time"]', "model=sasrec", 'user=["user"]', 'item=["item"]',
                "length=6", "heads=2", "k=[2]", "negatives=3"],
}  # fmt: skip


def events() -> list[dict[str, Any]]:
    """Return records whose ratings depend on user and item. Every user and item occurs often."""
    rng = random.Random(0)
    found = []
    for number in range(EVENTS):
        user, item = rng.randrange(USERS), rng.randrange(ITEMS)
        rating = 1 + (user * item + rng.randrange(3)) % 5
        tags = [f"tag{tag}" for tag in range(4) if (item >> tag) & 1]
        found.append({
            "user": f"u{user}", "item": item, "age": 20 + user, "tags": tags, "rating": rating,
            "at": 1000 + 7 * number % 97,
        })  # fmt: skip
    return found


def write_jsonl(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (events() if rows is None else rows)))
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["user", "item", "age", "tags", "rating", "at"])
        for row in events():
            writer.writerow([*list(row.values())[:3], "|".join(row["tags"]), row["rating"], row["at"]])
    return path


def settings(name: str, data: Path, folder: Path, layout: str, *more: str) -> list[str]:
    """Return the overrides of a run of a model."""
    options = [f"task.options.{one}" for one in MODELS[name]]
    return [
        "task.name=recommend", *options, "task.options.dim=4", "task.options.hidden=[8]", f"data.train={data}",
        "data.holdout=0.2", f"data.cache_dir={folder / 'cache'}", "train.global_batch=12", "train.steps=6",
        "eval.every=3", "eval.batches=100", "checkpoint.every=3", "checkpoint.keep=9", "launch.device=cpu",
        f"run.dir={folder}", f"run.name={name}", f"layout={layout}", "tables.lr=0.05", "optimizer.lr=0.01", *more,
    ]  # fmt: skip
