"""Private steps under a plan compared with a plain loop over single samples."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.parallel.parallelize import parallelize
from weft.privacy.keys import read_key
from weft.privacy.noise import noise_at
from weft.privacy.settings import Privacy
from weft.privacy.update import PrivateUpdate
from weft.train.batches.microbatches import split_rows
from weft.train.states.whole_copy import full_tensors
from weft.train.step.train_step import TrainStep
from weft.verify.rank_pool import RankError, RankPool
from weft.verify.subject import BuiltCase, Subject
from weft.verify.verifier import LONGEST_S, PRECISIONS, TOLERANCES

_KEY, _NOISE, _CLIP = "test:verify", 0.5, 0.1


@dataclass
class PrivateVerdict:
    """Result for one plan.

    Attributes:
        parameters: largest difference of each weight after the steps, relative to its largest element.
        error: the error of a failed rank.
    """

    plan: str
    dtype: str
    passed: bool = False
    max_rel_diff: float = float("inf")
    parameters: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)


def verify_private(subject: Subject, plan: Plan) -> PrivateVerdict:
    """Train some private steps under a plan and by single samples, and compare the weights.

    Raises:
        PlanError: if the plan or the model is refused.
    """
    start, dtype = time.perf_counter(), subject.settings.dtype
    if dtype not in ("float64", "float32"):
        raise PlanError(f"dtype={dtype}: clipped sums are compared in float64 or float32. Use --dtype float64.")
    verdict = PrivateVerdict(plan.format(), dtype)
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        subject = subject.prepared(Path(folder))
        text = plan.replace(precision=PRECISIONS[dtype]).format()
        want = by_single_samples(subject.build())
        with RankPool(plan.world_size, timeout_s=LONGEST_S) as pool:
            try:
                found = pool.run(_train_on_rank, subject, text)[0]
            except RankError as error:
                if error.refusal:
                    raise PlanError(error.refusal) from error
                verdict.error = error.said or str(error)
                return verdict
    for name, tensor in want.items():
        apart = float((found[name].to(tensor) - tensor).abs().max()) if tensor.numel() else 0.0
        verdict.parameters[name] = apart / max(float(tensor.abs().max()), 1e-300)
    verdict.max_rel_diff = max(verdict.parameters.values(), default=0.0)
    verdict.passed = verdict.max_rel_diff <= TOLERANCES[dtype].tensor
    verdict.seconds = time.perf_counter() - start
    return verdict


def by_single_samples(case: BuiltCase) -> dict[str, Tensor]:
    """Return the trained weights after private steps, in a plain loop over single samples."""
    model, key, size = case.model(), read_key(_KEY), case.settings.global_batch
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = case.optimizer_of(model)
    for step in range(case.num_steps):
        sums = {name: torch.zeros_like(param) for name, param in named}
        for sample in split_rows(case.batch(step), [range(one, one + 1) for one in range(size)]):
            loss_sum, count = case.loss(case.forward(model, sample), sample)
            loss = loss_sum / max(float(count), 1.0)
            grads = torch.autograd.grad(loss, [param for _, param in named], allow_unused=True)
            norm = sum(float(grad.double().square().sum()) for grad in grads if grad is not None) ** 0.5
            for (name, _), grad in zip(named, grads, strict=True):
                if grad is not None:
                    sums[name] += grad * min(1.0, _CLIP / max(norm, 1e-300))
        for name, param in named:
            noise = noise_at(key, step, name, np.arange(param.numel())).reshape(param.shape)
            param.grad = (sums[name] + _NOISE * _CLIP * torch.from_numpy(noise).to(sums[name])) / size
        optimizer.step()
    return {name: param.detach() for name, param in named}


def _train_on_rank(subject: Subject, text: str) -> dict[str, Tensor]:
    """Train under a plan. Return the full weights on the first rank."""
    case, plan = subject.build(), Plan.parse(text)
    mesh, size = build_mesh(plan), case.settings.global_batch
    model = parallelize(
        case.model(), mesh, layout=case.layout, seed=case.settings.seed, example=case.example(case.model())
    )
    privacy = Privacy(4 * size, size, case.num_steps, 1e-6, noise=_NOISE, clip=_CLIP, key=_KEY)
    optimizer = case.optimizer_of(model)
    update = PrivateUpdate(privacy, mesh)
    step = TrainStep(model, optimizer, case.loss, mesh, forward=case.forward, privacy=update)
    for number in range(case.num_steps):
        update.draw(number)  # a step of other records than drawn ones warns
        step(case.microbatches(number, plan, mesh.data.rank))
    return {name: tensor.clone() for name, tensor in full_tensors(mesh, model).items()}


def describe_private(verdict: PrivateVerdict) -> list[str]:
    """Return a verdict as lines: the parameters that differ most, and the result."""
    lines = [f"plan     {verdict.plan or 'one rank'}", f"dtype    {verdict.dtype}"]
    if verdict.error:
        return [*lines, f"failed   {verdict.error}"]
    most = sorted(verdict.parameters.items(), key=lambda item: -item[1])[:5]
    lines += [f"{apart:<8.1e} {name}" for name, apart in most]
    word = "equal" if verdict.passed else "DIFFERS"
    return [
        *lines,
        f"{word}: private steps differ from single samples by at "
        f"most {verdict.max_rel_diff:.1e} ({verdict.seconds:.1f} s)",
    ]
