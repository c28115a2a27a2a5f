"""Run a script, or plans, on a simulated GPU.

python tools/gpu_sim script train.py --epochs 1
python tools/gpu_sim plans "dp_shard=4 zero=1" "tp=2 sp=on"
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder, whose modules have common names

from tools.gpu_sim.plans import PaperReport  # noqa: E402
from tools.gpu_sim.stub_library import load_stub  # noqa: E402
from weft.errors import WeftError  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, print the counts to stderr, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/gpu_sim", description=__doc__)
    parser.add_argument("--report", type=Path, help="write what was counted there, as JSON")
    kinds = parser.add_subparsers(dest="kind", required=True)
    script = kinds.add_parser("script", help="run a Python file as `python FILE ...` would")
    script.add_argument("--ranks", type=int, default=1, help="be one of so many; the others are silent")
    script.add_argument("--rank", type=int, default=0, help="which of them")
    script.add_argument("file")
    script.add_argument("arguments", nargs=argparse.REMAINDER)
    plans = kinds.add_parser("plans", help="train three steps of a small decoder under each plan")
    plans.add_argument("plans", nargs="+")
    plans.add_argument("--rank", type=int, default=0)
    plans.add_argument("--stages", action="store_true", help="one rank of each stage, by one clock, each plan")
    for name in ("layers", "dim", "seq-len", "vocab-size", "batch", "experts", "heads"):
        plans.add_argument(f"--{name}", type=int)
    plans.add_argument("--optimizer", help="as optimizer.name of a config")
    plans.add_argument("--states", help="as optimizer.states of a config")
    plans.add_argument("--documents", action="store_true", help="sequences of several documents")
    plans.add_argument("--first", metavar="FILE", help="a Python file to run before: to change what is tried")
    told = parser.parse_args(words)
    try:
        stub = load_stub()
        return _script(stub, told) if told.kind == "script" else _plans(stub, told)
    except WeftError as error:
        print(error, file=sys.stderr)
        return 2


def _script(stub: ctypes.CDLL, told: argparse.Namespace) -> int:
    from tools.gpu_sim.cuda import join_silent_ranks, opened, run_script

    with opened(stub) as device:
        if told.ranks > 1:
            join_silent_ranks(told.ranks, told.rank)
        try:
            run_script(told.file, told.arguments)
        finally:
            _say([replace(device.report(), name=told.file)], told.report)
    return 0


def _plans(stub: ctypes.CDLL, told: argparse.Namespace) -> int:
    from tools.gpu_sim.cuda import opened
    from tools.gpu_sim.decoder_plans import PaperModel, plan_report, stages_reports

    given = {f.name: getattr(told, f.name) for f in fields(PaperModel)}
    subject = PaperModel(**{name: value for name, value in given.items() if value is not None})
    with opened(stub) as device:
        if told.first:
            runpy.run_path(told.first)
        reports = [
            report
            for text in told.plans
            for report in (
                stages_reports(text, device, subject)
                if told.stages
                else [plan_report(text, device, subject, told.rank)]
            )
        ]
    _say(reports, told.report)
    return int(any(one.error for one in reports))


def _say(reports: Sequence[PaperReport], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([one.as_dict() for one in reports]))
        return
    for one in reports:
        print("\n".join(one.lines()), file=sys.stderr)


def _run_as_program() -> None:
    """Run `main` and end the process without finalizing Python.

    Autograd's device thread may still request the interpreter lock, and a thread that does so during finalization
    aborts the process.
    """
    code = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # registered before the program's handlers, so called after them
    try:
        code = main()
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        raise


if __name__ == "__main__":
    _run_as_program()
