"""Comparison of the JAX engine with one process of torch: the same model, data and steps, every number compared.

The engine shares no parallel code with torch, so it also checks the reference. It runs all ranks of a plan as devices
of this process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.config.plan import Plan
from weft.data.batches import map_tensors
from weft.errors import MissingExtra, WeftError
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.find_layout import find_layout
from weft.verify.parity import ParityResult, See, microbatches_of_case
from weft.verify.subject import BuiltCase, Subject
from weft.verify.verifier import PRECISIONS, Verdict, compare, judge, make_reference

try:
    import weft.jax_engine.capture as capturing
    from weft.jax_engine.program import Program, Sharding
    from weft.jax_engine.update import read_optimizer
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib"):
        raise
    raise MissingExtra("jax", "jax", "engine=jax") from error


@dataclass(slots=True)
class _Model:
    """A captured model with its program, and its arrays on the devices."""

    program: Program
    params: dict[str, Any]
    buffers: dict[str, Any]
    states: dict[str, Any]
    torch_buffers: dict[str, torch.Tensor]


def train_jax(plan: Plan, case: BuiltCase, see: See) -> ParityResult:
    """Train `case` under a plan with the JAX engine. The callback gets the last gradients and the weights.

    Raises:
        WeftError: if the engine cannot use the plan, or cannot capture the model.
    """
    result, size = ParityResult(), Plan(accumulation=plan.accumulation)
    found: _Model | None = None
    grads: dict[str, Any] = {}
    for step in range(case.num_steps):
        parts = list(microbatches_of_case(case, step, size, 0))
        if found is None:
            found = _build(plan, case, parts[0])
        program, captured = found.program, found.program.captured
        inputs = program.place_batch([captured.inputs(part, found.torch_buffers) for part in parts])
        number, factor = np.int64(step), np.float64(1.0)
        found.params, report, found.states, moved, grads = program.step(
            found.params, found.buffers, found.states, inputs, number, factor
        )
        found.buffers |= moved
        loss, norm, _ = np.asarray(report).tolist()
        result.losses.append(loss)
        result.grad_norms.append(norm)
    assert found is not None
    for name, grad in grads.items():
        see("gradient", name, capturing.to_tensor(grad))
    for name in found.program.optimizer.hyper:
        see("weight", name, capturing.to_tensor(found.params[name]))
    return result


def _build(plan: Plan, case: BuiltCase, batch: Any) -> _Model:
    model = case.model()
    layout = case.layout
    if layout is None and (plan.tp > 1 or plan.ep > 1):
        layout = find_layout(model, case.example(model))
    sharding = Sharding.of(plan, layout)
    optimizer = read_optimizer(case.optimizer_of(model), model)
    params = {name: capturing.to_array(param) for name, param in model.named_parameters()}
    buffers = {name: capturing.to_array(buffer) for name, buffer in model.named_buffers()}
    function = partial(_loss, case, plan.precision == "bf16")
    if plan.precision == "bf16":
        capturing.rounded(model)
    capturing.prepare_routers(model)
    captured = capturing.capture(model, function, batch, case.source)
    shapes = {name: param.shape for name, param in params.items()}
    program = Program(
        captured, optimizer, sharding, max_grad_norm=case.max_grad_norm, shapes=shapes,
        blocks=list(repeated_blocks(model)), keeps_gradients=True,
    )  # fmt: skip
    placed, states = program.place(params)
    return _Model(program, placed, buffers, states, dict(model.named_buffers()))


def _loss(case: BuiltCase, rounds: bool, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = map_tensors(_rounded, batch) if rounds else batch
    loss, count = case.loss(case.forward(model, given), batch)
    return loss, count if isinstance(count, torch.Tensor) else torch.tensor(count)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


class JaxVerifier:
    """Verifies plans of the JAX engine for one subject. A context manager, because it owns a folder."""

    def __init__(self, subject: Subject):
        self._folder = tempfile.TemporaryDirectory(prefix="weft-verify-")
        self.subject = subject = subject.prepared(Path(self._folder.name))
        case = subject.build()
        self.notes = list(case.notes)
        self._reference = make_reference(subject, case, Path(self._folder.name), self.notes)

    def __enter__(self) -> JaxVerifier:
        return self

    def __exit__(self, *details: object) -> None:
        self._folder.cleanup()

    def verify(self, plan: Plan) -> Verdict:
        """Train under the plan and compare with the reference."""
        start, dtype = time.perf_counter(), self.subject.settings.dtype
        verdict = Verdict(plan.format(), dtype, reference_loss=list(self._reference.losses))
        verdict.reference_grad_norm = list(self._reference.grad_norms)
        plan = plan.replace(precision=PRECISIONS[dtype])
        try:
            judge(verdict, [compare(self.subject, self._reference, partial(train_jax, plan))])
        except WeftError as error:
            verdict.refused = str(error)
        verdict.seconds = time.perf_counter() - start
        return verdict


def verify_plans(subject: Subject, plans: Sequence[Plan]) -> list[Verdict]:
    """Return the verdicts of several plans of one subject."""
    with JaxVerifier(subject) as verifier:
        return [verifier.verify(plan) for plan in plans]
