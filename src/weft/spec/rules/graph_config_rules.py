"""The rules of configs whose plans are launched as CUDA graphs."""

from __future__ import annotations

from weft.errors import PlanError
from weft.spec.config import RunConfig
from weft.spec.plan import Plan, is_auto
from weft.spec.rules.config_rule import ConfigRule


def _asks_on_cpu(config: RunConfig) -> bool:
    if config.launch.device != "cpu" or is_auto(config.plan):
        return False
    try:
        return Plan.read_open(config.plan)[0].graphs
    except PlanError:
        return False  # the plan's own problems are told


GRAPH_CONFIG_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="graphs-need-cuda",
        keys=("launch.device", "plan"),
        reason="Only GPUs of NVIDIA record graphs.",
        predicate=_asks_on_cpu,
        message=lambda _: "cpu: the plan says graphs=on, and a CPU records no graphs. Use graphs=off, or a GPU.",
    ),
)
