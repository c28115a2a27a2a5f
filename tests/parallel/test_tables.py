"""Embedding tables of all styles equal one process of plain torch, with any optimizer, plan and checkpoint."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import weft
from tests.choice import gate_runs, product
from tests.parallel.table_cases import (
    Recommender,
    Script,
    TableCase,
    collate,
    loss_fn,
    model,
    reference,
    samples,
    train,
)
from tools.live_memory import LiveTensors
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.verify.rank_pool import RankPool

LIMIT = 1e-10
OPTIMIZERS = ["rowwise_adagrad", "lazy_adamw", "adagrad", "sgd"]
MIXED = "user=rows item=columns genre=replicate seen=one tags=rows"
#: Each style alone, and each pair of styles.
LAYOUTS = [
    MIXED,
    "{user,item,genre,seen,tags}=columns",
    "{user,item,tags}=one {genre,seen}=replicate",
    "{user,seen}=rows {item,genre,tags}=one",
    "{user,seen}=columns {item,genre,tags}=replicate",
    "{user,seen}=one {item,genre,tags}=columns",
    "{user,item,genre,seen,tags}=rows",
    "{user,item,genre,seen,tags}=one",
    "{user,seen}=replicate {item,genre,tags}=rows",
    "{user,seen}=columns {item,genre,tags}=rows",
    "{user,item,genre,seen,tags}=host",
    "{user,seen}=host {item,tags}=columns genre=replicate",
    "{user,seen}=host {item,tags}=rows genre=one",
]
TWO = ["dp_replicate=2", "dp_shard=2 zero=2 accumulation=2", "dp_shard=2 zero=1 accumulation=5"]
FOUR = ["dp_replicate=2 dp_shard=2 zero=1", "dp_replicate=4 accumulation=2", "dp_shard=4 zero=2 accumulation=4"]


@functools.cache
def expected(optimizer: str, clip: float, steps: int):
    return reference(TableCase("", "", optimizer, clip, steps))


def assert_same(found, case: TableCase) -> None:
    (metrics, weights), (want, plain) = found, expected(case.optimizer, case.clip, case.steps)
    for ours, theirs in zip(metrics, want, strict=True):
        assert ours == pytest.approx(theirs, rel=LIMIT), case
    assert list(weights) == list(plain)
    for name, tensor in plain.items():
        assert float((weights[name] - tensor).abs().max()) <= LIMIT, (case, name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_equals_plain_torch(optimizer):
    for clip in (0.5, 0.0):
        case = TableCase(MIXED, "accumulation=3", optimizer, clip)
        assert_same(train(case), case)


@pytest.mark.parametrize(*product("layout, optimizer, plan", LAYOUTS, OPTIMIZERS, TWO))
def test_two_ranks_equal_plain_torch(layout, optimizer, plan, ranks2):
    case = TableCase(layout, plan, optimizer)
    for found in ranks2.run(train, case):
        assert_same(found, case)


@pytest.mark.parametrize(*product("layout, optimizer, plan", LAYOUTS[:4], OPTIMIZERS, FOUR))
def test_four_ranks_equal_plain_torch(layout, optimizer, plan, ranks4):
    case = TableCase(layout, plan, optimizer)
    for found in ranks4.run(train, case):
        assert_same(found, case)


@pytest.mark.full
def test_three_ranks_equal_plain_torch():
    with RankPool(3) as pool:
        for layout in LAYOUTS:
            for plan in ("dp_replicate=3", "dp_shard=3 zero=2 accumulation=3"):  # the latter leaves microbatches empty
                case = TableCase(layout, plan, "lazy_adamw")
                assert_same(pool.run(train, case)[0], case)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_dense_optimizers_that_keep_rows_apply_to_tables(kind):
    """Without `tables=`, the numbers are those of torch's optimizer on dense gradients."""
    plain = model()
    optimizer = kind(plain.parameters(), lr=0.1)
    run = weft.Run(Plan.parse("precision=fp64"), build_mesh(Plan.parse("precision=fp64")), Ledger(), seed=0)
    ours = run.parallelize(model(), layout=MIXED)
    step = run.train_step(ours, kind, loss_fn, forward=lambda model, batch: model(batch), lr=0.1, check_batch=False)
    script = Script(TableCase(MIXED))
    for index in range(3):
        (batch,) = script.batch(index)
        optimizer.zero_grad()
        (loss_fn(plain(batch), batch)[0] / len(batch["labels"])).backward()
        optimizer.step()
        step(batch)
    for name, tensor in run.full_state_dict(ours).items():
        assert float((tensor - plain.state_dict()[name]).abs().max()) <= LIMIT, name


