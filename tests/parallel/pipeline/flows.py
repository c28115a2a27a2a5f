"""Models with different block containers and data flows between blocks, for pipelines and one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.errors import ModelError, PlanError
from weft.verify.parity import train_case

VOCAB, DIM, SEQ, BATCH = 11, 8, 4, 4
DEPTH = 4


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Inner(Block):
    """A block without the residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, norm and head. Subclasses define the data flow."""

    kind: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.add_blocks([self.kind() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def add_blocks(self, blocks: list[nn.Module]) -> None:
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.norm(self.run(self.emb(ids), ids)))

    def run(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class State:
    """A block's input and output in one object."""

    x: torch.Tensor
    depth: int = 0


FLOWS: dict[str, type[Model]] = {}


def flow(kind: type[Model]) -> type[Model]:
    """Register a model that a pipeline must run."""
    FLOWS[kind.__name__] = kind
    return kind


REFUSED: dict[str, tuple[type[Model], str]] = {}


def refused(match: str) -> Callable[[type[Model]], type[Model]]:
    """Register a model that a pipeline must refuse, with a part of the reason."""

    def register(kind: type[Model]) -> type[Model]:
        REFUSED[kind.__name__] = kind, match
        return kind

    return register


# Containers.
@flow
class InList(Model): ...


@flow
class InDict(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})

    def run(self, x, ids):
        for block in self.blocks.values():
            x = block(x)
        return x


@flow
class InNamedDict(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleDict(dict(zip("abcd", blocks, strict=True)))

    def run(self, x, ids):
        for name in "abcd":
            x = self.blocks[name](x)
        return x


@flow
class NumberedAttributes(Model):
    def add_blocks(self, blocks):
        for number, block in enumerate(blocks):
            setattr(self, f"layer{number}", block)

    def run(self, x, ids):
        return self.layer3(self.layer2(self.layer1(self.layer0(x))))


@flow
class NamedAttributes(Model):
    def add_blocks(self, blocks):
        self.first, self.second, self.third, self.fourth = blocks

    def run(self, x, ids):
        return self.fourth(self.third(self.second(self.first(x))))


@flow
class PythonList(Model):
    def add_blocks(self, blocks):
        self.layers = []
        for number, block in enumerate(blocks):
            self.add_module(f"part_{number}", block)
            self.layers.append(block)

    def run(self, x, ids):
        for number in range(DEPTH):
            x = getattr(self, f"part_{number}")(x)
        return x


@flow
class InSequential(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.Sequential(*blocks)

    def run(self, x, ids):
        return self.blocks(x)


@flow
class SequentialOfSequentials(InSequential):
    def add_blocks(self, blocks):
        self.blocks = nn.Sequential(nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:]))


@flow
class ListsOfParts(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(DIM), Inner()]) for _ in blocks)

    def run(self, x, ids):
        for norm, part in self.blocks:
            x = x + part(norm(x))
        return x


@flow
class DictsOfParts(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(DIM), "one": Inner(), "two": Inner()}) for _ in blocks
        )

    def run(self, x, ids):
        for parts in self.blocks:
            x = x + parts["one"](parts["norm"](x))
            x = parts["two"](x) + x
        return x


@flow
class TwoLists(Model):
    def add_blocks(self, blocks):
        self.low, self.high = nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])

    def run(self, x, ids):
        for block in [*self.low, *self.high]:
            x = block(x)
        return x


@flow
class RegisteredBackwards(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList(blocks)

    def run(self, x, ids):
        for block in reversed(self.blocks):
            x = block(x)
        return x


@flow
class PartsOfBlocksCalled(Model):
    def run(self, x, ids):
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return x


# Weights and modules outside the blocks.
@flow
class Positions(Model):
    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, SEQ, DIM))
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))

    def run(self, x, ids):
        x = torch.cat([self.cls.expand(len(x), -1, -1), (x + self.pos)[:, 1:]], 1)
        return super().run(x, ids)


@flow
class PositionsUsedAgain(Positions):
    def run(self, x, ids):
        return super().run(x, ids) * 0.5 + self.pos


@flow
class Scales(Model):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(DIM)) for _ in range(DEPTH)])

    def run(self, x, ids):
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return x


@flow
class NormFirst(Model):
    def __init__(self):
        super().__init__()
        norm = self.norm
        del self.norm
        blocks = self.blocks
        del self.blocks
        self.norm, self.blocks = norm, blocks


@flow
class NormOnBothSides(Model):
    def run(self, x, ids):
        return super().run(self.norm(x), ids)


@flow
class TiedByWeight(Model):
    def forward(self, ids):
        return F.linear(self.norm(self.run(self.emb(ids), ids)), self.emb.weight)


