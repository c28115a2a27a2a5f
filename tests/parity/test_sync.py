"""sync=average:H and diloco:H: every layout of replicas matches one process that trains the replicas in turn.

The reference trains R plain models in one process, each on its part of the batch, with its own optimizer and clipping,
and computes the outer step by its equations.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch

import weft
from tests.choice import todays
from tests.parity.cases import LLAMA
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.wire.wire_format import find_wire
from weft.config import partitioning as shares
from weft.config.plan import Plan
from weft.errors import CommError, ModelError
from weft.optim.step_decision import clip_factor, global_norm
from weft.parallel.parallelize import parallelize
from weft.parallel.replicas.local_sgd import StreamedSync, anchored, rare_sync
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep
from weft.verify.oracles import WireOracle
from weft.verify.parity import DecoderCase, ParityResult, local_microbatches, train_case

CASE = DecoderCase(LLAMA, num_steps=5, max_grad_norm=0.5)
EVEN = dataclasses.replace(CASE, masked=0.0, max_grad_norm=0.0)
TWO = (
    "sync=diloco:2", "sync=average:2", "sync=diloco:2 compress=int8", "accumulation=2 sync=diloco:3",
    "sync=diloco:3/2", "sync=average:2/2 compress=int8", "sync=diloco:2 compress=top:0.1",
)  # fmt: skip
FOUR = (
    "dp_shard=2 zero=3 sync=diloco:2",
    "pp=2 microbatches=2 sync=diloco:3/2",
    "tp=2 sp=on sync=diloco:2",
)
MORE = (
    "pp=2 microbatches=2 sync=diloco:3/2",
    "dp_shard=2 zero=3 sync=diloco:3/3",
    "dp_shard=2 zero=1 sync=diloco:3/2",
    "tp=2 sp=on sync=diloco:2/1",
    "dp_shard=2 zero=1 offload=optimizer sync=average:2/2",
    "dp_shard=2 zero=1 sync=diloco:2",
    "pp=2 microbatches=2 sync=average:2",
    "dp_shard=2 zero=2 sync=diloco:2",
    "cp=2 zero=3 sync=average:2",
    "dp_shard=2 zero=3 offload=params+optimizer sync=diloco:2",
    "dp_shard=2 zero=1 offload=optimizer sync=diloco:2",
    "dp_shard=2 zero=3 recompute=full reshard=after_step accumulation=2 sync=diloco:2",
)
LR, MOMENTUM = 0.7, 0.9


class PlainSgd(DecoderCase):
    """The same case with an optimizer whose update is linear in the gradient."""

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


def outer_step(method: str, anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
    if method == "average":
        anchor -= mean
        return
    momentum.mul_(MOMENTUM).add_(mean)
    anchor -= LR * (mean + MOMENTUM * momentum)


#: Function that returns the mean of the replicas' deltas by name.
Mean = Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]


class ReferenceReplicas:
    """R replicas trained in this process."""

    def __init__(self, case: DecoderCase, plan: Plan):
        self.case, (self.method, self.every), self.replicas = (
            case,
            (plan.sync_method, plan.sync_every),
            plan.dp_replicate,
        )
        self.plan, replicas = plan, plan.dp_replicate
        self.models = [case.model() for _ in range(replicas)]
        self.optimizers = [case.optimizer_of(model) for model in self.models]
        self.anchor = {name: param.detach().clone() for name, param in self.models[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(one) for name, one in self.anchor.items()}
        self.result = ParityResult()

    def samples(self, replica: int) -> list[int]:
        """Return the indices of the global batch's samples that a replica's ranks read."""
        shard, passes = self.plan.dp_shard, self.plan.microbatches_per_step
        ranks = range(replica * shard, (replica + 1) * shard)
        runs = [shares.microbatch_samples(self.case.global_batch, self.plan.dp_size, passes, rank) for rank in ranks]
        return sorted(number for run in runs for part in run for number in part)

    def step(self, index: int) -> None:
        batch = self.case.batch(index)
        losses, tokens, norms = 0.0, 0, 0.0
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            own = {name: one[self.samples(replica)] for name, one in batch.items()}
            loss_sum, number = self.case.loss(self.case.forward(model, own), own)
            optimizer.zero_grad()
            (loss_sum / number).backward()
            params = list(model.parameters())
            norm = float(global_norm([param.grad for param in params]))
            for param in params:
                param.grad *= clip_factor(norm, self.case.max_grad_norm)
            optimizer.step()
            losses, tokens, norms = losses + float(loss_sum.detach()), tokens + int(number), norms + norm
        self.result.losses.append(losses / tokens)
        self.result.grad_norms.append(norms / self.replicas)

    def train_streamed(self, fragments: list[list[str]], mean: Mean | None = None) -> ParityResult:
        """Like `train`, with fragments that are sent in turn and applied one step later."""
        leaves = {(k + 1) * self.every // len(fragments) % self.every: names for k, names in enumerate(fragments)}
        in_flight: list[dict[str, torch.Tensor]] = []
        for index in range(self.case.num_steps):
            self.step(index)
            with torch.no_grad():
                self.apply_fragment(in_flight, mean)
            names = leaves.get((index + 1) % self.every, ())
            in_flight = [
                {name: self.anchor[name] - model.get_parameter(name).detach() for name in names}
                for model in self.models
                if names
            ]
        self.result.weights = dict(self.anchor)
        return self.result

    def apply_fragment(self, in_flight: list[dict[str, torch.Tensor]], mean: Mean | None) -> None:
        found = self.mean(in_flight, mean) if in_flight else {}
        for name, delta in found.items():
            anchor = self.anchor[name]
            left = [anchor - own[name] for own in in_flight]
            outer_step(self.method, anchor, self.momentum[name], delta)
            for model, weights in zip(self.models, left, strict=True):
                model.get_parameter(name).add_(anchor - weights)

    def mean(self, deltas: list[dict[str, torch.Tensor]], mean: Mean | None) -> dict[str, torch.Tensor]:
        if mean:
            return mean(deltas)
        return {name: sum(delta[name] for delta in deltas) / self.replicas for name in deltas[0]}

    @torch.no_grad()
    def synchronize(self, mean: Mean | None = None) -> None:
        deltas = [
            {name: self.anchor[name] - param.detach() for name, param in model.named_parameters()}
            for model in self.models
        ]
        found = self.mean(deltas, mean)
        for name, anchor in self.anchor.items():
            outer_step(self.method, anchor, self.momentum[name], found[name])
            for model in self.models:
                model.get_parameter(name).copy_(anchor)

    def train(self, mean=None) -> ParityResult:
        for index in range(self.case.num_steps):
            self.step(index)
            if (index + 1) % self.every == 0:
                self.synchronize(mean)
        self.result.weights = dict(self.anchor)
        return self.result


@dataclasses.dataclass
class Trained:
    """Results of a rank.

    own: the replica's weights between synchronizations. order: parameter names in the order in which they are sent.
    fragments: parameter names of each fragment.
    """

    result: ParityResult
    own: dict[str, torch.Tensor]
    order: list[list[str]]
    fragments: list[list[str]]


def train(plan_text: str, case: DecoderCase) -> Trained:
    plan = Plan.parse(f"dp_replicate=2 {plan_text} precision=fp64")
    mesh = build_mesh(plan)
    model = parallelize(case.model(), mesh)
    step = TrainStep(
        model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=case.max_grad_norm
    )
    result = ParityResult()
    for index in range(case.num_steps):
        metrics = step(local_microbatches(case.batch(index), plan, mesh.data.rank))
        result.losses.append(metrics.loss)
        result.grad_norms.append(metrics.grad_norm)
    sync = rare_sync(model)
    own = {name: one.clone() for name, one in data_parallel(model).weights()}
    with anchored(model):
        result.weights = {name: one.clone() for name, one in data_parallel(model).weights()}
    back = dict(data_parallel(model).weights())
    assert all(torch.equal(back[name], own[name]) for name in own)
    local_names = [one.name for one in sync.master_slices()]
    order = [[local_names[index] for index in run.places] for run in sync._runs]
    fragment_of = sync._places if isinstance(sync, StreamedSync) else {}
    fragments = [[name for name, at in fragment_of.items() if at == k] for k in range(plan.sync_fragments)]
    return Trained(result, own, order, fragments)


def train_all(plans: tuple[str, ...], case: DecoderCase) -> list[Trained]:
    return [train(plan, case) for plan in plans]


def mean_with_error_feedback(order: list[list[str]], wire: str) -> Mean:
    """Return a mean of deltas that each replica encodes with `wire` and error feedback."""
    codec, residuals = find_wire(wire), {}

    def mean(deltas: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {}
        for names in order:
            if names[0] not in deltas[0]:
                continue
            total = 0.0
            for replica, delta in enumerate(deltas):
                flat = torch.cat([delta[name].reshape(-1) for name in names]) + residuals.get((names[0], replica), 0.0)
                sent = codec.decode(codec.encode(flat[None], None)[0], flat.numel(), flat.dtype)[0]
                residuals[names[0], replica] = flat - sent
                total = total + sent
            parts = (total / len(deltas)).split([deltas[0][name].numel() for name in names])
            found |= {name: part.view_as(deltas[0][name]) for name, part in zip(names, parts, strict=True)}
        return found

    return mean


def coded_mean(order: list[list[str]], wire: str) -> Mean:
    """Return a mean of encoded deltas, in the order in which a rank sends them."""
    if "top" in wire:
        return mean_with_error_feedback(order, wire)
    oracle = WireOracle(wire)

    def mean(deltas: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {}
        for names in order:
            if names[0] not in deltas[0]:
                continue  # belongs to another fragment
            flats = [torch.cat([delta[name].reshape(-1) for name in names]) for delta in deltas]
            summed = oracle.all_reduce(flats, f"sync {names[0]}") / len(deltas)
            parts = summed.split([deltas[0][name].numel() for name in names])
            found |= {name: part.view_as(deltas[0][name]) for name, part in zip(names, parts, strict=True)}
        oracle.commit()
        return found

    return mean


def check(pool, plans: tuple[str, ...], case: DecoderCase) -> None:
    answers = pool.run(train_all, plans, case)
    for index, plan in enumerate(plans):
        reference = ReferenceReplicas(case, Plan.parse(f"dp_replicate=2 {plan}"))
        compress = reference.plan.compress
        mean = None if compress == "none" else coded_mean(answers[0][index].order, compress)
        fragments = answers[0][index].fragments
        expected = reference.train_streamed(fragments, mean) if fragments else reference.train(mean)
        for rank, answer in enumerate(answers):
            found = answer[index]
            assert found.result.largest_difference(expected) < 1e-10, (plan, rank)
            replica = next(
                replica
                for replica, model in enumerate(reference.models)
                if all(torch.allclose(found.own[n], p, rtol=1e-9, atol=1e-10) for n, p in model.named_parameters())
            )
            assert replica in (0, 1)
            first = answers[0][index].result.weights
            assert all(torch.equal(one, first[name]) for name, one in found.result.weights.items()), plan


def test_two_replicas_match_one_process(ranks2):
    check(ranks2, TWO, CASE)


def test_replicas_of_two_ranks_match_one_process(ranks4):
    check(ranks4, FOUR, CASE)


@pytest.mark.full
def test_more_layouts_of_replicas_match_one_process(ranks4):
    check(ranks4, MORE, CASE)


def test_average_after_each_sgd_step_equals_data_parallel(ranks2):
    case = PlainSgd(**{field.name: getattr(EVEN, field.name) for field in dataclasses.fields(EVEN)})
    plain = train_case("precision=fp64", case)
    for (found,) in ranks2.run(train_all, ("sync=average:1",), case):
        assert found.result.losses == pytest.approx(plain.losses, rel=1e-10)
        for name, weight in found.result.weights.items():
            assert (weight - plain.weights[name]).abs().max() < 1e-10


class Script:
    """A user's script under a plan, which may resume from a checkpoint."""

    def __init__(self, plan_text: str):
        plan = Plan.parse(f"{plan_text} precision=fp64")
        self.run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
        self.model = self.run.parallelize(CASE.model(), outer_lr=0.5, outer_momentum=0.8)
        self.step = self.run.train_step(
            self.model, CASE.optimizer_of(self.model), CASE.loss, forward=CASE.forward, max_grad_norm=0.5
        )

    def train(self, first: int, last: int) -> list[float]:
        axis = self.run.mesh.data
        return [
            self.step(local_microbatches(CASE.batch(index), self.run.plan, axis.rank)).loss
            for index in range(first, last)
        ]

    def own(self) -> dict[str, torch.Tensor]:
        """Return this replica's weights."""
        return {name: one.clone() for name, one in data_parallel(self.model).weights()}

    def full_state(self) -> dict[str, torch.Tensor]:
        return self.run.full_state_dict(self.model, everywhere=True)

    def evaluate(self) -> float:
        axis = self.run.mesh.data
        batch = {name: one.tensor_split(axis.size)[axis.rank] for name, one in CASE.batch(99).items()}
        return self.run.evaluate(self.model, [batch], CASE.loss, forward=CASE.forward).loss