# Checkpoints.

SAVES = [("", MIXED), ("dp_replicate=2", LAYOUTS[1]), ("dp_shard=2 zero=2 accumulation=2", LAYOUTS[4])]


def save_half(case: TableCase, folder: str) -> None:
    script = Script(case)
    script.train(0, 2)
    script.run.save(folder, step=2, model=script.model, optimizer=script.step)


def resume(case: TableCase, folder: str):
    script = Script(case)
    script.train(5, 6)  # replaced by the checkpoint
    assert script.run.load(folder, model=script.model, optimizer=script.step).step == 2
    return script.train(2, 4), script.weights()


@pytest.mark.parametrize("optimizer", gate_runs(["rowwise_adagrad", "lazy_adamw", "adagrad"], 0, 1))
def test_checkpoint_resumes_under_other_styles_and_ranks(optimizer, tmp_path, ranks2):
    metrics, plain = expected(optimizer, 0.5, 4)
    for place, (plan, layout) in enumerate(SAVES):
        folder, case = str(tmp_path / str(place)), TableCase(layout, plan, optimizer)
        save_half(case, folder) if not plan else ranks2.run(save_half, case, folder)
        for other, styles in (SAVES[place], SAVES[(place + 1) % 3]):
            case = TableCase(styles, other, optimizer)
            found, weights = resume(case, folder) if not other else ranks2.run(resume, case, folder)[0]
            assert [one for pair in found for one in pair] == pytest.approx(
                [one for pair in metrics[2:] for one in pair], rel=LIMIT
            )
            for name, tensor in plain.items():
                assert float((weights[name] - tensor).abs().max()) <= LIMIT, (plan, other, name)


def adagrad(layout: str | None):
    run = weft.Run(Plan.parse("precision=fp64"), build_mesh(Plan.parse("precision=fp64")), Ledger(), seed=0)
    ours = run.parallelize(model(), layout=layout)
    options = {"forward": lambda model, batch: model(batch), "lr": 0.1, "check_batch": False}
    return run, ours, run.train_step(ours, torch.optim.Adagrad, loss_fn, **options)


@pytest.mark.parametrize("layouts", [(None, MIXED), (MIXED, None)])
def test_checkpoint_resumes_with_and_without_tables(layouts, tmp_path):
    batches = [next(iter(Script(TableCase(MIXED)).batch(index))) for index in range(3)]
    run, ours, step = adagrad(layouts[0])
    step(batches[0])
    step(batches[1])
    run.save(tmp_path, step=2, model=ours, optimizer=step)
    step(batches[2])
    want = run.full_state_dict(ours)
    run, ours, step = adagrad(layouts[1])
    run.load(tmp_path, model=ours, optimizer=step)
    step(batches[2])
    for name, tensor in run.full_state_dict(ours).items():
        assert float((tensor - want[name]).abs().max()) <= LIMIT, name


def test_checkpoint_of_another_table_optimizer_is_refused(tmp_path):
    save_half(TableCase(MIXED, "", "adagrad"), str(tmp_path))
    with pytest.raises(WeftError) as caught:
        resume(TableCase(MIXED, "", "rowwise_adagrad"), str(tmp_path))
    assert str(caught.value) == (
        "optimizer state 'user.weight/row_sum': the checkpoint lacks it, and the table's optimizer is rowwise_adagrad. "
        "Resume with the optimizer of the run that saved it."
    )


def test_checkpoint_without_states_of_a_table_is_refused(tmp_path):
    (batch,) = Script(TableCase(MIXED)).batch(0)
    plan = Plan.parse("precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    ours = run.parallelize(model())
    built = torch.optim.AdamW(ours.top.parameters(), lr=0.1)
    step = run.train_step(ours, built, loss_fn, forward=lambda model, batch: model(batch), check_batch=False)
    step(batch)
    run.save(tmp_path, step=1, model=ours, optimizer=step)
    script = Script(TableCase(MIXED, "", "lazy_adamw"))
    with pytest.raises(WeftError, match=r"optimizer state 'user.weight/exp_avg': the checkpoint lacks it"):
        script.run.load(tmp_path, model=script.model, optimizer=script.step)


# Traffic and memory.

WIDE, LONG = 32, 4000


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LONG, WIDE)
        self.top = nn.Linear(WIDE, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids)).squeeze(1)


