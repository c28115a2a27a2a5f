"""Models with Python code in backward and other research code, on samples of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

D, TOKENS, SAMPLES = 8, 6, 8
#: (gradient of the output, input) -> gradient of the input.
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def squares(output, batch):
    return (output - batch[1]).square().sum(), output[..., 0].numel()


class Block(nn.Module):
    def __init__(self, middle: nn.Module | None = None, up: nn.Module | None = None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), up or nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.middle = middle or nn.GELU()

    def forward(self, x):
        return x + self.down(self.middle(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, after: nn.Module | None = None):
        super().__init__()
        self.stem, self.blocks = nn.Linear(D, D), nn.ModuleList([block(), block()])
        self.after, self.head = after or nn.Identity(), nn.Linear(D, D)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.after(h))


class By(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def function_of(backward: Backward, forward: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, *grads):
            return backward(grads[0], ctx.saved_tensors[0])

    return Own


def after(backward: Backward) -> Callable[[], nn.Module]:
    return lambda: Net(after=By(function_of(backward).apply))


def in_blocks(backward: Backward, forward: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> Callable[[], nn.Module]:
    return lambda: Net(lambda: Block(By(function_of(backward, forward).apply)))


def by_norm(grad, x=None):
    return grad / grad.norm()


def clipped(grad, x=None):
    return grad * (1e-3 / grad.norm(dim=-1, keepdim=True).clamp(min=1e-9)).clamp(max=1)


def largest(grad, x=None):
    return grad * (grad.abs() >= grad.abs().flatten().kthvalue(grad.numel() // 2).values)


class Hooked(nn.Module):
    """Register a hook on a tensor, or on its autograd node."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor], *, guarded: bool = True, node: bool = False):
        super().__init__()
        self.hook, self.guarded, self.node = hook, guarded, node

    def forward(self, x):
        x = x * 1.0
        if x.grad_fn is not None and self.node:
            x.grad_fn.register_prehook(lambda grads: tuple(map(self.hook, grads)))
        elif x.requires_grad or not self.guarded:
            x.register_hook(self.hook)
        return x


class Checkpointed(nn.Module):
    def __init__(self, backward: Backward, *, reentrant: bool):
        super().__init__()
        self.layer, self.reentrant, self.function = nn.Linear(D, D), reentrant, function_of(backward)

    def forward(self, x):
        return checkpoint(lambda y: self.function.apply(self.layer(y)), x, use_reentrant=self.reentrant)


def with_module_hook(change: Callable[[torch.Tensor], torch.Tensor], *, before: bool = False):
    def build() -> nn.Module:
        model = Net()
        if before:
            model.blocks[1].register_full_backward_pre_hook(lambda module, grads: tuple(map(change, grads)))
        else:
            model.blocks[1].register_full_backward_hook(lambda module, grads, _: tuple(map(change, grads)))
        return model

    return build


def with_parameter_hook(change: Callable[[torch.Tensor], torch.Tensor]):
    def build() -> nn.Module:
        model = Net()
        model.blocks[1].up.weight.register_hook(change)
        return model

    return build