@flow
class TiedHead(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.emb.weight


@flow
class NormBetween(Model):
    def __init__(self):
        super().__init__()
        self.middle = nn.LayerNorm(DIM)

    def run(self, x, ids):
        for number, block in enumerate(self.blocks):
            x = block(self.middle(x) if number == 2 else x)
        return x


@flow
class SharedBlocks(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList([blocks[0], blocks[1], blocks[0], blocks[1]])


class AroundShared(Inner):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return x + self.down(self.shared(self.up(x)[..., :DIM]).repeat(1, 1, 2))


@flow
class SharedInside(Model):
    def add_blocks(self, blocks):
        shared = Block()
        self.blocks = nn.ModuleList([AroundShared(shared), blocks[1], AroundShared(shared), blocks[3]])


@flow
class SharedWeight(Model):
    def add_blocks(self, blocks):
        blocks[3].up.weight = blocks[0].up.weight
        self.blocks = nn.ModuleList(blocks)


# Values.
@flow
class Residual(Model):
    kind = Inner

    def run(self, x, ids):
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return x


@flow
class Skip(Model):
    def run(self, x, ids):
        return super().run(x, ids) + x


@flow
class DetachedSkip(Model):
    def run(self, x, ids):
        return super().run(x, ids) + (2 * x).detach()


@flow
class DataSkip(Model):
    def run(self, x, ids):
        return super().run(x, ids) + x.data


@flow
class NoGradSkip(Model):
    def run(self, x, ids):
        with torch.no_grad():
            first = torch.sin(x)
        return super().run(x, ids) * first


@flow
class UNet(Model):
    def __init__(self):
        super().__init__()
        self.joins = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))

    def run(self, x, ids):
        skips = []
        for block in self.blocks[:2]:
            x = block(x)
            skips.append(x)
        for join, block in zip(self.joins, self.blocks[2:], strict=True):
            x = block(join(torch.cat([x, skips.pop()], -1)))
        return x


@flow
class AllStates(Model):
    def run(self, x, ids):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return torch.stack(states).mean(0)


@flow
class FrozenTeacher(Model):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def run(self, x, ids):
        with torch.no_grad():
            y = x
            for block in self.teacher:
                y = block(y)
        return super().run(x, ids) - 0.1 * y


class WithFirst(Inner):
    def forward(self, x, first):
        return x + super().forward(x + first)


@flow
class ValueResidual(Model):
    kind = WithFirst

    def run(self, x, ids):
        first = x
        for block in self.blocks:
            x = block(x, first)
        return x


class Several(Inner):
    def forward(self, x, *, gain, mask=None):
        made = super().forward(x) * gain
        return x + (made if mask is None else made * mask), None, made.square().mean()


@flow
class KeywordsAndExtras(Model):
    kind = Several

    def run(self, x, ids):
        mask, total = (ids > 2).to(x.dtype)[..., None], 0
        for block in self.blocks:
            x, _, aux = block(x, gain=0.5, mask=mask)
            total = total + aux
        return x + total


class OfDict(Inner):
    def forward(self, state):
        return {"x": state["x"] + super().forward(state["x"]), "n": state["n"] + 1}


@flow
class Dicts(Model):
    kind = OfDict

    def run(self, x, ids):
        state = {"x": x, "n": 0}
        for block in self.blocks:
            state = block(state)
        return state["x"] * state["n"]


class OfState(Inner):
    def forward(self, state):
        return State(state.x + super().forward(state.x), state.depth + 1)


@flow
class Dataclasses(Model):
    kind = OfState

    def run(self, x, ids):
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.x


class OfTuple(Inner):
    def forward(self, pair):
        x, other = pair
        return x + super().forward(other), x


@flow
class Tuples(Model):
    kind = OfTuple

    def run(self, x, ids):
        pair = x, x
        for block in self.blocks:
            pair = block(pair)
        return pair[0] + pair[1]


class SetsAux(Inner):
    def forward(self, x):
        made = super().forward(x)
        self.aux = made.square().mean()
        return x + made


@flow
class AuxAttribute(Model):
    kind = SetsAux

    def run(self, x, ids):
        x = super().run(x, ids)
        return x + sum(block.aux for block in self.blocks)


@flow
class EncoderDecoder(Model):
    def __init__(self):
        super().__init__()
        self.target_emb = nn.Embedding(VOCAB, DIM)
        self.decoder = nn.ModuleList(WithFirst() for _ in range(3))

    def run(self, x, ids):
        memory = super().run(x, ids)
        y = self.target_emb(ids.flip(1))
        for block in self.decoder:
            y = block(y, memory)
        return y


