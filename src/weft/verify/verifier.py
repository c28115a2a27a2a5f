"""Tolerances by dtype for two trainings to count as equal, and the comparison of a plan with one process.

| dtype | loss | grad norm | gradients, weights | measure of a tensor |
|---|---|---|---|---|
| float64 | 1e-10 | 1e-10 | 1e-10 | largest difference / largest value |
| float32 | 1e-5 | 1e-4 | 1e-3 | the same |
| bfloat16 | 2^-5 | 2^-5 | 2^-3 | mean difference / largest value |
| float16 | 2^-8 | 2^-8 | 2^-5 | the same |

Ranks split a batch, so the order of additions differs. In float64 nothing else may differ. The reference of the half
dtypes is one process of Weft in that dtype. For the others it is plain PyTorch.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.config.plan import Plan
from weft.config.rules.plan_rules import check_plan
from weft.errors import CommError, ModelError, PlanError, WeftError
from weft.private_torch import graph_task, tree_leaves
from weft.train.batches.microbatches import Microbatches
from weft.train.step.batch_check import Probed, causes_of
from weft.verify.parity import ParityResult, See, Watch, train_case, train_plain
from weft.verify.private_torch import run_backward
from weft.verify.rank_pool import RankError, RankPool
from weft.verify.subject import BuiltCase, Subject


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum relative differences that count as equal. by_mean: if True, compare a tensor's mean difference."""

    loss: float
    grad_norm: float
    tensor: float
    by_mean: bool = False


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-10),
    "float32": Tolerance(1e-5, 1e-4, 1e-3),
    "bfloat16": Tolerance(2**-5, 2**-5, 2**-3, by_mean=True),
    "float16": Tolerance(2**-8, 2**-8, 2**-5, by_mean=True),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One compared number or tensor.

    Attributes:
        what: "loss", "grad norm", "gradient" or "weight".
        name: the step, or the parameter's name.
        relative: difference as a share of its scale.
        limit: maximum that counts as equal.
    """

    what: str
    name: str
    relative: float
    limit: float

    @property
    def is_equal(self) -> bool:
        return self.relative <= self.limit  # a NaN is not


def number_differences(
    ours: ParityResult, losses: Sequence[float], grad_norms: Sequence[float], tolerance: Tolerance
) -> Iterator[Difference]:
    """Return the differences of losses and gradient norms, step by step."""
    for what, mine, other, limit in (
        ("loss", ours.losses, losses, tolerance.loss),
        ("grad norm", ours.grad_norms, grad_norms, tolerance.grad_norm),
    ):
        for step, (left, right) in enumerate(zip(mine, other, strict=True), 1):
            # Equal infinities, and NaN on both sides, are equal: the plan matches one process.
            same = left == right or (left != left and right != right)
            yield Difference(what, f"step {step}", 0.0 if same else abs(left - right) / max(abs(right), 1e-300), limit)


def tensor_difference(
    what: str, name: str, ours: torch.Tensor, theirs: torch.Tensor | None, least: float, tolerance: Tolerance
) -> Difference:
    """Return the difference of one full gradient or weight. least: from `ParityResult.least_scales`."""
    if theirs is None or ours.shape != theirs.shape:
        return Difference(what, name, float("inf"), tolerance.tensor)
    if not theirs.numel():
        return Difference(what, name, 0.0, tolerance.tensor)
    apart = (ours.detach().to(theirs) - theirs).abs()
    found = float(apart.mean() if tolerance.by_mean else apart.max())
    return Difference(what, name, found / max(float(theirs.abs().max()), least, 1e-300), tolerance.tensor)


# The first module whose activations under a plan differ from one process.

#: (module path, index of the call, index of the output tensor).
Key = tuple[str, int, int]


class OutputRecorder:
    """Records outputs by (module path, call, tensor), in the order in which modules return."""

    def __init__(self) -> None:
        self.outputs: dict[Key, torch.Tensor] = {}

    def see(self, key: Key, output: torch.Tensor) -> None:
        self.outputs[key] = output.detach().clone()


class Watcher:
    """Compares outputs of microbatches with the recorded rows of the same samples.

    Args:
        outputs: outputs of the full batch on one process.
        own: this rank's microbatches, with the indices of their samples.
        every: the full batch as one microbatch, with the indices of its samples.
        limit: maximum relative difference that counts as equal.
    """

    def __init__(self, outputs: dict[Key, torch.Tensor], own: Microbatches, every: Microbatches, limit: float):
        self._outputs, self._limit = outputs, limit
        assert own.samples is not None and every.samples is not None  # noqa: PT018
        self._own, [self._every] = own.samples, every.samples
        self._order = {key: index for index, key in enumerate(outputs)}
        self._seen: dict[tuple[str, int], int] = {}
        self.num_compared = 0
        #: (index in execution order, module path, relative difference) of the first module that differs.
        self.parted: tuple[int, str, float] | None = None

    def see(self, key: Key, output: torch.Tensor) -> None:
        path, call, place = key
        calls = 1 + max((known[1] for known in self._outputs if known[0] == path), default=0)
        micro, call = divmod(call, calls)
        whole = self._outputs.get((path, call, place))
        if whole is None or micro >= len(self._own) or not whole.ndim or not output.ndim:
            return
        rows = self._rows(micro, len(whole), len(output))
        expected = None if rows is None else whole[rows]
        if expected is None or expected.shape != output.shape or not output.is_floating_point():
            return
        self.num_compared += 1
        scale = max(float(whole.abs().max()), 1e-300)
        apart = float((output.detach().to(expected) - expected).abs().max()) / scale
        order = self._order[(path, call, place)]
        if not apart <= self._limit and (self.parted is None or order < self.parted[0]):
            self.parted = (order, path or "the model", apart)

    def _rows(self, micro: int, count_of_all: int, count: int) -> torch.Tensor | None:
        """Return the indices of a microbatch's output rows in the full batch, or None if some are not in it."""
        own = self._own[micro]
        are_samples = count == len(own.numbers)
        if own.is_empty or are_samples != (count_of_all == len(self._every.numbers)):
            return None
        device = torch.device("cpu")
        places = {place: row for row, place in enumerate(self._every.row_numbers(count_of_all, device).tolist())}
        rows = [places.get(place) for place in own.row_numbers(count, device).tolist()]
        return None if None in rows else torch.tensor(rows)


