"""Memory of a plan in closed form: activations of decoders by token, and what each change of a plan takes away.

Estimates, good to about a fifth where the model is one of the known families: enough to rank remedies.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.cost import layer_bytes
from weft.planner.space import Columns, Job, Shape
from weft.spec import DecoderSpec
from weft.spec.plan import Plan
from weft.spec.rules import Facts, check

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2, "tf32": 4}
#: Share of the activations of blocks that selective and full recompute leave, for models of unknown shape.
_LEFT = {"none": 1.0, "attention": 1.0, "selective": 0.55, "full": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes on one rank, by class, at the moment that counts.

    optimizer: states and master weights, also where they are yet to be made. activations: and temporaries.
    num_rows, num_tokens: of one microbatch; 0 where unknown. num_blocks: repeated blocks of the model.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_blocks: int = 1


@dataclass(frozen=True, slots=True)
class MemoryRemedy:
    """One change of a plan. saved_bytes: about so much less on each rank. enough: that is what was lacking, or more."""

    plan: Plan
    change: str
    saved_bytes: int
    enough: bool


def activation_bytes(shape: DecoderSpec, num_tokens: int, precision: str, recompute: str) -> int:
    """Bytes that one microbatch of a decoder keeps at the end of forward, logits and their loss in fp32 included.

    Under recompute one layer more is whole while its backward runs. A budget may keep everything.
    """
    width = _WIDTHS[precision]
    job = Job(shape=Shape.of_decoder(shape), seq_len=num_tokens, global_batch=1)
    plan = Plan(precision=precision, recompute=recompute if recompute in _LEFT else "none")
    layer = layer_bytes(job, Columns.of([plan], job))
    whole, kept = float(layer.whole[0]), float(layer.kept[0])
    ends = num_tokens * (2 * shape.dim * width + shape.vocab_size * (width + max(width, 4)))
    return int(shape.num_layers * kept + (whole - kept) + ends)


def remedies(
    plan: Plan,
    usage: Usage,
    missing_bytes: int,
    facts: Facts | None = None,
    shape: DecoderSpec | None = None,
    can_offload: bool = True,
) -> list[MemoryRemedy]:
    """The three smallest changes of a plan that save `missing_bytes`, the one that disturbs training least first.

    Those that save enough come first, in the order of how much they change: nothing but the number of passes, then
    who holds what, then what is computed twice, then number formats, the host, and last more devices. Changes that
    a rule refuses are left out. missing_bytes: 0 where unknown. can_offload: False on a CPU, whose memory is the
    host's, so that offload saves nothing.
    """
    found: list[MemoryRemedy] = []
    for change in _changes(plan, usage, missing_bytes, shape):
        if "offload" in change and not can_offload:
            continue
        candidate = plan.replace(**change)
        if check(candidate, facts if candidate.world_size == plan.world_size else None):
            continue
        saved = _saved(plan, candidate, usage, shape)
        if saved > 0:
            found.append(MemoryRemedy(candidate, _words(plan, candidate), saved, saved >= missing_bytes))
    enough = [remedy for remedy in found if remedy.enough]
    rest = sorted((remedy for remedy in found if not remedy.enough), key=lambda remedy: -remedy.saved_bytes)
    return [*enough, *rest][:3]


def _changes(plan: Plan, usage: Usage, missing: int, shape: DecoderSpec | None) -> list[dict[str, object]]:
    """Candidates, the least disturbing first; each the smallest of its kind that is enough, or its largest."""
    ranks = plan.dp_size
    changes: list[dict[str, object]] = [*_more_passes(plan, usage, missing, shape)]
    sharded: dict[str, object] = {"dp_shard": ranks, "dp_replicate": 1} if plan.zero == 0 else {}
    stages = range(plan.zero + 1, 4) if ranks > 1 else range(0)
    changes += [{"zero": zero, **sharded} for zero in stages if zero < 3]
    if plan.recompute in ("none", "attention"):
        changes.append({"recompute": "selective"})
    if plan.recompute != "full":
        changes.append({"recompute": "full"})
    changes += [{"zero": zero, **sharded} for zero in stages if zero == 3]
    if plan.precision in ("fp32", "tf32", "fp64"):
        changes.append({"precision": "bf16"})
    for part in ("optimizer", "activations"):
        if part not in plan.offload:
            changes.append({"offload": (*plan.offload, part)})
    changes.append({"dp_shard": 2 * max(plan.dp_shard, 1), "zero": max(plan.zero, 1)})
    changes.append({"dp_shard": 2 * max(plan.dp_shard, 1), "zero": 3})
    return changes


def _more_passes(plan: Plan, usage: Usage, missing: int, shape: DecoderSpec | None) -> list[dict[str, object]]:
    field, passes = ("microbatches", plan.microbatches) if plan.pp > 1 else ("accumulation", plan.accumulation)
    factors = [factor for factor in range(2, usage.num_rows + 1) if usage.num_rows % factor == 0]
    for factor in factors:
        change: dict[str, object] = {field: passes * factor}
        if factor == factors[-1] or _saved(plan, plan.replace(**change), usage, shape) >= missing:
            return [change]
    return []


def _saved(plan: Plan, other: Plan, usage: Usage, shape: DecoderSpec | None) -> int:
    """Bytes that a rank holds less under the other plan."""
    before, after = _total(plan, plan, usage, shape), _total(plan, other, usage, shape)
    return int(before - after)


def _total(measured: Plan, plan: Plan, usage: Usage, shape: DecoderSpec | None) -> float:
    """Bytes under `plan`, from what was counted under `measured`."""
    parameters = usage.parameters * _share(plan, 3) / _share(measured, 3)
    if plan.zero == 3 and measured.zero < 3:
        parameters += 2 * usage.parameters / (usage.num_blocks + 2)  # two units are gathered at a time
    gradients = usage.gradients * _share(plan, 2) / _share(measured, 2)
    optimizer = usage.optimizer * _share(plan, 1) / _share(measured, 1)
    if plan.precision == "bf16" and measured.precision in ("fp32", "tf32", "fp64"):
        ratio = _WIDTHS["bf16"] / _WIDTHS[measured.precision]
        optimizer += usage.parameters / _share(measured, 3) * _share(plan, 1)  # master weights, beside the rounded ones
        parameters *= ratio
    if "optimizer" in plan.offload:
        optimizer = 0.0
    return parameters + gradients + optimizer + _activations(measured, plan, usage, shape)


def _share(plan: Plan, stage: int) -> float:
    """What part of a class of states one rank holds; it is sharded from this ZeRO stage on."""
    return 1 / plan.dp_shard if plan.zero >= stage else 1.0


def _activations(measured: Plan, plan: Plan, usage: Usage, shape: DecoderSpec | None) -> float:
    if "activations" in plan.offload and "activations" not in measured.offload:
        return 2 * usage.activations / (usage.num_blocks + 2)
    passes = measured.microbatches_per_step / plan.microbatches_per_step
    if shape is not None and usage.num_tokens and measured.recompute in _LEFT and plan.recompute in _LEFT:
        return activation_bytes(shape, int(usage.num_tokens * passes), plan.precision, plan.recompute)
    left = _left(plan, usage) / _left(measured, usage)
    return usage.activations * passes * left * _WIDTHS[plan.precision] / _WIDTHS[measured.precision]


def _left(plan: Plan, usage: Usage) -> float:
    """Share of the activations that recompute leaves; the block under way is whole."""
    kept = _LEFT.get(plan.recompute, 0.5)
    return kept + (1 - kept) / usage.num_blocks


def _words(plan: Plan, other: Plan) -> str:
    """The fields that differ, as they are typed."""
    old, new = (set(value.format().split()) for value in (plan, other))
    return " ".join(sorted(new - old, key=other.format().split().index)) or str(other)
