"""Custom autograd functions and backward hooks: equal to plain PyTorch, reported by a warning, or rejected."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tests.train.gradient_kinds import (
    DEPENDENT,
    FEATURES,
    LEGAL,
    NOT_LINEAR,
    SAMPLES,
    SHARDED,
    TOKENS,
    D,
    Kind,
    Net,
    after,
    by_norm,
    in_blocks,
)
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError, WeftWarning
from weft.parallel.state.gradients import data_parallel
from weft.train.script.script_run import Run
from weft.verify.rank_pool import RankPool

LR = 0.05


@dataclass
class Trained:
    """Losses and weights of two steps, warnings, and the error."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    refused: str = ""

    def differs(self, other: Trained) -> bool:
        return not all(abs(a - b) <= 1e-9 * abs(a) for a, b in zip(self.losses, other.losses, strict=True)) or not all(
            torch.allclose(self.weights[name], one, rtol=1e-8, atol=1e-10) for name, one in other.weights.items()
        )


def batch(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(SAMPLES, TOKENS, D, generator=generator).double() for _ in range(2))


def built(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.build().double()


def train(plan: str, kind: Kind, steps: int = 2) -> Trained:
    parsed, found = Plan.parse(f"{plan} precision=fp64"), Trained()
    run = Run(parsed, build_mesh(parsed), Ledger(), 0)
    size, rank = SAMPLES // run.mesh.data.size, run.mesh.data.rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = run.parallelize(built(kind), example=batch(0)[0])
            step = run.train_step(model, torch.optim.SGD, kind.loss, lr=LR)
            for number in range(steps):
                own = tuple(one[rank * size : (rank + 1) * size] for one in batch(number))
                found.losses.append(step(own).loss)
        except WeftError as error:
            return Trained(refused=str(error))
    found.weights = {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}
    found.said = [str(one.message) for one in caught if issubclass(one.category, WeftWarning)]
    return found


def train_some(plan: str, names: list[str]) -> dict[str, Trained]:
    return {name: train(plan, KINDS[name]) for name in names}


def train_all(ranks: RankPool, plan: str, every: list[str]) -> dict[str, list[Trained]]:
    """Return the results of all ranks by name. Each call has few names because it may take two minutes at most."""
    answers: dict[str, list[Trained]] = {}
    for start in range(0, len(every), 8):
        names = every[start : start + 8]
        for one in ranks.run(train_some, plan, names):
            for name in names:
                answers.setdefault(name, []).append(one[name])
    return answers


def train_without_weft(kind: Kind, steps: int = 2) -> Trained:
    found, model = Trained(), built(kind)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for number in range(steps):
        loss_sum, count = kind.loss(model(batch(number)[0]), batch(number))
        (loss_sum / count).backward()
        found.losses.append(float(loss_sum.detach() / count))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return found


def check(plan: str, name: str, answers: list[Trained]) -> None:
    kind, refused = KINDS[name], [one.refused for one in answers if one.refused]
    said = [text for one in answers for text in one.said]
    if name in DEPENDENT:
        assert any(kind.said in text and kind.where in text for text in said + refused), (plan, name, said, refused)
        assert len(said) <= 1, (plan, name, said)
        return
    assert said == [], (plan, name, said)
    assert not refused, (plan, name, refused)
    expected = train_without_weft(kind)
    assert not any(expected.differs(one) for one in answers), (plan, name, expected.losses, answers[0].losses)


class Uneven(Net):
    """Call the head once more for one sample. Only the check of two samples has that sample first in a batch."""

    def forward(self, x):
        again = any(bool(x[0, 0, 0] == batch(step)[0][6, 0, 0]) for step in range(2))
        return self.head(super().forward(x)) if again else super().forward(x)


EVERY = [*DEPENDENT, *LEGAL]
KINDS = DEPENDENT | LEGAL | FEATURES


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        ("dp_replicate=2 accumulation=2", 1),
        ("dp_shard=2 zero=3", 4),
        pytest.param("dp_shard=2 zero=3", 1, marks=pytest.mark.full),
    ],
)
def test_two_ranks_match_or_report(plan, every, ranks2):
    for name, answers in train_all(ranks2, plan, EVERY[1::every] if every > 1 else EVERY).items():
        check(plan, name, answers)


#: Operations of torch.library, which cannot be copied: a pipeline rejects models with one.
NOT_COPIED = ("operation", "own operation")


def check_stages(ranks, plan, names):
    for name, answers in train_all(ranks, plan, [one for one in names if one not in NOT_COPIED]).items():
        check(plan, name, answers)


