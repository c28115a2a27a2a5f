"""Write docs/reference/memory.md: what each stage keeps, measured on 2 and 4 ranks of this machine.

python docs/memory.py
"""

from __future__ import annotations

from pathlib import Path

from weft.spec.plan import Plan
from weft.testing import RankPool
from weft.testing.memory import LAYOUTS, PRECISIONS, PerParameter, formula, measure

PAGE = Path(__file__).parent / "reference" / "memory.md"
HEAD = """<!-- Written by docs/memory.py; change the code, not this page. -->

# Memory of each stage
Bytes per parameter on one rank between two steps with AdamW: the planner's formula, and in brackets what live tensors
came to (the rank that has most). `z` ranks of `dp_shard` share what is sharded. Replicas (`dp_replicate`) save nothing.

| plan | weights | gradients | optimizer, masters | sum |
|---|---|---|---|---|
"""
TAIL = """
During a step there is more: activations; at zero=2 the whole gradients of three buckets (16 MiB of masters each), of
all buckets where several microbatches add up before gradients travel; at zero=3 the gathered weights of two or three
units.
"""


def page(measured: dict[str, PerParameter]) -> str:
    """The page from what was measured, by plan."""
    lines = []
    for text, live in measured.items():
        want = formula(Plan.parse(text))
        cells = [
            f"{getattr(want, part):.2f} ({getattr(live, part):.2f})"
            for part in ("params", "grads", "optimizer", "total")
        ]
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def measure_all(pools: dict[int, RankPool]) -> dict[str, PerParameter]:
    """Every layout in every precision."""
    found = {}
    for precision in PRECISIONS:
        for num_ranks, layouts in LAYOUTS.items():
            for layout in layouts:
                plan = Plan.parse(f"{layout} precision={precision}").format()
                found[plan] = max(pools[num_ranks].run(measure, plan), key=lambda live: live.total)
    return found


if __name__ == "__main__":
    with RankPool(2) as two, RankPool(4) as four:
        PAGE.write_text(page(measure_all({2: two, 4: four})))
    print(PAGE)