@contextmanager
def watching(model: nn.Module, eyes: OutputRecorder | Watcher) -> Iterator[None]:
    """Pass every module output in forward to `eyes` inside the block. Recomputation in backward is ignored."""
    counts: dict[str, int] = {}
    handles = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or graph_task() != -1:
                return
            call = counts[path] = counts.get(path, -1) + 1
            for place, leaf in enumerate(tree_leaves(output)):
                if isinstance(leaf, torch.Tensor):
                    eyes.see((path, call, place), leaf)

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(hook_of(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


# Float64 throughout: Hugging Face models compute norms, softmax and rotary angles in float32 for any input dtype.


class Float64Throughout(TorchFunctionMode):
    """Mode in which a call on a float64 tensor that asks for float32 returns float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This runs on every call, even to read a dtype: the common case is checked first, and costs a microsecond.
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            if (roots := _roots_of(func, args, kwargs)) is not None:
                # A mode is inactive inside its handler, but must be active in recomputation, which must equal forward.
                # torch.autograd.backward would call the handler again.
                with self:
                    return run_backward(*roots, False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif func is torch.Tensor.float or _names_float32(args) or kwargs.get("dtype") is torch.float32:
            first = args[0] if args else None
            if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
                if func is torch.Tensor.float:
                    return first
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in kwargs.items()}
        return func(*args, **kwargs)


def _names_float32(args: Any) -> bool:
    """Return True if float32 is one of the arguments. It avoids `in`, which compares tensors and takes 20 us."""
    for arg in args:  # noqa: SIM110 (a generator takes twice as long)
        if arg is torch.float32:
            return True
    return False


def _roots_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return (tensors, gradients) if the call is a plain backward, as in the step or a pipeline, else None."""
    if func is torch.Tensor.backward and len(args) == 1 and not any(kwargs.values()):
        return args, (torch.ones_like(args[0]),)
    if func is torch.autograd.backward and not any(value for name, value in kwargs.items() if name != "grad_tensors"):
        tensors = args[0]
        grads = kwargs.get("grad_tensors") or [None] * len(tensors)
        ones = (torch.ones_like(each) if grad is None else grad for each, grad in zip(tensors, grads, strict=True))
        return tuple(tensors), tuple(ones)
    return None


# Checks that training under a plan equals one process: the user's model, some steps, every number compared.

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: Seconds that a rank may take for one plan.
LONGEST_S = 1800.0


@dataclass(slots=True)
class Verdict:
    """Result for one plan.

    Attributes:
        parameters: the larger relative difference of gradient and weight, by name.
        parts: description of the first difference from one process.
        causes: parts of the model, its loss or its data whose results depend on how a batch is split, found on one
            process.
        refused: the reason that the plan cannot be applied to the model.
        error: the error of a failed rank.
    """

    plan: str
    dtype: str
    passed: bool = False
    max_rel_diff: float = float("inf")
    loss: list[float] = field(default_factory=list)
    reference_loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    reference_grad_norm: list[float] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)
    parts: str = ""
    causes: list[str] = field(default_factory=list)
    refused: str = ""
    error: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON. Numbers that JSON does not support become text."""
        return json.loads(json.dumps(asdict(self)), parse_constant=str)


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference results, in reference.safetensors in `folder` ("gradient/name", "weight/name", "start/name")."""

    folder: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    least: dict[str, dict[str, float]]  # by "gradient" or "weight" and name, from ParityResult.least_scales


class Verifier:
    """Verifies plans for one subject on a fixed number of ranks. A context manager, because it owns ranks and a folder.

    pool: running ranks to use, which are not stopped at the end; None starts new ranks.
    """

    def __init__(self, subject: Subject, num_ranks: int, pool: RankPool | None = None):
        self.subject, self.num_ranks = subject, num_ranks
        self._exits = ExitStack()
        self._folder = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="weft-verify-"))
        try:
            self.subject = subject = subject.prepared(Path(self._folder))
            case = subject.build()
            self.notes = list(case.notes)
            self.reference_s = time.perf_counter()
            self._reference = make_reference(subject, case, Path(self._folder), self.notes)
            self.reference_s = time.perf_counter() - self.reference_s
            del case
            self._pool = pool or self._exits.enter_context(RankPool(num_ranks, timeout_s=LONGEST_S))
        except BaseException:
            self._exits.close()
            raise

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def verify(self, plan: Plan, explain: bool = True) -> Verdict:
        """Train under the plan and compare. explain: if results differ, run one more step to locate the cause."""
        start = time.perf_counter()
        dtype = self.subject.settings.dtype
        verdict = Verdict(plan.format(), dtype, reference_loss=list(self._reference.losses))
        verdict.reference_grad_norm = list(self._reference.grad_norms)
        text = plan.replace(precision=PRECISIONS[dtype]).format()
        try:
            answers = self._pool.run(_compare_on_rank, self.subject, text, self._reference)
        except RankError as error:
            verdict.refused, verdict.error = error.refusal, "" if error.refusal else error.said or str(error)
        else:
            judge(verdict, answers)
            if not verdict.passed and explain:
                verdict.parts = self._explain(text)
                verdict.causes = self._causes(plan)
        verdict.seconds = time.perf_counter() - start
        return verdict

    def _explain(self, text: str) -> str:
        """Return a description of the first module or gradient that differs from one process in the first step."""
        one = replace(self.subject, settings=replace(self.subject.settings, num_steps=1))
        case, recorder = one.build(), OutputRecorder()
        folder = Path(self._folder) / "first"
        folder.mkdir(exist_ok=True)
        with watching(case.model(), recorder):
            reference = make_reference(one, case, folder)
        names = ["\n".join(map(str, key)) for key in recorder.outputs]
        outputs = {str(index): tensor.contiguous() for index, tensor in enumerate(recorder.outputs.values())}
        save_file(outputs, folder / "outputs.safetensors", {"names": json.dumps(names)})
        try:
            answers = self._pool.run(_trace_on_rank, one, text, reference)
        except CommError as error:
            return f"not found: {str(error).splitlines()[-1]}"
        parted = [answer.parted for answer in answers if answer.parted]
        if parted:
            _, path, apart = min(parted)
            return f"output of {path} in step 1 ({apart:.1e})"
        names = [name for name, _ in case.model().named_parameters()]
        for answer in answers:
            wrong = {
                one.name: one.relative for one in answer.differences if one.what == "gradient" and not one.is_equal
            }
            for name in reversed(names):  # backward comes to the last parameters first
                if name in wrong:
                    return f"gradient of {name} in step 1 ({wrong[name]:.1e}); all {answer.num_compared} outputs agree"
        return "the update: outputs and gradients of step 1 agree"

    def _causes(self, plan: Plan) -> list[str]:
        """Return a sentence for each reason why results on one process depend on how a batch is divided."""
        case, forwards = self.subject.build(), plan.microbatches_per_step
        limit = {"float64": 1e-9, "float32": 1e-4}.get(self.subject.settings.dtype, 5e-2)
        probed = Probed(
            case.model().train(), case.forward, case.loss, limit=limit, parts=plan.dp_size * forwards, forwards=forwards
        )
        try:
            with throughout(self.subject):
                return causes_of(probed, case.batch(0))
        except ModelError as error:
            return [str(error)]


