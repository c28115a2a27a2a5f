"""Router balancing in a step against independent references, since parity cannot detect what both sides omit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.parity.moe_cases import MOE, MoECase
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.models.experts import Routing, routers
from weft.parallel.expert import ExpertBalance
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import train_case


def test_auxiliary_loss_is_weighted_by_trained_tokens():
    case = MoECase(MOE, global_batch=4, num_steps=1, max_grad_norm=0.0)
    found = train_case("accumulation=2 precision=fp64", case)
    unbalanced = dataclasses.replace(case, spec=dataclasses.replace(MOE, balance="none"))
    model, batch, losses = unbalanced.model(), case.batch(0), []

    def record(router, args, routing: Routing) -> None:
        probs = F.linear(args[0], router.weight).softmax(-1)
        for ids_TK, probs_TE in zip(routing.ids_BTK, probs, strict=True):
            share = F.one_hot(ids_TK, MOE.num_experts).sum((0, 1)) / ids_TK.numel()
            losses.append(len(ids_TK) * MOE.num_experts * (share * probs_TE.mean(0)).sum())

    for router in routers(model):
        router.register_forward_hook(record)
    loss_sum, num_tokens = case.loss(case.forward(model, batch), batch)
    assert len(losses) == 4 * len(MOE.moe_layers)
    ((loss_sum + MOE.balance_rate * sum(losses)) / num_tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-13, msg=name)
    # The reported loss excludes the auxiliary loss.
    assert found.losses[0] == pytest.approx(float(loss_sum.detach()) / int(num_tokens), rel=1e-12)


def biased_step(rate: float = 0.02) -> tuple[TrainStep, MoECase]:
    case = MoECase(dataclasses.replace(MOE, balance="bias", balance_rate=rate), global_batch=4, num_steps=1)
    mesh = build_mesh(Plan.parse("accumulation=2 precision=fp64"))
    model = parallelize(case.model(), mesh)
    return TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward), case


def test_step_updates_biases_once_from_all_microbatches():
    step, case = biased_step()
    counts = {}

    def record(router, args, routing: Routing) -> None:
        counts[router] = counts.get(router, 0) + F.one_hot(routing.ids_BTK, MOE.num_experts).sum((0, 1, 2))

    for router in routers(step.model):
        router.register_forward_hook(record)
    step(case.batch(0))
    for router in routers(step.model):
        assert int(counts[router].sum()) == 4 * case.seq_len * MOE.top_k
        even = counts[router].double().mean()
        assert router.bias_ppm.tolist() == (20_000 * (even - counts[router]).sign()).long().tolist()


def test_skipped_step_keeps_biases_and_resets_counts():
    step, case = biased_step()
    masked = case.batch(0)
    masked["labels"] = torch.full_like(masked["labels"], -100)
    assert step(masked).skipped is not None
    assert all(not router.bias_ppm.any() for router in routers(step.model))
    step(case.batch(0))
    assert all(int(router.load.tokens_E.sum()) == 4 * case.seq_len * MOE.top_k for router in routers(step.model))


def test_model_without_routers_needs_no_balancing():
    balance = ExpertBalance(torch.nn.Linear(2, 2), build_mesh(Plan()))
    balance.begin(1.0)
    balance.start()
    balance.finish(moved=True)
