"""Golden texts of what private training refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.privacy.private_cases import KEY, RECORDS, PrivateCase, decoder, loss_fn, records, script
from weft.comm.ledger import Ledger as Traffic
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError, ConfigError, DataError, ModelError, PlanError
from weft.privacy.keys import create_key, read_key
from weft.privacy.ledger import PrivacyLedger
from weft.privacy.settings import Privacy
from weft.train.losses import group_loss
from weft.train.privacy.units import numbered_values

GOOD = {"records": 100, "batch": 10, "steps": 5, "delta": 1e-3, "noise": 1.0, "key": KEY}
SETTINGS = [
    ({"delta": 0.01}, "privacy.delta=0.01: with 100 records, a delta from 1/100 on allows to publish a whole record. "
     "Use delta=0.001."),
    ({"batch": 200}, "privacy.batch=200: a step draws at most the 100 records. Use a batch of at most 100."),
    ({"noise": None}, "privacy.epsilon: neither epsilon nor noise is set. Set epsilon=8, or noise=1.0."),
    ({"clip": 0.0}, "privacy.clip=0: it is a positive number. Use clip=1.0."),
    ({"unit": "user", "canaries": 5}, "privacy.canaries=5: canaries are single samples. Use unit=sample, or none."),
    ({"unit_records": 3}, "privacy.unit_records=3: it limits the records of a unit that has several. Use "
     "unit_records=0, or a column as unit."),
    ({"accountant": "rdp"}, "privacy.accountant=rdp: it is prv or pld. Use accountant=prv."),
    ({"passes": 3}, "privacy.passes=3: it is 1, 2, or 0 to choose. Use passes=0."),
    ({"records": 0}, "privacy.records=0: it is a number from 1 on. Use records=1000."),
]  # fmt: skip


@pytest.mark.parametrize("change, text", SETTINGS)
def test_settings(change, text):
    with pytest.raises(PlanError) as caught:
        Privacy(**{**GOOD, **change})
    assert str(caught.value) == text


def step_of(model: nn.Module, plan: str = "", loss=loss_fn, **options):
    chosen = Plan.parse(plan)
    run = weft.Run(chosen, build_mesh(Plan()), Traffic(), seed=0)
    run.mesh.plan = chosen
    return run, run.train_step(
        run.parallelize(model), torch.optim.SGD, loss, lr=0.1, privacy=Privacy(**GOOD), **options
    )


def test_max_grad_norm():
    with pytest.raises(PlanError, match=r"with privacy, the gradient of each sample is clipped to privacy.clip. Leave"):
        step_of(nn.Linear(2, 2), max_grad_norm=1.0)


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x))


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x):
        return self.weight(x - x.mean(0))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0)


class CustomLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Custom.apply(x, self.scale)


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x[0] * self.weight.cumsum(0))[None]


MODELS = [
    (lambda: Block(nn.BatchNorm1d(4)), "privacy: layer (BatchNorm1d) mixes the samples of a batch. Use nn.GroupNorm or "
     "nn.LayerNorm."),
    (lambda: decoder(num_experts=4, expert_ffn_dim=8), "privacy: blocks.0.mlp.router (Router) balances experts over "
     "the tokens of all samples, outside the clipped gradients. Use model.balance=none."),
    (lambda: decoder(num_experts=4, expert_ffn_dim=8, balance="none", capacity_factor=1.0), "privacy: "
     "blocks.0.mlp.router (Router) drops tokens by the load of other samples. Use model.capacity_factor=0."),
]  # fmt: skip


@pytest.mark.parametrize("make, text", MODELS)
def test_models(make, text):
    with pytest.raises(ModelError) as caught:
        step_of(make())
    assert str(caught.value) == text


def samples_loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


FIRST = [
    (Mixes, "so the model mixes samples or its rows are not samples. Put samples first"),
    (CustomLayer, r"privacy: the gradient of layer.scale comes from a custom autograd function, a checkpointed part or "
    "the loss function, so it would not be clipped"),
    (Keyword, "privacy: layer must read tensors with one row for each of the 4 samples, and return one such tensor"),
]  # fmt: skip


@pytest.mark.parametrize("layer, text", FIRST)
def test_first_step_refuses(layer, text):
    _, step = step_of(Block(layer()), loss=samples_loss)
    with pytest.raises(ModelError, match=text):
        step((torch.randn(4, 4), torch.tensor([0, 1, 0, 1])))


def test_losses_that_compare_samples():
    with pytest.raises(ModelError, match=r"privacy: GroupLoss compares samples, so no sample has a loss of its own."):
        step_of(nn.Linear(2, 2), loss=group_loss(2)(lambda own, every, places: (own[0].sum(), 1)))


def test_packed_documents():
    ids = torch.randint(0, 13, (2, 6))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    _, step = step_of(decoder(), loss=lambda output, batch: (output.sum(), 1))
    with pytest.raises(ModelError, match="a row of the batch packs several documents, so clipping a row bounds none"):
        step({"input_ids_BT": ids, "document_ids_BT": documents})


def test_packed_positions():
    from weft.privacy.rules import check_batch

    check_batch({"position_ids": torch.arange(6).repeat(2, 1)}, 2)
    check_batch({"position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]])}, 1)  # padding on the left
    with pytest.raises(ModelError, match="a row of the batch packs several documents"):
        check_batch({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, 1)


def test_tasks_with_steps_of_their_own(tmp_path):
    from tests.privacy.private_task import Points
    from weft.config.run_config import RunConfig
    from weft.train.privacy.records import private_records

    class Changed(Points):
        def before_step(self, batches):
            return batches

    class Streamed(Points):
        def batches(self, share):
            return super().batches(share)

    config = RunConfig.model_validate({"privacy": {"epsilon": 8.0, "delta": 1e-5}})
    assert len(private_records(config, Points())) == 200
    for task, name in ((Changed(), "before_step"), (Streamed(), "batches")):
        with pytest.raises(ConfigError, match=f"{type(task).__name__} has a {name} of its own, so its steps are not m"):
            private_records(config, task)
    by_user = RunConfig.model_validate({"privacy": {"epsilon": 8.0, "delta": 1e-5, "unit": "2"}})
    assert len(private_records(by_user, Points())) == 15
    with pytest.raises(DataError, match=r"privacy.unit=2: record 7 has no single value in it. Its columns: 0, 1, 2."):
        private_records(by_user, Points(gap=7))


def test_one_user_has_one_number_whatever_the_type_of_the_value():
    values = [7, "7", 7.0, torch.tensor(7), np.float32(7), 12.5, "12.5", -0.0, 0]
    assert numbered_values([{"user": value} for value in values], "user").tolist() == [2] * 5 + [1, 1, 0, 0]


PLANS = [
    ("recompute=full", "recompute=full: with privacy, the recorder does not see a forward that runs again in backward. "
     "Use recompute=none."),
    ("compile=on", "compile=on: with privacy, the recorder does not see the operations of a "
    "compiled block. Use compile=off."),
    ("precision=fp16", "precision=fp16: with privacy, norms in fewer bits are not bounds. Use precision=fp32."),
]  # fmt: skip


@pytest.mark.parametrize("plan, text", PLANS)
def test_plans(plan, text):
    from weft.privacy.rules import check_plan

    with pytest.raises(PlanError) as caught:
        check_plan(Plan.parse(plan))
    assert str(caught.value) == text


def test_contexts_are_refused():
    from weft.privacy.rules import check_plan

    with pytest.raises(
        PlanError, match="cp=2: with privacy, the norm of a sample's gradient needs all its tokens on one"
    ):
        check_plan(Plan.parse("cp=2"))


def refused_under(model: str, plan: str) -> str:
    with pytest.raises((ModelError, PlanError)) as caught:
        script(PrivateCase(model, plan, passes=1 if "zero=3" in plan else 0))
    return str(caught.value)


@pytest.mark.parametrize(
    "model, plan, text",
    [
        ("experts", "tp=2", "are on several ranks, and so are the rows of a sample. Use tp=1 and ep=1."),
        ("tied", "pp=2 microbatches=2", "shares its weight with a layer of another pipeline stage"),
        ("net", "dp_shard=2 zero=3", "privacy.passes=1: zero=3 reduces gradients before the norms are known."),
    ],
)
def test_plans_and_models(model, plan, text, ranks2):
    for found in ranks2.run(refused_under, model, plan):
        assert text in found


def test_other_records():
    run, _, step = script(PrivateCase("net"))
    with pytest.raises(PlanError, match=f"privacy.records={RECORDS}: the data set has 50, one for each record. Use"):
        next(run.private_batches(records()[:50], step))
    run, _, step = script(PrivateCase("net", batch=3, by_user=True))
    with pytest.raises(
        PlanError, match=r"privacy.records=8: the data set has 7, one for each value of 2. Use records="
    ):
        next(run.private_batches(records()[:49], step))


def test_key_files(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"No such file or directory. Name the key file of this run"):
        read_key(str(path))
    create_key(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    first = read_key(str(path))
    create_key(str(path))
    assert read_key(str(path)) == first
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"its mode is 0640, so others may read it. Run: chmod 600"):
        read_key(str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="it has 5 bytes, and a key has 32"):
        read_key(str(path))


def test_accounts_of_other_records_are_refused():
    ledger = PrivacyLedger(Privacy(**GOOD))
    for _ in range(3):
        ledger.add()
    saved = ledger.to_json()
    other = PrivacyLedger(Privacy(**{**GOOD, "noise": 2.0}))
    other.restore(saved)
    other.add()
    assert [one.count for one in other.steps] == [3, 1]
    with pytest.raises(CheckpointError, match=r"privacy.records=200: the checkpoint's steps were accounted with 100"):
        PrivacyLedger(Privacy(**{**GOOD, "records": 200})).restore(saved)
    with pytest.raises(CheckpointError, match="the checkpoint's steps were not private, so no bound holds"):
        other.restore(None)
    with pytest.raises(CheckpointError, match="the checkpoint's account is damaged"):
        other.restore({**saved, "steps": [["x"]]})
    with pytest.raises(CheckpointError, match="the checkpoint's account has impossible steps"):
        other.restore({**saved, "steps": [[-1.0, 0.1, 3]]})
