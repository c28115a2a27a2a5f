"""`weft plan --compile`: the best plan of the JAX engine, compiled for a TPU slice, next to its estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.config.plan import Plan
from weft.errors import ConfigError, MissingExtra
from weft.jax_engine.rules import SEARCHED, check, problems, topology
from weft.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from weft.jax_engine.compiled import CompiledStep
    from weft.planner.search.candidate import Answer, Candidate
    from weft.planner.search.model_source import PlannedModel
    from weft.planner.search.question import Question

Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the best plan of the JAX engine for a TPU slice such as v5p-16. No TPU is needed."
    ),
]

#: Features of the JAX engine for the planner: attention keeps its scores, and XLA fuses everything else.
_STACK = {"attention": "unfused", "fused_norm": True, "fused": True, "cut_loss": False, "loss_bytes": 10.0}
#: Under bf16, the weights are fp32 masters, which forward rounds. There is no second copy.
_MASTERS = {"master": False, "weight_bytes": 4.0, "main_bytes": 8.0}


def expect_alone(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the command has options that do not belong to one step that trains all weights."""
    for name, value in options.items():
        if value:
            rule = "--compile compiles the fastest plan that trains all weights on whole sequences"
            raise ConfigError(f"--{name.replace('_', '-')}: {rule}. Leave out one of the two.")


def jax_question(asked: Question) -> Question:
    """Return the query for plans of the JAX engine, with the memory that its states take.

    Raises:
        ConfigError: if the cluster is not a TPU slice, or the engine cannot train the model.
        PlanError: if fixed fields of the plan have values that the engine does not support.
    """
    topology(asked.cluster)
    _expect_decoder(asked.model)
    check(Plan.from_mapping(asked.fixed))
    if asked.fixed.get("precision") == "fp64":
        raise ConfigError("precision=fp64: a TPU has no fp64 arithmetic. Use precision=fp32 or precision=bf16.")
    fixed = {"precision": "bf16", **SEARCHED, **asked.fixed}
    stack = replace(asked.job.stack, **_STACK, **(_MASTERS if fixed["precision"] == "bf16" else {}))
    return replace(asked, fixed=fixed, job=replace(asked.job, stack=stack))


def _expect_decoder(model: PlannedModel) -> None:
    config = model.config
    if model.traced is not None or model.folder is not None or (config is not None and config.model.path):
        rule = "--compile builds the sizes of `weft models`, and decoders of Weft's configs"
        raise ConfigError(f"model={model.name}: {rule}. Use one of them, or leave out --compile.")
    if model.spec.num_experts:
        raise ConfigError(f"model={model.name}: --compile does not build experts. Use a model without them.")
    if config is not None:
        from weft.config.rules.engine_rules import JAX_RULES

        launch = config.launch.model_copy(update={"engine": "jax"})
        config = config.model_copy(update={"launch": launch, "plan": ""})
        if found := [problem for rule in JAX_RULES if (problem := rule.check(config)) is not None]:
            raise ConfigError(found)


def jax_answer(found: Answer[Candidate]) -> Answer[Candidate]:
    """Return the answer with the plans that the JAX engine supports."""
    return replace(found, ranked=tuple(one for one in found.ranked if not problems(one.plan)))


def compiled_step(best: Candidate, chips: Sequence[Any] = ()) -> CompiledStep:
    """Compile the step of a plan.

    Args:
        best: the plan with its model and batch.
        chips: devices to compile for; by default the chips of the cluster's TPU slice.

    Raises:
        MissingExtra: if JAX or libtpu is not installed.
    """
    try:
        from weft.jax_engine import capture, compiled, program, update
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise MissingExtra("jax", "tpu", "weft plan --compile") from error
    import torch

    from weft.config.run_config import RunConfig
    from weft.models.inspect.blocks import repeated_blocks
    from weft.models.inspect.find_layout import find_layout
    from weft.models.registry import build_decoder
    from weft.optim.build import build_optimizer, freeze

    plan, job, config = best.plan, best.question.job, best.question.model.config or RunConfig()
    chips = chips or compiled.tpu_devices(topology(best.question.cluster))
    model = build_decoder(best.question.model.spec, device="meta")
    layout = find_layout(model) if plan.tp > 1 or plan.ep > 1 else None
    sharding = program.Sharding.of(plan, layout, chips=chips)
    freeze(model, config.optimizer)
    trained = build_optimizer(model.named_parameters(), config.full_optimizer, config.seed)
    optimizer = update.read_optimizer(trained, model)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    if plan.precision == "bf16":
        capture.rounded(model)
    capture.prepare_routers(model)
    size = job.global_batch // plan.accumulation, job.seq_len
    tokens = partial(torch.zeros, size, dtype=torch.int64, device="meta")
    batch = {name: tokens() for name in ("input_ids", "labels", "positions")}
    captured = capture.capture(model, _loss, batch, best.question.model.name)
    step = program.Program(
        captured, optimizer, sharding, max_grad_norm=config.optimizer.max_grad_norm, shapes=shapes,
        blocks=list(repeated_blocks(model)),
    )  # fmt: skip
    return compiled.compile_step(step, batch, dict(model.named_buffers()))