def test_two_stages_match_or_report(ranks2):
    check_stages(ranks2, "pp=2 microbatches=2", EVERY[::4])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=4", "pp=2 microbatches=4 schedule=zb_h1 zero=2 recompute=full"])
def test_stages_under_every_schedule(plan, ranks2):
    check_stages(ranks2, plan, EVERY)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3 recompute=full", "dp_shard=2 zero=1"])
def test_other_plans_match_or_report(plan, ranks2):
    for name, answers in train_all(ranks2, plan, EVERY).items():
        check(plan, name, answers)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sp=on"])
def test_gradients_are_equal_or_rejected_under_tensor_parallelism(plan, ranks2):
    """The batch is not split, so functions that mix samples are correct."""
    for name, answers in train_all(ranks2, plan, EVERY).items():
        if not any(one.refused or NOT_LINEAR in "".join(one.said) for one in answers):
            expected = train_without_weft(KINDS[name])
            assert not any(expected.differs(one) for one in answers), name


def test_functions_that_mix_features_are_not_sharded(ranks2):
    for plan in ("tp=2", "tp=2 sp=on"):
        for name, answers in train_all(ranks2, plan, [*FEATURES]).items():
            assert all("nothing in Net can be sharded" in one.refused for one in answers), (plan, name, answers[0])


def test_unsupported_forward_operations_are_rejected_under_zero3(ranks2):
    for answers in ranks2.run(train_sharded, "dp_shard=2 zero=3"):
        for name, kind in SHARDED.items():
            refused = answers[name].refused
            assert kind.said in refused, (name, answers[name])
            assert kind.where in refused, (name, answers[name])
    expected = train_without_weft(SHARDED["force"])
    assert not any(one.said or expected.differs(one) for one in ranks2.run(train_force, "dp_shard=2 zero=2"))


def train_sharded(plan: str) -> dict[str, Trained]:
    return {name: train(plan, kind) for name, kind in SHARDED.items()}


def train_force(plan: str) -> Trained:
    return train(plan, SHARDED["force"])


def test_rank_with_more_unit_calls_in_the_check_does_not_block(ranks2):
    found = ranks2.run(train_uneven, "dp_shard=2 zero=3")
    expected = train_without_weft(Kind(Uneven))
    assert not any(one.refused or expected.differs(one) for one in found), found


def train_uneven(plan: str) -> Trained:
    return train(plan, Kind(Uneven))


def test_one_process_reports_scale_dependence():
    """The loss scale differs from plain PyTorch, and the batch is not split."""
    for name in ("normalized", "centred", "reversed", "hook of a tensor"):
        kind, [found] = KINDS[name], [train("", KINDS[name])]
        if kind.said == NOT_LINEAR:
            assert any(NOT_LINEAR in text for text in found.said), (name, found.said)
        else:
            assert found.said == [], (name, found.said)
            assert not train_without_weft(kind).differs(found), name


def test_microbatches_of_one_sample():
    for name in ("normalized", "centred", "largest half", "own linear"):
        kind = KINDS[name]
        found = train("accumulation=8", kind)
        assert [kind.said in text for text in found.said] == [True] * (name in DEPENDENT), (name, found.said)


@pytest.mark.full
def test_compiled_blocks():
    found = train("accumulation=2 compile=on", Kind(in_blocks(by_norm)), steps=1)
    assert any(NOT_LINEAR in text for text in found.said), found.said


def test_models_without_custom_code_run_no_extra_passes():
    calls = []

    class Counted(nn.Linear):
        def forward(self, input):
            calls.append(torch.is_grad_enabled())
            return super().forward(input)

    assert not train("accumulation=2", Kind(lambda: Counted(D, D)), steps=1).said
    assert calls.count(True) == 2, calls


def test_check_restores_all_state():
    kept = {}
    for checks in (False, True):
        run = Run(plan := Plan.parse("accumulation=2 precision=fp64"), build_mesh(plan), Ledger(), 0)
        model = run.parallelize(nn.Sequential(nn.Dropout(0.5), built(Kind(after(by_norm)))))
        step = run.train_step(model, torch.optim.SGD, Kind(after(by_norm)).loss, lr=LR, check_batch=checks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeftWarning)
            metrics = [step(batch(number)) for number in range(2)]
        numbers = [(one.loss, one.grad_norm) for one in metrics]
        kept[checks] = numbers, torch.get_rng_state().tolist(), [one.tolist() for one in model.state_dict().values()]
    assert kept[False] == kept[True]