def with_late_hook() -> nn.Module:
    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model = Net()
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(halve)
    return model


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def operation(name: str, backward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    found = torch.library.custom_op(f"weft_tests::{name}", _copy, mutates_args=())
    found.register_fake(torch.empty_like)
    found.register_autograd(lambda ctx, grad: backward(grad))
    return found


scaled_op, normed_op = operation("scaled", lambda grad: 0.5 * grad), operation("normed", by_norm)


@dataclass(frozen=True)
class Kind:
    """said: part of the warning or error. where: another part."""

    build: Callable[[], nn.Module]
    said: str = ""
    where: str = "backward of Own"
    loss: Callable[[Any, Any], tuple[torch.Tensor, Any]] = squares


def normed_loss(output, batch):
    return squares(function_of(by_norm).apply(output), batch)


NOT_LINEAR, COMBINES, HOOK = "not proportional", "combines the gradients of several samples", "a hook of"

#: Gradients that depend on the plan, or on the scale of the loss.
DEPENDENT: dict[str, Kind] = {
    "normalized": Kind(after(by_norm), NOT_LINEAR),
    "normalized by token": Kind(after(lambda g, x: g / (g.norm(dim=-1, keepdim=True) + 1e-12)), NOT_LINEAR),
    "clipped by token": Kind(in_blocks(clipped), NOT_LINEAR),
    "clipped tensor": Kind(after(lambda g, x: g * min(1.0, 1e-2 / float(g.norm()))), NOT_LINEAR),
    "clipped values": Kind(after(lambda g, x: g.clamp(-1e-3, 1e-3)), NOT_LINEAR),
    "clipped later": Kind(after(lambda g, x: g.clamp(-10, 10)), NOT_LINEAR),
    "sign": Kind(after(lambda g, x: g.sign()), NOT_LINEAR),
    "squared": Kind(after(lambda g, x: g * g.abs()), NOT_LINEAR),
    "penalty": Kind(after(lambda g, x: g + 0.01 * x), NOT_LINEAR),
    "noise by gradient": Kind(after(lambda g, x: g + 0.1 * g.abs() * torch.randn_like(g)), NOT_LINEAR),
    "noise": Kind(after(lambda g, x: g + 1e-3 * torch.randn_like(g)), NOT_LINEAR),
    "8 bits": Kind(after(lambda g, x: (g / g.abs().max() * 127).round() * g.abs().max()), COMBINES),
    "largest half": Kind(after(largest), COMBINES),
    "centred": Kind(after(lambda g, x: g - g.mean(0)), COMBINES),
    "by size": Kind(after(lambda g, x: g / len(g)), COMBINES),
    "in a checkpoint": Kind(lambda: Net(after=Checkpointed(by_norm, reentrant=False)), NOT_LINEAR),
    "in a reentrant checkpoint": Kind(lambda: Net(after=Checkpointed(by_norm, reentrant=True)), NOT_LINEAR),
    "operation": Kind(lambda: Net(after=By(normed_op)), NOT_LINEAR, "weft_tests_normed"),
    "in the loss": Kind(Net, NOT_LINEAR, loss=normed_loss),
    "hook of a tensor": Kind(lambda: Net(after=Hooked(by_norm)), NOT_LINEAR, "hook by_norm of a tensor"),
    "hook without a condition": Kind(lambda: Net(after=Hooked(by_norm, guarded=False)), NOT_LINEAR, "hook by_norm"),
    "hook of a node": Kind(lambda: Net(after=Hooked(by_norm, node=True)), NOT_LINEAR, "hook that after registers"),
    "hook of a module": Kind(with_module_hook(by_norm), NOT_LINEAR, "backward hook of blocks.1"),
    "hook before a module": Kind(with_module_hook(torch.sign, before=True), NOT_LINEAR, "backward hook of blocks.1"),
    "hook of a parameter": Kind(with_parameter_hook(lambda g: g.clamp(-1e-3, 1e-3)), "a hook", "blocks.1.up.weight"),
    "hook after accumulation": Kind(with_late_hook, "hook", "parameter blocks.1.up.weight"),
}


#: Gradients that mix features between two layers. They are correct without tensor parallelism and with one microbatch.
FEATURES: dict[str, Kind] = {
    "centred features": Kind(in_blocks(lambda g, x: g - g.mean(-1, keepdim=True))),
    "features in 8 bits": Kind(in_blocks(lambda g, x: (g / g.abs().max() * 128).round() * g.abs().max())),
    "largest features": Kind(in_blocks(largest)),
    "by number of features": Kind(in_blocks(lambda g, x: g / g.shape[-1])),
    "hook of features": Kind(lambda: Net(lambda: Block(Hooked(lambda g: g - g.flip(-1))))),
}


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), grad.flatten(0, -2).sum(0)


class OwnLinear(nn.Linear):
    def forward(self, input):
        return Linear.apply(input, self.weight, self.bias)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * scale, x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.scale + 2 * ctx.saved_tensors[0] * grads[1], None


class Recomputed(Block):
    def __init__(self, *, reentrant: bool = False, nested: bool = False):
        super().__init__()
        self.reentrant, self.nested = reentrant, nested

    def _inner(self, x):
        return self.middle(self.up(x))

    def _outer(self, x):
        h = self.norm(x)
        return x + self.down(checkpoint(self._inner, h, use_reentrant=False) if self.nested else self._inner(h))

    def forward(self, x):
        return checkpoint(self._outer, x, use_reentrant=self.reentrant)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def symmetric() -> nn.Module:
    model = Net(after=nn.Linear(D, D))
    parametrize.register_parametrization(model.after, "weight", Symmetric())
    return model


class Called(Net):
    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = torch.func.functional_call(block, {k: v * 1.01 for k, v in block.named_parameters()}, (h,))
        return self.head(h)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D, D) * 0.1)

    def forward(self, x):
        return x + torch.func.vmap(lambda weight: x @ weight)(self.weight).mean(0)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, 2) * 0.1)

    def forward(self, x):
        return x + (x.to(torch.complex128) @ torch.view_as_complex(self.weight)).abs()


class InPlace(Block):
    def forward(self, x):
        y = self.up(self.norm(x))
        y.mul_(0.5)
        y[..., 0] = 0
        return x + self.down(y.relu_())


