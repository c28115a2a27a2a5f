"""Block containers and data flows between blocks match one process, or are rejected with the reason."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch.nn import functional as F

from tests.choice import todays
from tests.parallel.pipeline.flows import FLOWS, REFUSED, FlowCase, Model, batch_of, build, train_flows
from weft.errors import ModelError
from weft.models.inspect.chain import find_chain
from weft.parallel.pipeline.boundary import Carried
from weft.parallel.pipeline.stage import Stage
from weft.parallel.pipeline.survey import ValueSurvey
from weft.verify.parity import train_plain


def call(model, ids):
    return model(ids)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")


def staged(model: Model, splits: list[int], num_batches: int = 1) -> torch.Tensor:
    """Run a model as stages in one process, forward and backward. Return the sum of losses."""
    chain = find_chain(model)
    survey = ValueSurvey(model, chain, [*splits, len(chain.blocks)])
    stages = [
        Stage(model, chain, survey, index, takes_gradient=index > 0, trains=True) for index in range(len(splits) + 1)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for number in range(num_batches):
        ids = batch_of(number)
        leaves, roots, incoming = [], [], None
        for stage in stages:
            output = stage.forward(call, ids, incoming)
            roots.append(output)
            if not stage.is_last:
                incoming = Carried(
                    output.slots,
                    tuple(
                        each.detach().requires_grad_() if each.is_floating_point() else each for each in output.tensors
                    ),
                )
                leaves.append(incoming)
        loss = loss_of(output, ids)
        loss.backward()
        total += loss.detach()
        for root, leaf in reversed(list(zip(roots, leaves, strict=False))):
            pairs = [
                (each, got.grad)
                for each, got in zip(root.tensors, leaf.tensors, strict=True)
                if each.requires_grad and got.grad is not None
            ]
            torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])
    return total


def splits_of(model: Model) -> list[list[int]]:
    count = len(find_chain(model).blocks)
    half = count // 2
    return [[half], [1], [count - 1], sorted({1, half, count - 1})]


@pytest.mark.parametrize("name", todays(FLOWS))
def test_stages_match_one_process(name):
    plain = build(FLOWS[name])
    total = torch.zeros((), dtype=torch.float64)
    for number in range(2):
        ids = batch_of(number)
        loss = loss_of(plain(ids), ids)
        loss.backward()
        total += loss.detach()
    for splits in splits_of(build(FLOWS[name])):
        model = build(FLOWS[name])
        assert staged(model, splits, 2).item() == pytest.approx(total.item(), rel=1e-12), splits
        for (path, got), (_, expected) in itertools.zip_longest(model.named_parameters(), plain.named_parameters()):
            if expected.grad is None:
                assert got.grad is None or not got.grad.any(), (splits, path)
                continue
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-11, atol=1e-13, msg=f"{splits} {path}")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_data_flow_is_rejected(name):
    kind, match = REFUSED[name]
    model = build(kind)
    with pytest.raises(ModelError, match=match):
        staged(model, [len(find_chain(model).blocks) // 2])


#: Cases at risk on ranks: weights in several stages, values that bypass blocks, and outputs of every form.
SOME = [
    *("InDict", "NumberedAttributes", "ListsOfParts", "PositionsUsedAgain", "NormFirst", "TiedByWeight", "TiedHead"),
    *("SharedInside", "SharedBlocks", "Residual", "DetachedSkip", "UNet", "FrozenTeacher", "Dicts", "AuxAttribute"),
    *("EncoderDecoder", "TwiceAround", "LossList"),
]
PLANS = [
    "pp=2 microbatches=2",
    "pp=2 microbatches=2 schedule=interleaved virtual_stages=2",
    "pp=2 microbatches=4 schedule=zb_h1 recompute=full zero=2",
]


def check_ranks(ranks, plan: str, names: list[str]) -> None:
    results = ranks.run(train_flows, plan, names)
    for name in names:
        for found in (result[name] for result in results):
            if name in REFUSED:
                assert isinstance(found, str), name
                assert re.search(REFUSED[name][1], found), (name, found)
            else:
                assert not isinstance(found, str), (name, found)
                assert found.largest_difference(train_plain(FlowCase(name))) < 1e-10, name


def test_chosen_flows_match_one_process_on_two_ranks(ranks2):
    check_ranks(ranks2, PLANS[0], SOME)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_every_flow_matches_one_process_on_two_ranks(plan, ranks2):
    names = [name for name in (*FLOWS, *REFUSED) if "virtual" not in plan or name not in TWO_BLOCKS_PER_STAGE]
    for start in range(0, len(names), 20):
        check_ranks(ranks2, plan, names[start : start + 20])


#: Cases that need two consecutive blocks in one stage.
TWO_BLOCKS_PER_STAGE = {"SharedBlocks"}
#: Cases that zero=3 gathers by unit.
UNITS = [
    *("InDict", "InNamedDict", "NumberedAttributes", "NamedAttributes", "PythonList", "SequentialOfSequentials"),
    *("ListsOfParts", "DictsOfParts", "PartsOfBlocksCalled", "TiedByWeight", "SharedInside", "UNet", "AuxAttribute"),
    *("Positions", "Scales", "Dataclasses", "Dicts", "KeywordsAndExtras"),
]


@pytest.mark.full
def test_zero_3_gathers_units_for_every_reader(ranks2):
    check_ranks(ranks2, "dp_shard=2 zero=3", UNITS)