def sent_bytes(layout: str, num_ranks: int) -> tuple[int, int]:
    """Return the bytes that this rank sent in a step, and those of its unique remote rows, both ways."""
    ledger = Ledger()
    plan = Plan.parse(f"dp_replicate={num_ranks}")
    run = weft.Run(plan, build_mesh(plan, record=ledger.record), ledger, seed=0)
    ours = run.parallelize(Wide(), layout=layout)
    step = run.train_step(
        ours, torch.optim.AdamW, lambda output, batch: (output.square().sum(), len(output)),
        forward=lambda model, batch: model(batch), tables=weft.TableOptimizer("adagrad"), check_batch=False,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(run.mesh.rank)
    batch = torch.randint(LONG, (600,), generator=rng)
    step(batch)
    ledger.clear()
    step(batch)
    sent = sum(entry.sent_bytes for _, name, entry in ledger.rows() if name in ("all_to_all", "all_gather"))
    unique = batch.unique()
    low, high = LONG * run.mesh.rank // num_ranks, LONG * (run.mesh.rank + 1) // num_ranks
    remote = unique[(unique < low) | (unique >= high)].numel() * WIDE
    if layout == "table=columns":
        remote = unique.numel() * (WIDE - WIDE // num_ranks)
    return sent, 2 * 4 * remote


@pytest.mark.parametrize("layout", ["table=rows", "table=columns"])
def test_sent_bytes_are_those_of_unique_rows(layout, ranks2):
    # Rows that others request from this rank and gradients of its own requests, as many as the other way around.
    found = ranks2.run(sent_bytes, layout, 2)
    assert sum(sent for sent, _ in found) <= 1.10 * sum(rows for _, rows in found)


def test_step_allocates_nothing_of_the_table_size():
    plan = Plan.parse("dp_replicate=1")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    ours = run.parallelize(Wide(), layout="table=rows")
    step = run.train_step(
        ours, torch.optim.AdamW, lambda output, batch: (output.square().sum(), len(output)),
        forward=lambda model, batch: model(batch), tables=weft.TableOptimizer("lazy_adamw"), check_batch=False,
    )  # fmt: skip
    batch = torch.arange(20)
    step(batch)
    engine = data_parallel(ours)
    known = [*ours.parameters(), *(one.flat for one in engine.state_slices(step.optimizer)), *engine.local_gradients()]
    with LiveTensors(known) as live:
        step(batch)
    assert live.peak < LONG * WIDE * 4 / 5


# Errors.


def wrong_id(layout: str) -> str:
    script = Script(TableCase(layout, "dp_replicate=2"))
    batch = next(iter(script.batch(0)))
    if script.run.mesh.rank == 1:
        batch["user"][2] = 23
    try:
        script.step(batch)
    except WeftError as error:
        return str(error)
    return ""


class OtherOrder(Recommender):
    """Looks up items before users on rank 1."""

    def forward(self, batch):
        if dist.get_rank() == 1:
            self.item(batch["item"])
        return super().forward(batch)


def other_order(layout):
    plan = Plan.parse("dp_replicate=2 precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(OtherOrder().double(), layout=layout)
    with pytest.raises(ModelError) as caught, torch.no_grad():
        model(collate(samples(0)))
    return str(caught.value)


@pytest.mark.parametrize("layout", ["{user,item}=rows", "{user,item}=columns"])
def test_ranks_that_look_up_other_tables_are_refused(layout, ranks2):
    first, second = ranks2.run(other_order, layout)
    rule = "another rank looks up another table at this point of its forward. Call the same tables in the same order"
    assert first.startswith(f"table 'user.weight': {rule}")
    assert second.startswith(f"table 'item.weight': {rule}")


@pytest.mark.parametrize("layout", ["user=rows", "user=columns"])
def test_id_out_of_range_ends_all_ranks(layout, ranks2):
    other, own = ranks2.run(wrong_id, layout)
    assert own == "id 23: table 'user' has 23 rows. Use ids from 0 to 22, or give the table 24 rows."
    assert other == "table 'user.weight': rank 1 has an id out of range. Its log names the id."


def test_negative_id_of_a_replicated_table_is_refused():
    script = Script(TableCase("genre=replicate user=rows"))
    (batch,) = script.batch(0)
    batch["genre"][0] = -2
    with pytest.raises(WeftError) as caught:
        script.step(batch)
    assert str(caught.value) == (
        "id -2: table 'genre' has 5 rows. Use ids from 0 to 4, or encode missing ids by a row of their own."
    )


def shared():
    found = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    found[1].weight = found[0].weight
    return found


def frozen():
    found = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    found[0].requires_grad_(False)
    return found


def plain(**options: object) -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3, **options), nn.Linear(3, 4))


REFUSED = [
    (plain, "0=rows", "dp_shard=1 compile=on",
     "compile=on: embedding tables of a layout are not built with it yet. Leave compile out, or leave the tables "
     "out of layout."),
    (plain, "0=rows", "precision=fp16",
     "precision=fp16: embedding tables of a layout are not built with it yet. Use precision=fp64, precision=fp32, "
     "precision=tf32, precision=bf16, or leave the tables out of layout."),
    (plain, "0=rows recompute=rows", "", "layout pattern 'recompute': it matches no module. Tables are 0."),
    (plain, "{0,1}=rows", "",
     "1=rows: 1 is a Linear, and tables are nn.Embedding or nn.EmbeddingBag. Tables are 0."),
    (plain, "0=rows 1=colwise", "",
     "1=colwise: a layout of embedding tables has the styles rows, columns, one, host, auto and replicate only. Leave "
     "this entry out, or the tables."),
    (lambda: plain(max_norm=1.0), "0=one", "",
     "max_norm=1.0: 0 scales rows in forward, and ranks look up rows of other ranks. Use max_norm=None."),
    (lambda: plain(scale_grad_by_freq=True), "0=one", "",
     "scale_grad_by_freq=True: 0 divides gradients by frequencies in one microbatch on one rank. Use "
     "scale_grad_by_freq=False."),
    (shared, "0=rows", "",
     "table '0': 0.weight and 1.weight are one weight, and only lookups of a sharded table are supported. Leave it out "
     "of layout."),
    (frozen, "0=rows", "", "table '0': it is frozen, and only trained tables are sharded. Leave it out of layout."),
]  # fmt: skip


@pytest.mark.parametrize("build, layout, plan, message", REFUSED)
def test_unsupported_tables_are_refused(build, layout, plan, message):
    with pytest.raises(WeftError) as caught:
        parallelize(build(), build_mesh(Plan.parse(plan)), layout=weft.Layout.parse(layout))
    assert str(caught.value) == message


def start(layout: str = "0=rows") -> tuple[weft.Run, nn.Module]:
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    return run, run.parallelize(plain(), layout=layout)


def sums(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.sum(), len(output)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.table(ids), self.table.weight)


def step_of(run: weft.Run, model: nn.Module, optimizer: object = torch.optim.AdamW, **options: object):
    return run.train_step(model, optimizer, sums, check_batch=False, **options)


def test_dense_optimizer_that_changes_all_rows_is_refused():
    run, ours = start()
    with pytest.raises(WeftError) as caught:
        step_of(run, ours)
    assert str(caught.value) == (
        "optimizer AdamW: with its settings it changes rows of table '0.weight' that a step does not read. Use "
        "run.train_step(..., tables=weft.TableOptimizer('lazy_adamw', lr=0.001)), or rowwise_adagrad, adagrad or sgd."
    )


def test_tables_without_a_layout_are_refused():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    with pytest.raises(WeftError) as caught:
        step_of(run, run.parallelize(plain()), tables=weft.TableOptimizer("sgd"))
    assert str(caught.value) == (
        "tables=sgd: the layout shards no embedding table. Pass run.parallelize(model, layout='user=rows'), or leave "
        "tables out."
    )


def test_table_in_two_groups_is_refused():
    run, ours = start()
    with pytest.raises(WeftError, match=r"run\.dense_parameters\(model\)"):
        step_of(run, ours, torch.optim.SGD(ours.parameters(), lr=0.1), tables=weft.TableOptimizer("sgd"))
    built = torch.optim.AdamW(run.dense_parameters(ours), lr=0.1)
    assert step_of(run, ours, built, tables=weft.TableOptimizer("sgd"))(torch.arange(3)).skipped is None


def test_unknown_settings_of_a_table_optimizer_are_refused():
    with pytest.raises(WeftError, match="Did you mean 'adagrad'"):
        weft.TableOptimizer("adagrat")
    with pytest.raises(WeftError, match=r"weight_decay=0\.1: sgd does not decay the rows of tables"):
        weft.TableOptimizer("sgd", weight_decay=0.1)


def test_weight_outside_the_lookup_is_refused():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    step = step_of(run, run.parallelize(Tied(), layout="table=rows"), tables=weft.TableOptimizer("sgd"))
    with pytest.raises(WeftError) as caught:
        step(torch.arange(3))
    assert str(caught.value) == (
        "table 'table.weight': code outside its module computes with the weight, of which each rank holds a part. Look "
        "rows up by calling the module, or leave it out of layout."
    )


def test_loop_of_ones_own_averages_and_copies_are_refused():
    run, ours = start()
    with pytest.raises(WeftError, match=r"Use run\.train_step to train, run\.evaluate to evaluate, or torch\.no_grad"):
        ours(torch.arange(3))
    with torch.no_grad():
        assert ours(torch.arange(3)).shape == (3, 4)
    with pytest.raises(WeftError, match=r"Leave run\.ema out"):
        run.ema(ours)
    with pytest.raises(WeftError, match="cannot be copied or pickled"):
        copy.deepcopy(ours)
    with pytest.raises(WeftError, match=r"under sharded tables this rank has only a part of it"):
        ours.state_dict()


def test_step_that_is_not_finite_leaves_tables_unchanged():
    run, ours = start()
    step = run.train_step(
        ours, torch.optim.AdamW, lambda output, batch: (output.sum() * float("nan"), len(output)),
        tables=weft.TableOptimizer("lazy_adamw"), check_batch=False,
    )  # fmt: skip
    before = run.full_state_dict(ours)
    assert step(torch.arange(3)).skipped is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.full_state_dict(ours).items())


