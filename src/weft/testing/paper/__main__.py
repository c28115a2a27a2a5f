"""python -m weft.testing.paper: run a script, or plans, on a simulated GPU.

python -m weft.testing.paper script train.py --epochs 1
python -m weft.testing.paper plans "dp_shard=4 zero=1" "tp=2 sp=on"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.errors import WeftError
from weft.testing.paper.build import load_stub
from weft.testing.paper.report import Report


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line says; prints what was counted to stderr. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m weft.testing.paper", description=__doc__)
    parser.add_argument("--report", type=Path, help="write what was counted there, as JSON")
    kinds = parser.add_subparsers(dest="kind", required=True)
    script = kinds.add_parser("script", help="run a Python file as `python FILE ...` would")
    script.add_argument("file")
    script.add_argument("arguments", nargs=argparse.REMAINDER)
    told = parser.parse_args(words)
    try:
        stub = load_stub()
    except WeftError as error:
        print(error, file=sys.stderr)
        return 2
    from weft.testing.paper.opened import opened, run_script

    with opened(stub) as device:
        try:
            run_script(told.file, told.arguments, device)
        finally:
            _say([device.report()], told.report)
    return 0


def _say(reports: Sequence[Report], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([one.as_dict() for one in reports]))
        return
    for one in reports:
        print("\n".join(one.lines()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