class Fast(nn.Module):
    """Take a gradient step on an inner loss of each sample."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(D) * 0.5)

    def forward(self, x):
        inner = torch.func.grad(lambda weight, row: (row @ weight - row).square().sum())
        return torch.bmm(x, self.weight - 0.01 * torch.func.vmap(inner, (None, 0))(self.weight, x))


class Twice(Net):
    def forward(self, x):
        with torch.no_grad():
            target = self.blocks[0](self.stem(x))
        return super().forward(x) - super().forward(x.flip(1)) + target


class Exits(Net):
    def __init__(self):
        super().__init__()
        self.exits = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        h, outputs = self.stem(x), []
        for block, exit in zip(self.blocks, self.exits, strict=True):
            h = block(h)
            outputs.append(exit(h))
        return [*outputs, self.head(h)]


def of_exits(output, batch):
    return sum(squares(one, batch)[0] for one in output), output[0][..., 0].numel()


class Generated(nn.Module):
    """Compute the weight of a layer from each sample."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(D, D * D)

    def forward(self, x):
        return x + torch.bmm(x, self.make(x.mean(1)).view(-1, D, D) * 0.1)


class Parameters(Block):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterList(torch.randn(D) * 0.1 for _ in range(2))
        self.scales = nn.ParameterDict({"one": torch.ones(D)})

    def forward(self, x):
        return super().forward(x) * self.scales["one"] + sum(shift * x for shift in self.shifts)


class Force(Net):
    """Return the gradient of an energy with respect to the input."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Normalizes(Net):
    """Write to a weight in forward. by_data: through `.data`."""

    def __init__(self, *, by_data: bool):
        super().__init__()
        self.by_data = by_data

    def forward(self, x):
        weight = self.blocks[1].up.weight if not self.by_data else self.head.weight
        if self.by_data:
            weight.data = weight.data.clamp(-0.2, 0.2)
        else:
            with torch.no_grad():
                weight.div_(weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class NormalizesItself(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


#: Operations that forward does not support under zero=3.
SHARDED: dict[str, Kind] = {
    "force": Kind(Force, "zero=3: forward computes a gradient through", "Use zero=2"),
    "normalized weight": Kind(lambda: Net(NormalizesItself), "blocks.0.up.weight: forward writes to it", "zero=2"),
    "normalized weight from outside": Kind(lambda: Normalizes(by_data=False), "up.weight", "zero=3"),
    "other data": Kind(lambda: Normalizes(by_data=True), "head.weight: forward writes to it", "zero=2"),
}


def hooked_forward() -> nn.Module:
    model = Net()
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 1.1)
    model.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    return model


#: Code with equal results under every plan that accepts it.
LEGAL: dict[str, Kind] = {
    "reversed": Kind(after(lambda g, x: -0.3 * g)),
    "masked by input": Kind(in_blocks(lambda g, x: g * (x.abs() < 1))),
    "guided": Kind(in_blocks(lambda g, x: g.clamp(min=0) * (x > 0), F.relu)),
    "straight through": Kind(in_blocks(lambda g, x: g, lambda x: (x * 8).round() / 8)),
    "own linear": Kind(lambda: Net(lambda: Block(up=OwnLinear(D, 2 * D)))),
    "two outputs": Kind(lambda: Net(lambda: Block(By(lambda x: sum(TwoOutputs.apply(x, 0.5)))))),
    "own operation": Kind(lambda: Net(after=By(scaled_op))),
    "module hook that scales": Kind(with_module_hook(lambda g: 0.5 * g)),
    "tensor hook that scales": Kind(lambda: Net(after=Hooked(lambda g: 0.5 * g, guarded=False))),
    "recomputed": Kind(lambda: Net(lambda: Recomputed(nested=True))),
    "recomputed reentrantly": Kind(lambda: Net(lambda: Recomputed(reentrant=True))),
    "symmetric": Kind(symmetric),
    "weight norm": Kind(lambda: Net(lambda: Block(up=parametrizations.weight_norm(nn.Linear(D, 2 * D))))),
    "orthogonal": Kind(lambda: Net(after=parametrizations.orthogonal(nn.Linear(D, D)))),
    "functional call": Kind(Called),
    "ensemble": Kind(lambda: Net(after=Ensemble())),
    "complex": Kind(lambda: Net(after=Spectral())),
    "in place": Kind(lambda: Net(InPlace)),
    "fast weights": Kind(lambda: Net(after=Fast())),
    "twice": Kind(Twice),
    "exits": Kind(Exits, loss=of_exits),
    "generated weights": Kind(lambda: Net(after=Generated())),
    "lists of parameters": Kind(lambda: Net(Parameters)),
    "forward hooks": Kind(hooked_forward),
}