@flow
class DataBranch(Model):
    def run(self, x, ids):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2 == 0 and int(ids.sum()) >= 0:
                x = x * 0.9
        return x


@flow
class TwiceInARow(Model):
    def run(self, x, ids):
        for block in self.blocks:
            x = block(block(x))
        return x


@flow
class CausalMask(Model):
    kind = WithFirst

    def run(self, x, ids):
        mask = torch.full((x.shape[1], x.shape[1]), 0.5, dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, mask.sum(1)[:, None].type_as(x) * torch.ones_like(x[0]))
        return x


@flow
class IsInstance(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList([*blocks[:2], WithFirst(), blocks[3]])

    def run(self, x, ids):
        first = x
        for block in self.blocks:
            x = block(x, first) if isinstance(block, WithFirst) else block(x)
        return x


@flow
class UnequalWidths(Model):
    def add_blocks(self, blocks):
        self.blocks = nn.ModuleList([Block(), nn.Linear(DIM, 6), Block(6), nn.Linear(6, DIM)])


@flow
class ListOutput(Model):
    def forward(self, ids):
        x = self.emb(ids)
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.head(self.norm(x)) + self.head(self.norm(states[0]))


@flow
class Counting(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def run(self, x, ids):
        self.steps += 1
        return super().run(x, ids)


# Not supported by a pipeline.
@refused("computed again on stage")
class TwiceAround(Model):
    def run(self, x, ids):
        return super().run(super().run(x, ids), ids)


@refused("calls item|calls __bool__|calls __float__|calls gt|calls bool")
class EarlyExit(Model):
    def run(self, x, ids):
        for block in self.blocks:
            x = block(x)
            if x.abs().mean() > 1e9:
                break
        return x


@refused("random numbers")
class Noise(Model):
    def run(self, x, ids):
        return super().run(x + torch.randn(x.shape, dtype=x.dtype), ids)


@refused("random numbers")
class LayerDrop(Model):
    def run(self, x, ids):
        for block in self.blocks:
            if torch.rand(()) < 2:
                x = block(x)
        return x


class Appends(Inner):
    def forward(self, x, losses):
        made = super().forward(x)
        losses.append(made.square().mean())
        return x + made


@refused("in place")
class LossList(Model):
    kind = Appends

    def run(self, x, ids):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


_LOSSES: list[torch.Tensor] = []


class AppendsOutside(Inner):
    def forward(self, x):
        made = super().forward(x)
        _LOSSES.append(made.square().mean())
        return x + made


@refused("leaves a tensor outside")
class GlobalList(Model):
    kind = AppendsOutside

    def run(self, x, ids):
        _LOSSES.clear()
        x = super().run(x, ids)
        return x + sum(_LOSSES)


@refused("leaves a tensor outside")
class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.kept = []
        kept = self.kept
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: kept.append(output.mean()))

    def run(self, x, ids):
        self.kept.clear()
        return super().run(x, ids)


@refused("writes a value|in place")
class Written(Model):
    def run(self, x, ids):
        kept = torch.zeros(x.shape, dtype=x.dtype)
        for block in self.blocks:
            x = block(x)
            kept[:] = kept + x.detach()
        return x + kept


class ModifiesInput(Inner):
    def forward(self, x):
        x.mul_(0.5)
        return x + super().forward(x)


@refused("changes one of its arguments")
class ChangesArgument(Model):
    kind = ModifiesInput


@refused("weight of")
class WeightPenalty(Model):
    def run(self, x, ids):
        x = super().run(x, ids)
        return x + sum(block.up.weight.square().sum() for block in self.blocks)


class Counts(Inner):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + super().forward(x)


@refused("changes when it runs")
class ReadsCounter(Model):
    kind = Counts

    def run(self, x, ids):
        x = super().run(x, ids)
        return x * sum(block.calls for block in self.blocks)


def build(kind: type[Model]) -> Model:
    torch.manual_seed(1)
    return kind().double()


def batch_of(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class FlowCase:
    """A model of this file as a parity case."""

    name: str
    num_steps: int = 2
    max_grad_norm: float = 1.0
    global_batch: int = 8

    def model(self) -> nn.Module:
        return build(FLOWS[self.name] if self.name in FLOWS else REFUSED[self.name][0])

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.randint(VOCAB, (self.global_batch, SEQ), generator=torch.Generator().manual_seed(step))}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["ids"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        labels = batch["ids"].roll(-1, 1)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def train_flows(plan: str, names: list[str]) -> dict[str, Any]:
    """Train models of this file. Return the numbers of each, or the text of its refusal."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = train_case(f"{plan} precision=fp64", FlowCase(name))
        except (ModelError, PlanError) as error:
            found[name] = str(error)
    return found
