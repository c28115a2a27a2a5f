"""The rules of plans whose steps are launched as CUDA graphs."""

from __future__ import annotations

from weft.spec.plan import Plan
from weft.spec.rules.rule import Facts, Rule, asks

#: Axes whose collectives lie within forward and backward.
_INSIDE = ("cp", "tp", "ep")


def _between(plan: Plan, facts: Facts) -> str:
    """What the host or other ranks do between the kernels of one forward and backward; empty where nothing is."""
    if asks(plan, facts, "pp"):
        return "the host orders the passes of a pipeline"
    if plan.zero == 3:
        return "zero=3 gathers weights within forward and backward"
    inside = next((axis for axis in _INSIDE if asks(plan, facts, axis)), None)
    if inside is not None:
        return f"{inside} communicates within forward and backward"
    if plan.offload:
        return f"offload={'+'.join(plan.offload)} lets the device and the host wait for each other"
    if plan.sync != "step":
        return f"sync={plan.sync} changes weights while a step computes"
    return ""


def _off(plan: Plan, facts: Facts) -> Plan:
    return plan.replace(graphs=False)


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        name="graphs-on-device",
        field="graphs",
        reason="Only GPUs record graphs.",
        predicate=lambda plan, facts: plan.graphs and facts.device.is_cpu,
        finding=lambda plan, facts: f"{facts.device.title} is a CPU, which records no graphs",
        remedy=lambda plan, facts: "Use graphs=off, or a GPU",
        fix=_off,
    ),
    Rule(
        name="graphs-hold-one-rank",
        field="graphs",
        reason="A graph holds kernels of one rank alone, in a row that neither the host nor other ranks interrupt.",
        predicate=lambda plan, facts: plan.graphs and bool(_between(plan, facts)),
        finding=lambda plan, facts: f"a graph holds kernels of one rank alone, and {_between(plan, facts)}",
        remedy=lambda plan, facts: "Use graphs=off, or data parallelism with zero=0, 1 or 2 alone",
        fix=_off,
    ),
    Rule(
        name="graphs-hold-no-experts",
        field="graphs",
        reason="What routers count of a microbatch is added up by the host's code, which a graph leaves out.",
        predicate=lambda plan, facts: plan.graphs and facts.model.num_experts > 0,
        finding=lambda plan, facts: "the model has experts, and the host's code adds up what their routers count",
        remedy=lambda plan, facts: "Use graphs=off",
        fix=_off,
    ),
    Rule(
        name="graphs-compiled-recompute",
        field="graphs",
        reason="Code that torch generates for recomputed blocks asks for the generator's state, which a graph forbids.",
        predicate=lambda plan, facts: plan.graphs and plan.compile and plan.recompute_policy != "none",
        finding=lambda plan, facts: (
            f"with compile=on and recompute={plan.recompute}, generated code asks for the state of torch's generator, "
            "which nothing may do while a graph is recorded"
        ),
        remedy=lambda plan, facts: "Use recompute=none, compile=off, or graphs=off",
        fix=_off,
    ),
)
