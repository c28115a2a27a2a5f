"""Count the source files, functions and file changes that common operations run through.

    python benchmarks/walks.py [NAME ...] [--json]

A profiler hook in every process of a command counts Python calls in `weft`. Fewer files per operation means less to
read when debugging it. The counts do not depend on the speed of the machine.

A walk has a window: the counted part starts when the named function is first called and ends when it returns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = (
    *("model.name=tiny", "model.dim=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2"),
    *("model.ffn_dim=64", "tokenizer.kind=bytes", "train.seq_len=32", "train.global_batch=8", "train.steps=4"),
    *("launch.device=cpu", "eval.every=0", "log.every=1"),
)
STEP, SAVE, LOG = "TrainStep.__call__", "RunCheckpoints.save", "RunRecorder.on_step"


@dataclass(frozen=True)
class Walk:
    """One operation. `start` and `end` are qualified names of functions; no start counts from the process start."""

    args: tuple[str, ...]
    start: str = ""
    end: str = ""
    skip: int = 0  # calls of `start` before the counted one


def train(plan: str, ranks: int, *settings: str) -> tuple[str, ...]:
    return ("train", f"plan={plan}", f"launch.ranks={ranks}", *SMALL, *settings)


WALKS = {
    "first_step": Walk(train("dp_shard=2 zero=1", 2, "checkpoint.every=0"), end=STEP),
    "zero1_step": Walk(train("dp_shard=2 zero=1", 2, "checkpoint.every=0"), STEP, STEP, skip=2),
    "zero3_tp_step": Walk(train("dp_shard=2 tp=2 zero=3", 4, "checkpoint.every=0"), STEP, STEP, skip=2),
    "save": Walk(
        train("dp_shard=2 zero=1", 2, "checkpoint.every=2", "checkpoint.background=false"), start=SAVE, end=SAVE
    ),
    "metric": Walk(train("dp_shard=2 zero=1", 2, "checkpoint.every=0"), LOG, LOG, skip=1),
    "plan": Walk(("plan", "llama3-8b", "8xh100")),
}

#: Runs in every process of the command, before anything else. Writes one JSON file per process.
HOOK = """
import atexit, json, os, sys, threading
class Counter:
    def __init__(self):
        self.start, self.end, self.skip = os.environ["WALK_START"], os.environ["WALK_END"], int(os.environ["WALK_SKIP"])
        self.counting, self.done, self.depth = not self.start, False, 0
        self.reset()
    def reset(self):
        self.files, self.functions, self.changes, self.calls, self.last = set(), set(), 0, 0, ""
    def __call__(self, frame, event, arg):
        if self.done or event not in ("call", "return"):
            return
        code = frame.f_code
        if "/weft/" not in code.co_filename or not code.co_flags & 1:  # modules and class bodies run at import
            return
        name = code.co_qualname
        if event == "call":
            if not self.counting and name == self.start:
                self.skip -= 1
                if self.skip < 0:
                    self.counting, self.thread = True, threading.get_ident()
            if self.counting and (not self.start or threading.get_ident() == self.thread):
                self.calls += 1
                self.files.add(code.co_filename)
                self.functions.add((code.co_filename, name))
                self.changes += code.co_filename != self.last
                self.last = code.co_filename
        elif self.counting and name == self.end:
            self.write(True)
    def write(self, complete=False):
        if self.done:
            return
        self.done = True
        sys.setprofile(None)
        modules = sorted(name for name in list(sys.modules) if name.split(".")[0] == "weft")
        functions = sorted(map(list, self.functions))
        found = dict(pid=os.getpid(), complete=complete, files=sorted(self.files), functions=functions,
                     changes=self.changes, calls=self.calls, modules=modules)
        path = os.path.join(os.environ["WALK_OUT"], f"{os.getpid()}")
        with open(path, "w") as file:
            json.dump(found, file)
        os.replace(path, path + ".json")  # a process that is killed while it writes leaves no half file
counter = Counter()
leave = os._exit
def exit_now(code):
    counter.write()
    leave(code)
os._exit = exit_now
atexit.register(counter.write)
sys.setprofile(counter)
threading.setprofile(counter)
"""


def measure(walk: Walk) -> dict[str, int]:
    """Run the command of a walk and return its counts, over all processes that took part in the window."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        out.mkdir()
        Path(folder, "sitecustomize.py").write_text(HOOK)
        Path(folder, "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(400)))
        paths = [folder, str(ROOT / "src")]
        names = {"WALK_START": walk.start, "WALK_END": walk.end, "WALK_SKIP": str(walk.skip), "WALK_OUT": str(out)}
        settings = [f"data.train={folder}/text.txt", f"run.dir={folder}/runs"] if walk.args[0] == "train" else []
        command = [sys.executable, "-m", "weft", *walk.args, *settings]
        environment = {**os.environ, **names, "PYTHONPATH": os.pathsep.join(paths), "WEFT_HOME": f"{folder}/home"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    if not any(one["complete"] for one in found) and walk.end:
        raise SystemExit(f"{walk.end} never returned; name the function that does this work today in WALKS.")
    if walk.start:  # one rank
        found = [min((one for one in found if one["complete"]), key=lambda one: one["pid"])]
    return {
        "files": len({file for one in found for file in one["files"]}),
        "functions": len({tuple(function) for one in found for function in one["functions"]}),
        "file_changes": sum(one["changes"] for one in found),
        "calls": sum(one["calls"] for one in found),
        "modules": len({module for one in found for module in one["modules"]}),
    }


def main() -> None:
    """Print one row per walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WALKS)}; all by default")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.names) - WALKS.keys():
        parser.error(f"unknown walk {min(unknown)}; use {', '.join(WALKS)}")
    found = {name: measure(WALKS[name]) for name in asked.names or WALKS}
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    columns = ("files", "functions", "file_changes", "calls", "modules")
    print(f"{'walk':16}" + "".join(f"{name:>14}" for name in columns))
    for name, row in found.items():
        print(f"{name:16}" + "".join(f"{row[column]:>14,}" for column in columns))


if __name__ == "__main__":
    main()