@dataclass(slots=True)
class RankAnswer:
    """Results of one rank."""

    losses: list[float]
    grad_norms: list[float]
    differences: list[Difference]
    parted: tuple[int, str, float] | None = None
    num_compared: int = 0


def judge(verdict: Verdict, answers: list[RankAnswer]) -> None:
    """Fill in a verdict from the answers of all ranks."""
    verdict.loss, verdict.grad_norm = answers[0].losses, answers[0].grad_norms
    every = [difference for answer in answers for difference in answer.differences]
    for difference in every:
        if difference.what in ("gradient", "weight"):
            known = verdict.parameters.get(difference.name, 0.0)
            verdict.parameters[difference.name] = _larger(known, difference.relative)
    verdict.max_rel_diff = 0.0
    for difference in every:
        verdict.max_rel_diff = _larger(verdict.max_rel_diff, difference.relative)
    verdict.passed = all(difference.is_equal for difference in every)


def check_subject(subject: Subject, plan: Plan) -> None:
    """Raise PlanError if the plan breaks rules for this model and these sizes. The message lists all of them."""
    if plan.measures_shares:
        raise PlanError("shares=auto: a verification has no times to measure. Write numbers, such as shares=3+1.")
    check_plan(plan, subject.facts(plan.world_size))


def _larger(one: float, other: float) -> float:
    """Return the larger number, or NaN if one is NaN."""
    return other if other != other or other > one else one


