"""The first step warns of or rejects models whose results depend on how a batch is split, and accepts others."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.lean import compiled_by
from tests.train.batch_kinds import (
    DEPENDENT,
    MOVES,
    NOISE,
    ORDINARY,
    CallCounter,
    Counter,
    D,
    Fixed,
    Net,
    Renormed,
    squares,
)
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.train.script.script_run import Run

SAMPLES = 8


def batch(step: int, count: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(count, D, generator=generator).double() for _ in range(2))


def start(plan: str) -> Run:
    parsed = Plan.parse(f"{plan} precision=fp64")
    return Run(parsed, build_mesh(parsed), Ledger(), 0)


def messages_of(run: Run, build, loss=squares, steps: int = 2, **options) -> list[str]:
    """Return the warnings of two steps, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = run.parallelize(build().double())
            step = run.train_step(model, torch.optim.SGD, loss, lr=0.01, **options)
            size, rank = SAMPLES // run.mesh.data.size, run.mesh.data.rank
            for number in range(steps):
                step(tuple(one[rank * size : (rank + 1) * size] for one in batch(number)))
        except ModelError as error:
            return [str(error)]
    return [str(one.message) for one in caught if one.category is WeftWarning]


def messages_by_name(plan: str, names: list[str]) -> dict[str, list[str]]:
    run = start(plan)
    return {
        name: messages_of(run, DEPENDENT[name].build, DEPENDENT[name].loss) if name in DEPENDENT else
        messages_of(run, *ORDINARY[name.removeprefix("ordinary ")])
        for name in names
    }  # fmt: skip


EVERY = [*DEPENDENT, *(f"ordinary {name}" for name in ORDINARY)]


def check(plan: str, found: dict[str, list[str]]) -> None:
    for name, said in found.items():
        if name not in DEPENDENT:
            assert said == [], (plan, name, said)
            continue
        kind = DEPENDENT[name]
        assert any(kind.said in one and kind.where in one for one in said), (plan, name, said)


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        ("dp_replicate=2", 1),
        ("dp_shard=2 zero=3", 4),
        pytest.param("dp_shard=2 zero=3", 1, marks=pytest.mark.full),
        pytest.param("dp_shard=2 zero=2 accumulation=2", 1, marks=pytest.mark.full),
    ],
)
def test_two_ranks_report_batch_dependence(plan, every, ranks2):
    """In the gate, zero=3 runs with every fourth model, because the check is the same under every plan."""
    refused = ["frequencies", "frequencies of a function"]
    first, second = ranks2.run(messages_by_name, plan, EVERY if every == 1 else [*refused, *EVERY[::every]])
    check(plan, first)
    # Only the first rank warns; all ranks refuse.
    assert {name for name, said in second.items() if said} == {"frequencies", "frequencies of a function"}


def test_accumulation_in_one_process_reports_batch_dependence():
    check("accumulation=4", messages_by_name("accumulation=4", EVERY))


def test_one_process_without_split_reports_nothing():
    found = messages_by_name("", EVERY)
    assert not any(found.values()), found


def test_pure_tensor_parallelism_reports_nothing(ranks2):
    names = ["centred", "contrastive", "mean and 1", "ordinary mlp", "ordinary dropout"]
    for answer in ranks2.run(messages_of_tp, names):
        assert not any(answer.values()), answer


