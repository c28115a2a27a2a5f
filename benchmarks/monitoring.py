"""What watching a run costs: the same training with everything on and with everything off, in turn.

    python benchmarks/monitoring.py                 5 rounds of 300 steps each way
    python benchmarks/monitoring.py --rounds 9 --steps 600 --plan "dp_shard=2 zero=3"
    python benchmarks/monitoring.py --rivals        and TensorBoard's, W&B's and MLflow's own loggers on the same loop

On: metrics every second, the standard alerts, a webhook, and sinks for TensorBoard, Prometheus, OTLP and JSON to a
server of this program. Off: `monitor.figures=false`, `monitor.update_ratio_every=0` and none of these. A round is one
run of each, in an order that changes. The metric is the median over rounds of the ratio of the runs' median step times,
without the first 20 steps.
--rivals logs what a step's event holds, from training's own thread, as these loggers are used; those not installed are
left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from weft import env
from weft.monitor.events import read_events

CONFIG = """
[model]
name = "small"
dim = 128
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_dim = 512
[tokenizer]
kind = "bytes"
[train]
seq_len = 128
global_batch = 8
[eval]
every = 0
batches = 1
[checkpoint]
every = 0
[sample]
prompt = ""
[launch]
device = "cpu"
"""
ON = """
alerts = "standard"
[monitor]
every = "1s"
[[channel]]
name = "hook"
kind = "webhook"
url = "{url}"
[[sink]]
kind = "tensorboard"
[[sink]]
kind = "prometheus"
port = {port}
[[sink]]
kind = "otlp"
url = "{url}"
[[sink]]
kind = "http"
url = "{url}"
"""
#: Steps in which a run settles.
SETTLING = 20


@contextmanager
def taker() -> Iterator[str]:
    """A server that takes everything; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def train(folder: Path, config: Path, name: str, plan: str, steps: int, *settings: str) -> float:
    """The median step of one run, in seconds."""
    command = [sys.executable, "-m", "weft", "train", str(config), f"run.dir={folder}", f"run.name={name}",
               f"plan={plan}", f"train.steps={steps}", *settings]  # fmt: skip
    variables = env.child_env(WEFT_HOME=str(folder / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    events = read_events(folder / name / "events.jsonl")
    found = [event["seconds"]["total"] for event in events if event["event"] == "step" and event["step"] > SETTLING]
    return statistics.median(found)


def tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "rival-tensorboard"))

    def log(event: dict[str, Any]) -> None:
        for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
            writer.add_scalar(name, event[name], event["step"])

    return log


def wandb(folder: Path) -> Callable[[dict[str, Any]], None]:
    import wandb as library  # pyright: ignore[reportMissingImports]

    run = library.init(project="weft", mode="offline", dir=str(folder), settings=library.Settings(silent=True))
    names = ("loss", "lr", "grad_norm", "tokens_per_s")
    return lambda event: run.log({name: event[name] for name in names}, step=event["step"])


def mlflow(folder: Path) -> Callable[[dict[str, Any]], None]:
    import mlflow as library  # pyright: ignore[reportMissingImports]

    library.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    library.start_run()
    names = ("loss", "lr", "grad_norm", "tokens_per_s")
    return lambda event: library.log_metrics({name: event[name] for name in names}, step=event["step"])


def ours(folder: Path) -> Callable[[dict[str, Any]], None]:
    """What our loop does in training's thread: a line of events.jsonl, and the queue of metrics."""
    from weft.monitor.events import EventLog
    from weft.monitor.metrics import Collector, LocalReports, StepReport

    log = EventLog(folder / "rival-weft" / "events.jsonl")
    collector = Collector("here", LocalReports(), 1.0, publish=log.write)
    collector.start()

    def write(event: dict[str, Any]) -> None:
        log.write(event)
        collector.put(StepReport(event["step"], event["seconds"], busy_s=0.1))

    return write


def rivals(folder: Path, number: int = 300) -> None:
    """Microseconds of training's thread for each step, by logger; the median of the calls."""
    seconds = {"forward": 0.05, "backward": 0.1, "reduce": 0.01, "optimizer": 0.01, "total": 0.17}
    event = {"event": "step", "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1e3, "seconds": seconds}
    for make in (ours, tensorboard, wandb, mlflow):
        try:
            log = make(folder)
        except ImportError as error:
            print(f"{make.__name__:<12} not installed ({error.name})")
            continue
        spent = []
        for step in range(1, number + 1):
            began = time.perf_counter()
            log({**event, "step": step})
            spent.append(time.perf_counter() - began)
            time.sleep(0.002)  # as between steps
        if make is mlflow:
            sys.modules["mlflow"].end_run()  # else it does so at the program's end, when its database is gone
        print(f"{make.__name__:<12} {statistics.median(spent) * 1e6:>10.0f} us a step, in training's thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plan", default="dp_replicate=1")
    parser.add_argument("--port", type=int, default=9464)
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, taker() as url:
        folder = Path(place)
        if asked.rivals:
            rivals(folder)
            return
        text = folder / "text.txt"
        text.write_text("\n\n".join(f"{n} warp and weft, shuttle and heddle, {n * n}" for n in range(20_000)))
        on, off = folder / "on.toml", folder / "off.toml"
        on.write_text(ON.format(url=url, port=asked.port) + CONFIG)
        off.write_text("[monitor]\nfigures = false\nupdate_ratio_every = 0\n" + CONFIG)
        ratios = []
        for number in range(asked.rounds):
            found = {}
            for config in (on, off) if number % 2 else (off, on):
                name = f"{config.stem}-{number}"
                found[config.stem] = train(folder, config, name, asked.plan, asked.steps, f"data.train={text}")
            ratios.append(found["on"] / found["off"])
            if not asked.json:
                print(f"round {number + 1}: on {found['on'] * 1e3:.2f} ms, off {found['off'] * 1e3:.2f} ms a step, "
                      f"ratio {ratios[-1]:.4f}", flush=True)  # fmt: skip
        row = {"plan": asked.plan, "rounds": asked.rounds, "ratio": statistics.median(ratios), "ratios": ratios}
        print(json.dumps(row) if asked.json else f"median ratio {row['ratio']:.4f} over {asked.rounds} rounds")


if __name__ == "__main__":
    main()