def throughout(subject: Subject) -> AbstractContextManager[Any]:
    foreign = subject.kind != "decoder" and subject.settings.dtype == "float64"
    return Float64Throughout() if foreign else nullcontext()


def make_reference(subject: Subject, case: BuiltCase, folder: Path, notes: list[str] | None = None) -> Reference:
    """Train the reference and save it. notes: receives observations about the reference."""
    start = {f"start/{name}": tensor.detach().clone() for name, tensor in _state(case.model())}
    with throughout(subject):
        half = subject.settings.dtype in ("bfloat16", "float16")
        one = f"precision={PRECISIONS[subject.settings.dtype]}"
        result = train_case(one, case) if half else _plainly(subject, case)
    unused = [name for name, grad in result.grads.items() if not grad.any()]
    if unused and notes is not None:
        first, every = unused[0], len(result.grads)
        notes.append(f"{len(unused)} of {every} parameters have no gradient in the last step; the first is {first}")
    tensors = start if subject.kind == "function" else {}
    tensors |= {f"gradient/{name}": tensor.contiguous() for name, tensor in result.grads.items()}
    tensors |= {f"weight/{name}": tensor.contiguous() for name, tensor in result.weights.items()}
    save_file(tensors, folder / "reference.safetensors")
    gradients, weights = result.least_scales()
    least = {"gradient": gradients, "weight": weights}
    return Reference(str(folder), tuple(result.losses), tuple(result.grad_norms), least)