def messages_of_tp(names: list[str]) -> dict[str, list[str]]:
    run, found = start("tp=2"), {}
    for name in names:
        build, loss = (DEPENDENT[name].build, DEPENDENT[name].loss) if name in DEPENDENT else ORDINARY[name[9:]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = run.parallelize(build().double())
            run.train_step(model, torch.optim.SGD, loss, lr=0.01)(batch(0))
        found[name] = [str(one.message) for one in caught]
    return found


def test_state_changed_per_forward_is_reported_under_accumulation(ranks2):
    counted = messages_of(start("accumulation=2"), lambda: Net(Counter()))
    assert any("each forward changes between.steps" in said for said in counted), counted
    [said] = messages_of(start("accumulation=2"), lambda: Net(CallCounter()))
    assert "attributes: each forward changes between.calls, and" in said
    assert not any(ranks2.run(messages_of_counter, "dp_replicate=2"))
    [said], _ = ranks2.run(messages_of_renormed, "dp_replicate=2")
    assert "max_norm=0.5: between.table scales rows" in said


def messages_of_counter(plan: str) -> list[str]:
    return [said for kind in (Counter, CallCounter) for said in messages_of(start(plan), lambda kind=kind: Net(kind()))]


def messages_of_renormed(plan: str) -> list[str]:
    return messages_of(start(plan), lambda: Net(Renormed()))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=3"])
def test_model_with_fixed_batch_size_trains(plan, ranks2):
    for said in ranks2.run(messages_of_fixed, plan):
        assert said == []


def messages_of_fixed(plan: str) -> list[str]:
    return messages_of(start(plan), lambda: Net(Fixed(SAMPLES // 2)), steps=3)


class Watched(nn.Module):
    """Model with all the state that the check must not change."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("seen", torch.zeros(D))
        self.calls, self.sizes, self.by_name = 0, [], {}

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.by_name[self.calls] = x
        self.new = self.calls
        self.seen = self.seen + x.sum(0)
        return self.norm(self.layer(x)) + torch.randn_like(x)


def watched(check_batch: bool):
    torch.manual_seed(3)
    run, hooked = start("accumulation=2"), []
    model = run.parallelize(Watched().double(), norm_group=4)
    model.layer.register_forward_hook(lambda *given: hooked.append(1))
    model.norm.register_forward_pre_hook(lambda *given: hooked.append(2))
    step = run.train_step(model, torch.optim.SGD, squares, lr=0.01, check_batch=check_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = [step(batch(number)) for number in range(2)]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = [(one.loss, one.grad_norm) for one in metrics], torch.get_rng_state().tolist()
    return state, numbers, (model.calls, model.sizes, list(model.by_name), model.new, hooked), len(caught)


def test_check_restores_all_state():
    checked, plain = watched(True), watched(False)
    assert checked[3] == 2
    assert plain[3] == 0
    assert checked[1:3] == plain[1:3]
    for name, value in plain[0].items():
        assert torch.equal(checked[0][name], value), name


def test_later_steps_run_no_extra_forwards():
    run, calls = start("accumulation=2"), []

    class Counted(Net):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    step = run.train_step(run.parallelize(Counted(nn.GELU()).double()), torch.optim.SGD, squares, lr=0.01)
    step(batch(0))
    assert calls == [4, 2, 2, 4, 4], calls  # the full batch, two halves, and the step itself
    calls.clear()
    step(batch(1))
    assert calls == [4, 4]


def test_microbatches_of_one_sample():
    run = start("accumulation=8")
    assert any(NOISE in one for one in messages_of(run, DEPENDENT["randn_like"].build))
    assert any("depends on the other" in one for one in messages_of(run, DEPENDENT["centred"].build))
    assert any(MOVES in one for one in messages_of(run, DEPENDENT["running mean"].build))
    for name in ("mlp", "attention", "routed", "dropout"):
        assert messages_of(run, *ORDINARY[name]) == []


def test_float32_and_bfloat16_give_no_false_alarm():
    for precision in ("fp32", "bf16"):
        plan = Plan.parse(f"accumulation=2 precision={precision}")
        run = Run(plan, build_mesh(plan), Ledger(), 0)
        for name in ("mlp", "attention", "routed", "layer norm", "recurrent", "images"):
            build, loss = ORDINARY[name]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step = run.train_step(run.parallelize(build()), torch.optim.SGD, loss, lr=0.01)
                step(tuple(one.float() for one in batch(0)))
        step = run.train_step(run.parallelize(DEPENDENT["centred"].build()), torch.optim.SGD, squares, lr=0.01)
        with pytest.warns(WeftWarning, match="depends on the other samples"):
            step(tuple(one.float() for one in batch(0)))


def test_compiled_blocks():
    run = start("accumulation=2 compile=on")
    with compiled_by("lean"):
        assert messages_of(run, *ORDINARY["mlp"]) == []
        assert any("depends on the other" in one for one in messages_of(run, DEPENDENT["centred"].build))


def test_check_runs_few_samples():
    """The check uses few of many samples, so it costs far less than the step."""

    def rows_of_first_step(check_batch: bool) -> int:
        rows: list[int] = []

        class Counted(nn.Linear):
            def forward(self, input):
                rows.append(len(input))
                return super().forward(input)

        run = start("accumulation=2")
        torch.manual_seed(0)
        model = run.parallelize(nn.Sequential(Counted(16, 16), nn.GELU(), nn.Linear(16, D)).double())
        step = run.train_step(model, torch.optim.SGD, squares, lr=0.01, check_batch=check_batch)
        step((torch.randn(1024, 16).double(), torch.randn(1024, D).double()))
        return sum(rows)

    plain, checked = (rows_of_first_step(how) for how in (False, True))
    assert plain == 1024
    assert 0 < checked - plain < 64
