"""zero=3: ranks agree on the order of gathers in the first step, and later compare it only if it changes."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_zero3 import PLAN, Chooser, rows
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import CommError
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import DataParallel, data_parallel

SPEC = DecoderSpec(vocab_size=61, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=32)
#: Bytes of a comparison per rank: three integers. No unit here has a shard of that size.
COMPARED = 3 * 8


class CollectiveRecorder:
    """Replaces the ledger and records the collectives of each step."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, int]] = []

    def record(self, axis: str, operation: str, num_bytes: int, *_: float) -> None:
        self.sent.append((axis, operation, num_bytes))

    def step(self, sizes: dict[str, int]) -> tuple[int, int]:
        """Return (comparisons, other collectives) since the last call. sizes: axis sizes by name."""
        sent, self.sent = self.sent, []
        compared = sum(one == (one[0], "all_gather", COMPARED * sizes.get(one[0], 0)) for one in sent)
        return compared, len(sent) - compared


def run_step(engine: DataParallel, optimizer: torch.optim.Optimizer, losses: list) -> None:
    """Run one step with one microbatch per loss function."""
    engine.begin_step()
    for index, loss in enumerate(losses):
        with engine.microbatch(last=index == len(losses) - 1):
            loss().backward()
    engine.finish()
    optimizer.step()
    engine.publish()


def count_steps(plan: str, evaluates: bool) -> list[tuple[int, int]]:
    recorder = CollectiveRecorder()
    mesh = build_mesh(Plan.parse(plan), record=recorder.record)
    model = parallelize(build_decoder(SPEC, dtype=torch.float64, seed=0), mesh)
    engine, optimizer = data_parallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    engine.adopt(optimizer)
    sizes = {axis.name: axis.size for axis in (mesh["dp_shard"], mesh["dp_replicate"], mesh.data, mesh.world)}
    found = []
    for step in range(5):
        recorder.sent = []
        ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(mesh.data.rank))
        run_step(engine, optimizer, [lambda ids=ids: model(ids).square().sum()] * mesh.plan.accumulation)
        found.append(recorder.step(sizes))
        if evaluates and step == 1:
            with torch.no_grad():
                model(ids)
    return found


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        f"{PLAN} accumulation=2 reshard=after_step",
        f"{PLAN} accumulation=2 reshard=after_backward recompute=full",
    ],
)
def test_steady_step_has_no_comparisons(plan, ranks2):
    for counts in ranks2.run(count_steps, plan, False):
        (first, work), *others = counts
        assert first > 5
        assert others == [(0, work)] * 4


def test_steady_step_over_replicas_has_no_comparisons(ranks4):
    for counts in ranks4.run(count_steps, "dp_replicate=2 dp_shard=2 zero=3 precision=fp64", False):
        assert counts[0][0] > 5
        assert {compared for compared, _ in counts[1:]} == {0}


def test_evaluation_between_steps_costs_comparisons_in_two_steps(ranks2):
    for counts in ranks2.run(count_steps, PLAN, True):
        compared = [count for count, _ in counts]
        assert compared[0] > 0
        assert compared[1] == 0
        assert compared[2] > 0
        assert compared[3] > 0
        assert compared[4] == 0


#: The block that all ranks skip, by step.
SKIPPED = (None, None, 1, 1, None, 2, None)


def change_on_all_ranks(plan: str) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Return comparisons and gradients of each step."""
    recorder = CollectiveRecorder()
    mesh = build_mesh(Plan.parse(plan), record=recorder.record)
    model = parallelize(Chooser().double(), mesh)
    engine = data_parallel(model)
    compared, gradients = [], []
    for skip in SKIPPED:
        engine.begin_step()
        with engine.microbatch(last=True):
            model(rows(0, mesh["dp_shard"].rank), skip, False).square().sum().backward()
        engine.finish()
        compared.append(recorder.step({"dp_shard": 2, "world": 2})[0])
        gradients.append({name: grad.clone() for name, grad in engine.gradients()})
        recorder.sent = []
    return compared, gradients


@pytest.mark.parametrize("reshard", ["after_forward", "after_backward"])
def test_order_change_on_all_ranks_is_compared_again(reshard, ranks2):
    wants = []
    for skip in SKIPPED:
        model = Chooser().double()
        model(rows(0), skip, False).square().sum().backward()
        zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        wants.append({name: zeros[name] if p.grad is None else p.grad for name, p in model.named_parameters()})
    for compared, gradients in ranks2.run(change_on_all_ranks, f"{PLAN} reshard={reshard}"):
        assert [count > 0 for count in compared] == [True, False, True, False, True, True, True]
        for got, want in zip(gradients, wants, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def change_on_one_rank(plan: str, what: str) -> str:
    """Run two equal steps on all ranks, then one in which rank 1 differs."""
    mesh = build_mesh(Plan.parse(plan))
    model = parallelize(Chooser().double(), mesh)
    engine, rank = data_parallel(model), mesh.rank
    try:
        for step in range(3):
            differs = step == 2 and rank == 1
            engine.begin_step()
            with engine.microbatch(last=True):
                skip = {"skip": 1, "skip last": 2}.get(what) if differs else None
                output = model(rows(0, mesh["dp_shard"].rank), skip, False)
                if not (what == "no backward" and differs):
                    output.square().sum().backward()
            engine.finish()
    except CommError as error:
        return f"{step}: {error}"
    return ""


@pytest.mark.parametrize(
    "plan, what, ours, theirs",
    [
        (PLAN, "skip", "rank 1 gathers the weights of blocks.2", "rank 0 gathers the weights of blocks.1"),
        (PLAN, "skip last", "rank 1 gathers the weights of blocks.1", "rank 0 gathers the weights of blocks.2"),
        (PLAN + " reshard=after_backward", "skip last",
         "rank 1 reduces the gradients of blocks.1", "rank 0 gathers the weights of blocks.2"),
        (PLAN, "no backward", "rank 1 ends the step", "rank 0 "),
    ],
)  # fmt: skip
def test_order_change_on_one_rank_raises_on_all(plan, what, ours, theirs, ranks2):
    follower, changed = ranks2.run(change_on_one_rank, plan, what)
    assert changed.startswith(f"2: {ours}, and in the step before it was ")
    assert "other ranks did not change" in changed
    assert follower.startswith(f"2: {theirs}")
    assert "as in the step before, and another rank does not" in follower
    for message in (follower, changed):
        assert "Call the same modules in the same order on all of them" in message