def _plainly(subject: Subject, case: BuiltCase) -> ParityResult:
    """Train with plain PyTorch. Raise ModelError if it fails: the model, its data or its loss is then wrong."""
    try:
        return train_plain(case)
    except WeftError:
        raise
    except Exception as error:
        raise ModelError(
            f"model={subject.source}: PyTorch alone cannot train it: {type(error).__name__} ({error}). "
            f"Fix the model, its data or its loss; if it needs other inputs, give them with package.module:function."
        ) from error


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _compare_on_rank(subject: Subject, plan: str, reference: Reference, watch: Watch | None = None) -> RankAnswer:
    """Train and compare on each rank. Raises WeftError if the plan cannot be applied to the model."""
    return compare(subject, reference, lambda case, see: train_case(plan, case, see, watch))


def compare(subject: Subject, reference: Reference, train: Callable[[BuiltCase, See], ParityResult]) -> RankAnswer:
    """Train the subject with `train`, which passes gradients and weights to its second argument, and compare."""
    tolerance = TOLERANCES[subject.settings.dtype]
    found: list[Difference] = []
    with safe_open(Path(reference.folder) / "reference.safetensors", "pt") as file, throughout(subject):
        missing = {key for key in file.keys() if not key.startswith("start/")}  # noqa: SIM118

        def see(what: str, name: str, tensor: torch.Tensor) -> None:
            key = f"{what}/{name}"
            other = file.get_tensor(key) if key in missing else None
            missing.discard(key)
            found.append(tensor_difference(what, name, tensor, other, reference.least[what].get(name, 0.0), tolerance))

        case = subject.build()
        with torch.no_grad():
            for name, tensor in _state(case.model()) if subject.kind == "function" else ():
                tensor.copy_(file.get_tensor(f"start/{name}"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = train(case, see)
    for what, _, name in (key.partition("/") for key in sorted(missing)):
        found.append(Difference(what, name, float("inf"), tolerance.tensor))
    found += number_differences(result, reference.losses, reference.grad_norms, tolerance)
    return RankAnswer(result.losses, result.grad_norms, found)


def _trace_on_rank(subject: Subject, plan: str, reference: Reference) -> RankAnswer:
    with safe_open(Path(reference.folder) / "outputs.safetensors", "pt") as file:
        names = [name.split("\n") for name in json.loads(file.metadata()["names"])]
        outputs = {
            (path, int(call), int(place)): file.get_tensor(str(i)) for i, (path, call, place) in enumerate(names)
        }
    eyes: list[Watcher] = []

    def watch(model: nn.Module, own: Microbatches, every: Microbatches) -> AbstractContextManager[None]:
        eyes.append(Watcher(outputs, own, every, TOLERANCES[subject.settings.dtype].tensor))
        return watching(model, eyes[0])

    answer = _compare_on_rank(subject, plan, reference, watch)
    if eyes:
        answer.parted, answer.num_compared = eyes[0].parted, eyes[0].num_compared
    return answer