def _loss(model: Any, batch: Any) -> tuple[Any, Any]:
    from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

    return token_cross_entropy(model_forward(model, batch), batch)


# Output.


def planned_bytes(best: Candidate) -> dict[str, float]:
    """Return the planner's estimate for each value of a compiled step that it estimates."""
    states = best.memory["parameters"] + best.memory["optimizer"]
    return {"states": states, "temporaries": best.allocated_bytes - states, "peak": best.allocated_bytes}


def compiled_table(best: Candidate, step: CompiledStep) -> dict[str, Any]:
    """Return a compiled step with its estimate as a table for JSON. Bytes are of one chip."""
    return {
        "plan": str(best.plan),
        "state_bytes": step.state_bytes,
        "argument_bytes": step.argument_bytes,
        "output_bytes": step.output_bytes,
        "temporary_bytes": step.temporary_bytes,
        "peak_bytes": step.peak_bytes,
        "planned_bytes": planned_bytes(best),
        "fits": fits(best, step),
        "collectives": {
            kind: {"calls": one.calls, "bytes": one.num_bytes} for kind, one in sorted(step.collectives.items())
        },
        "gathered_arrays": step.num_gathered,
        "compile_s": step.compile_s,
    }


def fits(best: Candidate, step: CompiledStep) -> bool:
    """Return True if the step fits into the memory of a chip."""
    return step.argument_bytes is not None and step.peak_bytes <= best.question.cluster.device.memory_bytes


def compiled_lines(best: Candidate, step: CompiledStep) -> list[str]:
    """Describe a compiled step next to its estimate."""
    planned = planned_bytes(best)
    rows: list[tuple[str, int | None, str]] = [
        ("states", step.state_bytes, "states"),
        ("arguments", step.argument_bytes, "states"),
        ("temporaries", step.temporary_bytes, "temporaries"),
        ("outputs", step.output_bytes, ""),
        ("peak", step.peak_bytes, "peak"),
    ]
    where = str(best.question.cluster)
    lines = [f"compiled for {where} in {format_seconds(step.compile_s)}", f"  {'per chip':<14}{'compiled':>10}"]
    lines[1] += f"{'planned':>10}{'ratio':>8}"
    for name, found, of in rows:
        if found is not None:
            line = f"  {name:<14}{format_bytes(found):>10}"
            lines.append(line + (f"{format_bytes(planned[of]):>10}{found / planned[of]:>8.3f}" if of else ""))
    for kind, one in sorted(step.collectives.items()):
        lines.append(f"  {kind:<20}{counted(one.calls, 'call'):>10}{format_bytes(one.num_bytes):>12}")
    instead = [kind for kind in ("all-reduce", "collective-permute") if kind in step.collectives]
    if best.plan.zero >= 2 and best.plan.dp_shard > 1 and instead and "reduce-scatter" not in step.collectives:
        lines.append(f"  the plan's reduce-scatter is compiled as {' and '.join(instead)}")
    if step.num_gathered:
        arrays = counted(step.num_gathered, "array")
        lines.append(f"  {arrays} gathered on every chip to change their sharding (involuntary rematerialization)")
    if not fits(best, step):
        usable = step.usable_bytes or best.question.cluster.device.memory_bytes
        lines.append(
            f"  The plan does not fit: the compiled step needs {format_bytes(step.peak_bytes)} of the "
            f"{format_bytes(usable)} of a chip."
        )
    return lines
