"""References to parameters other than module attributes: results match, or the reference is rejected by name."""

from __future__ import annotations

import functools
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.choice import todays
from tests.lean import compiled_by
from tests.parallel.loops import weights
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.stale_references import watched_references
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep

PLANS = ["dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2", "dp_shard=2 zero=2 offload=optimizer"]


class Net(nn.Module):
    """Three linear layers. `add_reference` stores a reference to the first, `use` computes with it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.double()
        self.add_reference()

    def add_reference(self):
        pass

    def use(self, x):
        return self.up(x)

    def forward(self, x):
        return self.head(x + self.down(F.gelu(self.use(x))))


class View(Net):
    def add_reference(self):
        self.w_t = self.up.weight.t()

    def use(self, x):
        return x @ self.w_t + self.up.bias


class Detached(Net):
    def add_reference(self):
        self.w = self.up.weight.detach()

    def use(self, x):
        return F.linear(x, self.w, self.up.bias) + 0 * self.up(x)


class DataView(Net):
    def add_reference(self):
        self.views = {"w": self.up.weight.data.T}

    def use(self, x):
        return self.up(x) + x @ self.views["w"]


class PythonList(Net):
    def add_reference(self):
        self.weights = [self.up.weight, self.up.bias]

    def use(self, x):
        return F.linear(x, *self.weights)


class NestedDict(Net):
    def add_reference(self):
        self.store = {"up": {"kernel": (self.up.weight, self.up.bias)}}

    def use(self, x):
        return F.linear(x, *self.store["up"]["kernel"])


class Closure(Net):
    def add_reference(self):
        weight, bias = self.up.weight, self.up.bias
        self.apply_up = lambda x: F.linear(x, weight, bias)

    def use(self, x):
        return self.apply_up(x)


class Partial(Net):
    def add_reference(self):
        self.apply_up = functools.partial(F.linear, weight=self.up.weight, bias=self.up.bias)

    def use(self, x):
        return self.apply_up(x)


class DefaultArgument(Net):
    def add_reference(self):
        def up(x, w=self.up.weight, *, b=self.up.bias):
            return F.linear(x, w, b)

        self.apply_up = up

    def use(self, x):
        return self.apply_up(x)


class InDict(Net):
    def add_reference(self):
        self.__dict__["w"] = self.up.weight

    def use(self, x):
        return F.linear(x, self.w, self.up.bias)


class Variable:
    """A weight wrapper as in Keras."""

    def __init__(self, value):
        self._value = value

    @property
    def value(self):
        return self._value


class KerasLike(Net):
    def add_reference(self):
        self.kernel, self.offset = Variable(self.up.weight), Variable(self.up.bias)
        self.torch_params = nn.ParameterDict({"kernel": self.up.weight, "bias": self.up.bias})
        del self.up

    def use(self, x):
        return x @ self.kernel.value.t() + self.offset.value


class SlotObject(Net):
    def add_reference(self):
        self.config = types.SimpleNamespace(tied=types.SimpleNamespace(weight=self.up.weight))

    def use(self, x):
        return F.linear(x, self.config.tied.weight, self.up.bias)


class BufferView(Net):
    def add_reference(self):
        self.register_buffer("w", self.up.weight.detach().view(-1))

    def use(self, x):
        return self.up(x) + F.linear(x, self.w.view(16, 8))


class NumpyView(Net):
    def add_reference(self):
        self.array = self.up.weight.detach().numpy()

    def use(self, x):
        return self.up(x) + F.linear(x, torch.from_numpy(self.array))


class FlatParameters(Net):
    """Parameters are views of one tensor, which forward reads."""

    def add_reference(self):
        self.flat = torch.cat([self.up.weight.detach().flatten(), self.up.bias.detach()])
        self.up.weight, self.up.bias = nn.Parameter(self.flat[:128].view(16, 8)), nn.Parameter(self.flat[128:])

    def use(self, x):
        return self.up(x) + F.linear(x, self.flat[:128].view(16, 8))


class Row(Net):
    def add_reference(self):
        self.first = self.up.weight[0]

    def use(self, x):
        return self.up(x) + (x @ self.first)[:, None]


class ComputedOnce(Net):
    """Gradients reach the parameter through a tensor computed from it earlier."""

    def add_reference(self):
        self.shifted = self.up.weight + 1.0

    def use(self, x):
        return self.up(x) + F.linear(x, self.shifted)


class BoundMethod(Net):
    def add_reference(self):
        self.product = self.up.weight.mul

    def use(self, x):
        return self.up(x) + self.product(0.5).sum()


class Decay(Net):
    """Adds a term over a list of all parameters made at construction."""

    def add_reference(self):
        self.listed = list(self.parameters())

    def use(self, x):
        return self.up(x) + sum(param.square().sum() for param in self.listed)


GLOBAL: list[torch.Tensor] = []


class Global(Net):
    def add_reference(self):
        GLOBAL[:] = [self.up.weight.t()]

    def use(self, x):
        return x @ GLOBAL[0] + self.up.bias


class SameMemory(Net):
    """Two parameters in the same memory, one of them transposed."""

    def add_reference(self):
        self.down.weight = nn.Parameter(self.up.weight.data.t())


class Clamps(Net):
    """Writes to a parameter in forward."""

    def use(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return self.up(x)


class ClampsData(Net):
    """Writes to a parameter through `.data`, which torch does not count."""

    def use(self, x):
        self.up.weight.data.copy_(self.up.weight.data.clamp(-0.2, 0.2))
        return self.up(x)


class OtherWeight(Net):
    """Calls a layer with a weight that is not its parameter."""

    def use(self, x):
        return torch.func.functional_call(self.up, {"weight": self.up.weight * 0.5}, (x,))


STALE = [
    View, Detached, DataView, PythonList, NestedDict, Closure, Partial, DefaultArgument, InDict, KerasLike, SlotObject,
    BufferView, NumpyView, FlatParameters, Row, ComputedOnce, BoundMethod, Decay, Global, SameMemory, Clamps,
    ClampsData, OtherWeight,
]  # fmt: skip


class UnusedReference(Net):
    """Lists and views that forward does not use in computations."""

    def add_reference(self):
        self.listed, self.view = list(self.parameters()), self.up.weight.t()

    def use(self, x):
        assert self.listed[0].shape == (16, 8)
        assert len(self.view) == 8
        assert self.view.dtype == x.dtype
        return self.up(x).to(self.listed[0].device)


class Tied(Net):
    def add_reference(self):
        self.head = nn.Linear(8, 8).double()
        self.mid = nn.Linear(8, 8, bias=False).double()
        self.mid.weight = self.head.weight

    def use(self, x):
        return self.up(self.mid(x))


class Refreshed(Net):
    """A view that each forward creates again."""

    def use(self, x):
        self.w_t = self.up.weight.t()
        return self.up(x) + x @ self.w_t


class Teacher(Net):
    """A frozen copy that is not in a module."""

    def add_reference(self):
        self.teacher = [self.up.weight.detach().clone()]

    def use(self, x):
        return self.up(x) + F.linear(x, self.teacher[0])


class Frozen(Net):
    def add_reference(self):
        self.up.weight.requires_grad_(False)
        self.fixed = self.up.weight.t()

    def use(self, x):
        return x @ self.fixed + self.up.bias


class Parametrized(Net):
    def add_reference(self):
        parametrizations.weight_norm(self.up)


class OldWeightNorm(Net):
    def add_reference(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.up = nn.utils.weight_norm(self.up)


class OldSpectralNorm(Net):
    def add_reference(self):
        self.up = nn.utils.spectral_norm(self.up)


class Recurrent(Net):
    def add_reference(self):
        self.rnn = nn.GRU(8, 8, batch_first=True).double()

    def use(self, x):
        return self.up(self.rnn(x[:, None])[0][:, 0])


class Columns(Net):
    """Parameters that are columns of one matrix."""

    def add_reference(self):
        whole = torch.randn(16, 16).double()
        self.up.weight, self.down.weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:].t())


class Scripted(Net):
    def add_reference(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.up = torch.jit.trace(self.up, torch.zeros(1, 8).double())


class Functional(Net):
    def use(self, x):
        return torch.func.functional_call(self.up, dict(self.up.named_parameters()), (x,))


@functools.lru_cache
def lower_triangle(size: int) -> torch.Tensor:
    return torch.tril(torch.ones(size, size, dtype=torch.float64))


class CachedMatrix(Net):
    def use(self, x):
        return self.up(x @ lower_triangle(x.shape[1]))


TABLES: dict[int, torch.Tensor] = {}


class CachedInDict(Net):
    @staticmethod
    @functools.cache
    def scale(size: int) -> torch.Tensor:
        return torch.arange(1, size + 1, dtype=torch.float64).diag() / size

    def use(self, x):
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.float64))
        return self.up(x @ TABLES[x.shape[1]] @ self.scale(x.shape[1]))


ORDINARY = [
    Net, UnusedReference, Tied, Refreshed, Teacher, Frozen, Parametrized, OldWeightNorm, OldSpectralNorm, Recurrent,
    Functional, Columns, Scripted, CachedMatrix, CachedInDict,
]  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_fn(output, batch):
    return (output - batch[1][:, : output.shape[1]]).square().sum(), len(output)


def trained(plan: str, kind: type[Net]) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    lower_triangle.cache_clear()
    CachedInDict.scale.cache_clear()
    TABLES.clear()
    model = parallelize(kind(), mesh)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    for number in range(3):
        step(Microbatches.of_rows(batch(number), mesh.plan, mesh.data.rank))
    return weights(model)


def trained_all(plan: str) -> dict[str, dict[str, torch.Tensor] | str]:
    found = {}
    for kind in [*STALE, *ORDINARY]:
        try:
            found[kind.__name__] = trained(plan, kind)
        except Exception as error:
            found[kind.__name__] = f"{type(error).__name__}: {error}"
    return found


def plain(kind: type[Net]) -> dict[str, torch.Tensor]:
    model = kind().train()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for number in range(3):
        (loss_fn(model(batch(number)[0]), batch(number))[0] / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def check(plan: str, found: dict[str, dict[str, torch.Tensor] | str]) -> None:
    for kind in [*STALE, *ORDINARY]:
        answer = found[kind.__name__]
        if isinstance(answer, str):
            assert answer.split(":")[0] in ("ModelError", "PlanError", "LayoutError", "TrialError"), (
                plan,
                kind,
                answer,
            )
            # tp rejects computed weights, zero=3 weights that are read while their module is not called.
            assert kind in STALE or "tp=2: " in answer or "layout: " in answer or "zero=3: " in answer, (plan, answer)
            continue
        expected = plain(kind)
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{plan} {kind} {name}")


@pytest.mark.parametrize("plan", todays(PLANS, parts=2))
def test_no_stale_reference_is_silently_wrong(plan, ranks2):
    for answer in ranks2.run(trained_all, plan):
        check(plan, answer)


def test_stale_references_are_named_in_one_process():
    found = trained_all("")
    check("", found)
    reached = {
        View: "w_t", Detached: "w", DataView: "views['w']", BufferView: "buffer w", Row: "first",
        FlatParameters: "flat",
        Global: "global GLOBAL[0]",
    }  # fmt: skip
    for kind, path in reached.items():
        assert f"parameter up.weight is used through {path}, which" in found[kind.__name__], found[kind.__name__]
    # In one process these objects stay the modules' parameters, so training is unaffected.
    for kind in (PythonList, NestedDict, Closure, Partial, DefaultArgument, InDict, KerasLike, SlotObject, Decay):
        assert isinstance(found[kind.__name__], dict), found[kind.__name__]


def test_stale_references_are_named_under_zero_3(ranks2):
    found = ranks2.run(trained_all, "dp_shard=2 zero=3")[0]
    reached = {
        PythonList: "weights[0]", NestedDict: "store['up']['kernel'][0]", Closure: "variable weight of apply_up",
        Partial: "an argument of apply_up", DefaultArgument: "a default of apply_up", KerasLike: "kernel._value",
        SlotObject: "config.tied.weight", ComputedOnce: "shifted", Decay: "listed[0]",
    }  # fmt: skip
    for kind, path in reached.items():
        assert f"is used through {path}, which" in found[kind.__name__], found[kind.__name__]


def test_parameters_in_the_same_memory_are_refused():
    with pytest.raises(ModelError, match=r"parameters down\.weight and up\.weight are different objects in the same"):
        parallelize(SameMemory(), build_mesh(Plan.parse("precision=fp64")))


@pytest.mark.parametrize("kind", [Clamps, ClampsData])
def test_writes_that_a_master_would_undo_are_refused(kind):
    model = parallelize(kind().float(), build_mesh(Plan.parse("precision=bf16")))
    with pytest.raises(ModelError, match=r"parameter up\.weight: forward writes to it, and precision=bf16 updates it"):
        model(torch.zeros(1, 8, dtype=torch.bfloat16))


def test_stale_reference_is_rejected_in_a_user_loop():
    model = parallelize(View(), build_mesh(Plan.parse("precision=fp64")))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"parameter up\.weight is used through w_t"):
            model(batch(0)[0])


def test_loss_with_old_parameters_is_rejected(ranks2):
    assert all("is used from outside its modules" in message for message in ranks2.run(loss_with_old_parameters, 3))


def loss_with_old_parameters(zero: int) -> str:
    mesh, model = build_mesh(Plan.parse(f"dp_shard=2 zero={zero} precision=fp64")), Net()
    old = list(model.parameters())
    parallelize(model, mesh)

    def loss(output, batch):
        return output.square().sum() + 0.1 * sum(param.square().sum() for param in old), len(output)

    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, mesh)
    try:
        step(batch(mesh.data.rank))
    except ModelError as error:
        return str(error)
    return "not refused"


def test_stale_references_are_detected_in_compiled_models():
    mesh = build_mesh(Plan.parse("compile=on precision=fp64"))
    for kind, refused in ((View, True), (UnusedReference, False)):
        with compiled_by("lean"):
            model = parallelize(nn.Sequential(kind(), nn.Sequential(nn.Linear(4, 4), nn.GELU()).double()), mesh)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
        message = ""
        try:
            step(batch(0))
            step(batch(1))
        except ModelError as error:
            message = str(error)
        assert ("is used through 0.w_t" in message) == refused, message


def test_ordinary_models_have_no_reference_checks():
    for kind in (Net, Tied, Refreshed, Teacher, Parametrized, Recurrent, Functional):
        assert watched_references(parallelize(kind(), build_mesh(Plan.parse("precision=fp64")))) is None, kind