# Other ways to start, and other precisions.


def from_shapes(plan_text: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        built = Wide()
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=3)
    return run.full_state_dict(run.parallelize(built, layout="table=rows"), everywhere=True)


def test_tables_on_the_meta_device_start_alike_under_every_plan(ranks2):
    with torch.device("meta"):
        built = Wide()
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=3)
    want = run.full_state_dict(run.parallelize(built))
    for found in (from_shapes(""), *ranks2.run(from_shapes, "dp_replicate=2")):
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def values_of_rank(plan_text: str) -> dict[str, torch.Tensor]:
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    built = model().float()
    with torch.no_grad():
        for param in built.parameters():
            param.add_(run.mesh.rank)
    return run.full_state_dict(run.parallelize(built, layout=MIXED), everywhere=True)


def test_first_ranks_values_are_used(ranks2):
    want = model().float().state_dict()
    for found in ranks2.run(values_of_rank, "dp_replicate=2"):
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def losses_with_checks(plan_text: str) -> list[float]:
    """Train with the checks of the first step, which run small forwards."""
    torch.manual_seed(0)
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    ours = run.parallelize(Wide(), layout="table=rows")
    step = run.train_step(
        ours, torch.optim.SGD, lambda output, batch: (output.square().sum(), len(output)), lr=0.1,
        forward=lambda model, batch: model(batch),
    )  # fmt: skip
    ids = torch.arange(16).view(2, 8) * 7
    part = ids.flatten() if plan.dp_size == 1 else ids[run.mesh.rank]
    found = [step(part).loss for _ in range(3)]
    evaluated = run.evaluate(ours, [part], lambda output, batch: (output.square().sum(), len(output)))
    return [*found, evaluated.loss]


def test_checks_of_the_first_step_and_evaluation_run_on_all_ranks(ranks2):
    want = losses_with_checks("")
    for found in ranks2.run(losses_with_checks, "dp_replicate=2"):
        assert found == pytest.approx(want, rel=1e-5)


def test_bf16_keeps_tables_in_fp32():
    plan = Plan.parse("precision=bf16")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    ours = run.parallelize(Wide(), layout="table=rows")
    step = step_of(run, ours, tables=weft.TableOptimizer("sgd", lr=2**-9), lr=1e-3)
    with torch.no_grad():
        assert ours.table(torch.arange(3)).dtype == torch.bfloat16
    assert ours.table.weight.dtype == torch.float32
    before, top = ours.table.weight.detach().clone(), ours.top.weight.detach().float().clone()
    step(torch.tensor([5, 5, 7]))
    change = before - ours.table.weight.detach()
    assert change.any(1).nonzero().flatten().tolist() == [5, 7]
    # The gradient of the mean over three samples, of which two read row 5.
    torch.testing.assert_close(change[5], 2**-9 * 2 / 3 * top[0], rtol=0.02, atol=1e-6)
