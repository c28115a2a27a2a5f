"""norm_group with batch norm subclasses that override forward: their changes are kept, or they are rejected."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.loops import weights
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep

SAMPLES, STEPS = 8, 2


class WithActivation(nn.BatchNorm2d):
    """As in timm, with its own count of batches."""

    def forward(self, x):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        var = self.running_var if not self.training or self.track_running_stats else None
        return F.relu(F.batch_norm(x, mean, var, self.weight, self.bias, uses_batch, factor, self.eps))


class CallsSuper(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x.contiguous())) + x


class ShiftedWeight(nn.BatchNorm2d):
    def forward(self, input):
        weight = 1 + self.weight
        return torch.batch_norm(
            input, weight, self.bias, self.running_mean, self.running_var, self.training, self.momentum, self.eps, False
        )


class ByKeyword(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, None, None, weight=self.weight, training=self.training, eps=self.eps).tanh()


class Frozen(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Renorm(nn.BatchNorm2d):
    """Batch renormalization."""

    def forward(self, x):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        self.running_mean.lerp_(mean.detach(), 0.1)
        return F.batch_norm(x, mean.detach(), var.detach(), self.weight, self.bias, False, 0.0, self.eps)


class BatchMaximum(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) - x.amax((0, 2, 3), keepdim=True)


class Ghost(nn.BatchNorm2d):
    def forward(self, x):
        return torch.cat([super(Ghost, self).forward(part) for part in x.chunk(2)])


class GhostByChannels(nn.BatchNorm2d):
    def forward(self, x):
        wide = x.reshape(-1, 2 * x.shape[1], *x.shape[2:])
        two = [one.repeat(2) for one in (self.weight, self.bias)]
        return F.batch_norm(wide, None, None, *two, True, self.momentum, self.eps).view_as(x)


class OtherStatistics(nn.BatchNorm2d):
    def forward(self, x):
        mean, var = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)


class OtherMomentum(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.5)


SUPPORTED = [WithActivation, CallsSuper, ShiftedWeight, ByKeyword, Frozen]
REFUSED = {
    Renorm: "it moves running_mean or running_var itself",
    BatchMaximum: "it computes statistics of one microbatch",
    Ghost: "a batch norm got",
    GhostByChannels: "a batch norm got",
    OtherStatistics: "it passes statistics to batch_norm that are not its running_mean",
    OtherMomentum: "it calls batch_norm with momentum=0.5, not its own 0.1",
}


def network(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.BatchNorm2d(4, momentum=None) if kind is not WithActivation else WithActivation(4, momentum=None)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), kind(4), nn.Conv2d(4, 4, 3), last, nn.Flatten(), nn.Linear(4, 3)
    ).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(SAMPLES, *shape, generator=generator).double() for shape in ((2, 3, 3), (3,)))


def loss_fn(output, batch):
    return (output - batch[1]).square().sum(), len(output)


def plain(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch on full batches."""
    model = network(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = data(step)
        (loss_fn(model(x), (x, y))[0] / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(plan: str, kind: type[nn.Module], size: int = SAMPLES) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    model = parallelize(network(kind), mesh, norm_group=size)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    for number in range(STEPS):
        step(Microbatches.of_rows(data(number), mesh.plan, mesh.data.rank))
    return weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def trained_all(plan: str) -> dict[str, dict[str, torch.Tensor] | str]:
    found = {}
    for kind in [*SUPPORTED, *REFUSED]:
        try:
            found[kind.__name__] = trained(plan, kind)
        except ModelError as error:
            found[kind.__name__] = str(error)
    return found


def check(plan: str, found: dict[str, dict[str, torch.Tensor] | str]) -> None:
    for kind in SUPPORTED:
        expected = plain(kind)
        assert isinstance(found[kind.__name__], dict), (plan, found[kind.__name__])
        for name, value in found[kind.__name__].items():
            torch.testing.assert_close(
                value, expected[name].to(value), rtol=1e-10, atol=1e-10, msg=f"{plan} {kind.__name__} {name}"
            )
    for kind, message in REFUSED.items():
        assert message in str(found[kind.__name__]), (plan, kind, found[kind.__name__])


def test_norm_subclasses_in_one_process():
    check("one process", trained_all(""))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=3"])
def test_norm_subclasses_with_groups_over_ranks(plan, ranks2):
    for answer in ranks2.run(trained_all, plan):
        check(plan, answer)


def test_subclass_groups_match_a_norm_with_activation():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            return F.silu(self.norm(x.contiguous())) + x

    ours, theirs = (trained("accumulation=2", kind, 4) for kind in (CallsSuper, lambda _: Pair()))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name.replace("1.norm", "1")], value, rtol=1e-12, atol=1e-12)


def test_evaluation_is_unchanged_and_lazy_norm_is_rejected():
    mesh = build_mesh(Plan.parse("precision=fp64"))
    model = network(WithActivation)
    expected = copy.deepcopy(model).eval()(data(0)[0])
    torch.testing.assert_close(parallelize(model, mesh, norm_group=4).eval()(data(0)[0]), expected)
    with pytest.raises(ModelError, match="weight belongs to a lazy module"):
        parallelize(nn.Sequential(nn.LazyBatchNorm2d()), mesh, norm_group=4)
