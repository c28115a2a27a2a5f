"""The whole parity matrices, of which the gate runs a choice: every model under every plan, beside PyTorch alone.

    python benchmarks/parity.py --ranks 2                       # 25 models under every layout of 2 ranks
    python benchmarks/parity.py --ranks 4 --part 3/10           # a tenth of the plans, by lot; the ten together are all
    python benchmarks/parity.py --ranks 4 --pipelines without   # as long as it takes: 10,099 trainings
    python benchmarks/parity.py --ranks 2 --matrix deep         # 4 models, with recompute and offload
    python benchmarks/parity.py --ranks 8 --pipelines without --once    # each layout once a model, the rest by lot

A line a minute says how far it is; one line for each training that differs by 1e-10 or more, at once. Ends with 1 when
there is one. Not part of the gate.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.plans import (
    Cell,
    References,
    Subject,
    broad_matrix,
    broad_subjects,
    differing,
    full_matrix,
    subjects,
)
from weft.cli.verify import read_part
from weft.errors import CommError, ConfigError
from weft.verify.rank_pool import RankPool

#: The longest (s) that ranks may take for one plan, with every model.
PATIENCE_S = 900.0
NEWS_EVERY_S = 60.0
#: What `--once` has every value of, with every model.
LAYOUT = ("tp", "sp", "cp", "cp_mode", "ep", "pp", "schedule", "virtual_stages", "zero")
#: Of the lot, so that parts run on different days are parts of one whole.
SEED = 0


def main() -> int:
    words = _arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks have the cores
    known = broad_subjects() if words.matrix == "broad" else subjects()
    if unknown := [name for name in words.models if name not in known]:
        sys.exit(f"error: models={unknown[0]}: not in the {words.matrix} matrix. Use one of {', '.join(known)}.")
    cells = broad_matrix(words.ranks, is_complete=True) if words.matrix == "broad" else full_matrix(words.ranks)
    chosen = fitting(cells, words.pipelines, words.models)
    plans = drawn(once_each(chosen) if words.once else chosen, *words.part)
    count = sum(map(len, plans))
    if not count:
        sys.exit("error: nothing to train: no plan of this matrix is in the part, with these pipelines and models.")
    print(f"{words.ranks} ranks: {count} of {len(cells)} trainings, {len(plans)} plans", flush=True)
    start = time.perf_counter()
    wrong = compared(plans, known, words.ranks)
    took = time.perf_counter() - start
    print(f"{count - wrong} of {count} trainings equal, {wrong} not, in {took:.0f} s", flush=True)
    return int(wrong > 0)


def fitting(cells: Sequence[Cell], pipelines: str, models: Sequence[str]) -> list[Cell]:
    """The cells that the command line asks for."""
    kinds = {"with": (True,), "without": (False,), "both": (True, False)}[pipelines]
    return [cell for cell in cells if (cell.plan.pp > 1) in kinds and (not models or cell.subject in models)]


def once_each(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for each model and layout: by lot, of those that differ in replicas, accumulation or resharding only."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.subject, *(getattr(cell.plan, name) for name in LAYOUT)), []).append(cell)
    lot = random.Random(SEED)
    return [lot.choice(alike) for alike in found.values()]


def drawn(cells: Sequence[Cell], part: int, parts: int) -> list[list[Cell]]:
    """Cells of one plan together: those of each plan of this part. Plans are in an order by lot, always the same."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.plan.format(), []).append(cell)
    order = sorted(found)
    random.Random(SEED).shuffle(order)
    return [found[plan] for plan in order[part - 1 :: parts]]


def compared(plans: Sequence[list[Cell]], known: dict[str, Subject], num_ranks: int) -> int:
    """How many differ, each told when it is found."""
    references, wrong, done = References(), 0, 0
    start = told = time.perf_counter()
    with RankPool(num_ranks, timeout_s=PATIENCE_S) as pool:
        for cells in plans:
            try:
                found = differing(cells, known, references, pool)
            except CommError as error:
                found = [f"{cell.subject} under {cell.plan.format()}: {error}" for cell in cells]
            for line in found:
                print(f"DIFFERS  {line}", flush=True)
            wrong += len({line.rsplit(" on rank ", 1)[0] for line in found})
            done += len(cells)
            if time.perf_counter() - told > NEWS_EVERY_S:
                told = time.perf_counter()
                print(f"{done} trainings after {told - start:.0f} s", flush=True)
    return wrong


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--matrix", choices=["broad", "deep"], default="broad")
    parser.add_argument("--pipelines", choices=["with", "without", "both"], default="both")
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--once", action="store_true", help="each layout once a model, other settings by lot")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    try:
        return read_part(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
