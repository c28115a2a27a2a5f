"""Write docs/reference/memory.md: what each stage keeps, measured on 2 and 4 ranks of this machine.

python docs/memory.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from weft.config.partitioning import bucket_bytes
from weft.config.plan import Plan
from weft.verify.rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.live_memory import (
    FULLEST,
    LAYOUTS,
    PRECISIONS,
    SAVED_POLICIES,
    SAVING,
    PerParameter,
    formula,
    measure,
    measure_peak,
    measure_saving,
    planned_peak,
    planned_saving,
)

PAGE = Path(__file__).parent / "reference" / "memory.md"
HEAD = """<!-- Written by docs/memory.py; change the code, not this page. -->

# Memory of a step
[Fit a model into memory](../how-to/memory.md) explains how to reduce it.

## Between two steps
Bytes per parameter on one rank with AdamW: the planner's formula, and in brackets the measured live tensors of the rank
with most. Replicas (`dp_replicate`) save nothing.

| plan | weights | gradients | optimizer, masters | sum |
|---|---|---|---|---|
"""
SAVED = """
## Activations of a layer
Bytes per token and hidden unit that one layer of Weft's decoder keeps between forward and backward, fp32, on
one rank: the planner's estimate, and in brackets the measured increase per additional layer.

| plan | {policies} |
|---|{lines}
"""
FULL = """
## Peak of a step
Planned MiB on one rank in fp32, by class, and the measured live tensors. The first three rows have a vocabulary of
16384 for 512 tokens, so the peak is at the loss. The others have 19 million parameters for 8 tokens, so the peak is in
backward. A test holds the planner to 3 %.

| plan | parameters | gradients | optimizer | activations | logits | buffers | sum | live |
|---|---|---|---|---|---|---|---|---|
"""
SIZE = f"{bucket_bytes('cpu') // 2**20} MiB"
TAIL = f"""
During a step, activations are added. At zero=0 to 2, so are the unsharded gradients of three buckets ({SIZE} of masters
each), or of all buckets with accumulation. At zero=3, so are the gathered weights of two or three units.
"""


def page(measured: dict[str, PerParameter], saved: dict[str, float], peaks: dict[str, int]) -> str:
    """The page from what was measured, by plan: between steps, between forward and backward, and at most."""
    lines = []
    for text, live in measured.items():
        want = formula(Plan.parse(text))
        cells = [
            f"{getattr(want, part):.2f} ({getattr(live, part):.2f})"
            for part in ("params", "grads", "optimizer", "total")
        ]
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    table = [
        SAVED.format(policies=" | ".join(f"`{name}`" for name in SAVED_POLICIES), lines="---|" * len(SAVED_POLICIES))
    ]
    for plan in SAVING:
        texts = [saving_plan(plan, policy) for policy in SAVED_POLICIES]
        cells = [f"{planned_saving(Plan.parse(text)):.1f} ({saved[text]:.1f})" for text in texts]
        table.append(f"| `{plan}` | {' | '.join(cells)} |\n")
    return HEAD + "\n".join(lines) + "\n" + TAIL + "".join(table) + FULL + "".join(_full_lines(peaks))


def _full_lines(peaks: dict[str, int]) -> Iterator[str]:
    for plan, live in peaks.items():
        planned = [*planned_peak(Plan.parse(plan)).values()]
        cells = [f"{value / 2**20:.1f}" for value in (*planned, sum(planned), live)]
        yield f"| `{plan}` | {' | '.join(cells)} |\n"


def saving_plan(plan: str, policy: str) -> str:
    """The plan under a policy."""
    return Plan.parse(f"{plan} recompute={policy}").format()


def measure_saved(two: RankPool) -> dict[str, float]:
    """What a layer keeps under every plan and policy; on the rank that keeps most."""
    plans = [saving_plan(plan, policy) for plan in SAVING for policy in SAVED_POLICIES]
    return {plan: max(two.run(measure_saving, plan)) for plan in plans}


def measure_peaks(two: RankPool) -> dict[str, int]:
    """The fullest moment of each plan; on the rank that holds most."""
    return {plan: max(two.run(measure_peak, plan)) for plan in FULLEST}


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
        PAGE.write_text(page(measure_all({2: two, 4: four}), measure_saved(two), measure_peaks(two)))
    print(PAGE)