def save_and_continue(plan_text: str, folder: str, at: int, end: int):
    """Return later losses, final weights and anchor, and the anchor and evaluation loss at the save."""
    script = Script(plan_text)
    script.train(0, at)
    script.run.save(folder, step=at, model=script.model, optimizer=script.step)
    anchor, loss = script.full_state(), script.evaluate()
    return script.train(at, end), script.own(), script.full_state(), anchor, loss


def load_and_continue(plan_text: str, folder: str, at: int, end: int):
    script = Script(plan_text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.run.load(folder, model=script.model, optimizer=script.step)
    anchor, loss = script.full_state(), script.evaluate()
    lines = [str(one.message) for one in caught if "replicas" in str(one.message)]
    return script.train(at, end), script.own(), script.full_state(), anchor, loss, lines


def save_and_resume(pool, plan: str, folder, at: int, end: int = 7, then: str = ""):
    saved = pool.run(save_and_continue, plan, str(folder), at, end)
    return saved, pool.run(load_and_continue, then or plan, str(folder), at, end)


@pytest.mark.parametrize(
    ("plan", "at"),
    todays(
        [
            ("dp_shard=2 zero=3", 5),
            ("pp=2 microbatches=2", 3),
            ("dp_shard=2 zero=1 sync=diloco:3/2", 4),  # with a fragment in flight
            ("tp=2 sync=diloco:3/2 compress=top:0.1", 4),
            *(
                pytest.param(plan, at, marks=pytest.mark.full)
                for plan, at in [
                    ("dp_shard=2 zero=3 sync=diloco:3/3", 4),
                    ("dp_shard=2 zero=3 sync=average:3 compress=top:0.1", 5),
                    ("dp_shard=2 zero=1 sync=diloco:3 compress=top:0.1", 3),
                    ("pp=2 microbatches=2 sync=average:3/2", 5),
                    ("dp_shard=2 zero=3", 3),
                    ("dp_shard=2 zero=1", 3),
                    ("dp_shard=2 zero=1", 5),
                    ("tp=2", 3),
                    ("tp=2", 5),
                    ("pp=2 microbatches=2", 5),
                ]
            ),
        ],
        parts=2,
    ),
)
def test_resume_at_and_between_synchronizations_is_bitwise_equal(plan, at, ranks4, tmp_path):
    sync, compress = (text * (text.partition("=")[0] not in plan) for text in ("sync=diloco:3", "compress=int8"))
    saved, loaded = save_and_resume(ranks4, f"dp_replicate=2 {plan} {sync} {compress}", tmp_path, at)
    for before, after in zip(saved, loaded, strict=True):
        assert (before[0], before[4], []) == (after[0], after[4], after[5])
        for ours, theirs in zip(before[1:4], after[1:4], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        # Ranks of a replica with the same elements encoded them equally.
        assert all(torch.equal(after[2][name], loaded[0][2][name]) for name in after[2])


def go_back(plan_text: str, folder: str, at: int, end: int):
    """Return losses and weights of the steps after a save, and of the same steps after loading it in the same run."""
    script = Script(plan_text)
    script.train(0, at)
    script.run.save(folder, step=at, model=script.model, optimizer=script.step)
    before = script.train(at, end), script.own(), script.full_state()
    script.run.load(folder, model=script.model, optimizer=script.step)
    return before, (script.train(at, end), script.own(), script.full_state())


@pytest.mark.parametrize("sync", ["sync=average:3", "sync=diloco:3/2"])
def test_load_in_a_run_replaces_residuals(sync, ranks2, tmp_path):
    for before, after in ranks2.run(go_back, f"dp_replicate=2 {sync} compress=top:0.1", str(tmp_path), 4, 7):
        assert before[0] == after[0]
        for ours, theirs in zip(before[1:], after[1:], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def residuals_after(plan_text: str, load: str = "", save: str = "") -> dict[str, torch.Tensor]:
    script = Script(plan_text)
    if load:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script.run.load(load, model=script.model, optimizer=script.step)
    else:
        script.train(0, 3)
    if save:
        script.run.save(save, step=3, model=script.model, optimizer=script.step)
    return {one.name: one.flat.clone() for one in rare_sync(script.model).residual_slices()}


@pytest.mark.parametrize("compress", ["compress=top:0.05", "compress=int8", ""])
def test_other_replicas_resume_the_mean_residual(compress, ranks4, tmp_path):
    before = ranks4.run(
        residuals_after, "dp_replicate=2 dp_shard=2 sync=average:3 compress=top:0.05", "", str(tmp_path)
    )
    after = ranks4.run(residuals_after, f"dp_replicate=4 sync=average:3 {compress}", str(tmp_path))
    assert sum(float(one.abs().sum()) for one in before[0].values()) > 0
    for name, mine in before[0].items():
        mean = (mine + before[2][name]) / 2  # ranks 0 and 1 each have their replica's full residual
        assert all(torch.equal(one[name], mean) for one in after), name


def test_replicas_resume_under_another_inner_plan(ranks4, tmp_path):
    saved, loaded = save_and_resume(
        ranks4, "dp_replicate=2 dp_shard=2 zero=1 sync=diloco:3", tmp_path, 5,
        then="dp_replicate=2 tp=2 sync=diloco:3",
    )  # fmt: skip
    for before, after in zip(saved, loaded, strict=True):
        assert after[0] == pytest.approx(before[0], rel=1e-10)
        assert max((before[2][name] - after[2][name]).abs().max() for name in before[2]) < 1e-10


@pytest.mark.parametrize(
    "then",
    ["dp_replicate=4 sync=diloco:3", "dp_shard=4 zero=3", pytest.param("dp_replicate=4", marks=pytest.mark.full)],
)
def test_other_replicas_resume_from_the_anchor_and_report_losses(then, ranks4, tmp_path):
    saved, loaded = save_and_resume(ranks4, "dp_replicate=2 dp_shard=2 zero=1 sync=diloco:3", tmp_path, 5, then=then)
    more = "" if "sync" in then else ", the outer momentum"
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(before[3][name], after[3][name]) for name in before[3])
        assert after[4] == pytest.approx(before[4], rel=1e-12)
    assert loaded[0][5] == [
        "step_00000005: the run continues from the weights of the last synchronization of 2 replicas. What each of "
        f"them learnt in the 2 steps since{more} and the optimizer states of all but the first are lost."
    ]


def test_resume_from_sync_step_keeps_the_steps_of_synchronization(ranks2, tmp_path):
    _, loaded = save_and_resume(ranks2, "dp_replicate=2", tmp_path, 4, then="dp_replicate=2 sync=average:3")
    # Steps 5, 6 and 7: replicas synchronize after the sixth, and train the seventh separately.
    ours, theirs = loaded[0], loaded[1]
    assert all(torch.equal(ours[2][name], theirs[2][name]) for name in ours[2])
    assert any(not torch.equal(ours[1][name], ours[2][name]) for name in ours[1])


def sent_in_each_step(plan_text: str, num_steps: int) -> list[int]:
    """Return the bytes that each step sends over dp_replicate."""
    ledger, plan = Ledger(), Plan.parse(plan_text)
    mesh = build_mesh(plan, record=ledger.record)
    model = parallelize(CASE.model(), mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    totals = [_over_replicas(ledger)]
    for index in range(num_steps):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        totals.append(_over_replicas(ledger))
    return [after - before for before, after in itertools.pairwise(totals)]


def _over_replicas(ledger: Ledger) -> int:
    return sum(found.num_bytes for axis, _, found in ledger.rows() if "dp_replicate" in axis or axis == "world")


def test_replicas_exchange_only_step_totals_between_synchronizations(ranks4):
    plan = "dp_replicate=2 dp_shard=2 zero=1"
    plain = ranks4.run(sent_in_each_step, plan, 2)[0]
    exact = ranks4.run(sent_in_each_step, f"{plan} sync=diloco:3", 6)[0]
    coded = ranks4.run(sent_in_each_step, f"{plan} sync=diloco:3 compress=int8", 6)[0]
    for found in (exact, coded):
        assert found[:2] == found[3:5] == [40, 40]
        assert found[2] == found[5]
    assert 0.9 * plain[1] < exact[2] < 1.1 * plain[1]
    assert coded[2] < 0.5 * exact[2] / 1.5


def train_with_nan(plan_text: str, spoils: int) -> tuple[list[str | None], list[bool], str]:
    """Return why steps were skipped, whether weights changed, and the error of synchronizing non-finite weights."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model(), mesh)
    loss_factors: list[float] = []

    def loss(output, batch):
        loss_sum, number = CASE.loss(output, batch)
        return (loss_sum * loss_factors.pop() if loss_factors else loss_sum), number

    step = TrainStep(model, CASE.optimizer_of(model), loss, mesh, forward=CASE.forward)
    why, moved = [], []
    for index in range(2):
        before = {name: one.clone() for name, one in data_parallel(model).local_weights().items()}
        if index == 1 and mesh.rank == spoils:
            loss_factors.append(float("nan"))
        why.append(step(local_microbatches(CASE.batch(index), plan, mesh.data.rank)).skipped)
        after = data_parallel(model).local_weights()
        moved.append(any(not torch.equal(one, after[name]) for name, one in before.items()))
    if mesh.rank == spoils:
        next(iter(data_parallel(model).local_weights().values())).fill_(torch.inf)
    anchors = [one.flat.clone() for one in rare_sync(model).anchors()]
    with pytest.raises(CommError) as caught:
        rare_sync(model).after_step()
    assert all(torch.equal(one.flat, was) for one, was in zip(rare_sync(model).anchors(), anchors, strict=True))
    return why, moved, str(caught.value)


def test_non_finite_replica_is_reported_and_contained(ranks2):
    first, second = ranks2.run(train_with_nan, "dp_replicate=2 sync=average:3", 1)
    assert first == ([None, "1 of 2 replicas left it out"], [True, True], second[2])
    assert second[:2] == ([None, "1 of 2 replicas left it out, this one for: loss is nan"], [True, False])
    assert first[2] == (
        "sync=average:3: weights of rank 1 are not finite, and nothing was exchanged. Resume from the last checkpoint "
        "with a lower learning rate."
    )


def step_outside_train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_sum, number = CASE.loss(CASE.forward(model, CASE.batch(0)), CASE.batch(0))
    (loss_sum / number).backward()
    optimizer.step()


def own_loop(plan_text: str) -> list[str]:
    errors = []
    mesh = build_mesh(Plan.parse(plan_text))
    model = parallelize(CASE.model(), mesh)
    optimizer = CASE.optimizer_of(model)
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            step_outside_train_step(model, optimizer)
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("inside", ["dp_shard=1", "dp_shard=2 zero=3"])
def test_backward_outside_a_train_step_is_rejected(inside, ranks2, ranks4):
    pool = ranks2 if "1" in inside else ranks4
    for errors in pool.run(own_loop, f"dp_replicate=2 {inside} sync=diloco:5"):
        assert set(errors) == {
            "sync=diloco:5: backward() came outside a train step, and only a train step counts the steps until "
            "replicas synchronize. Use run.train_step, or sync=step."
        }
