"""Means over one rank's samples are reported if results differ from one device, and only then."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftWarning
from weft.parallel.local_means import watch_local_means
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.script.script_run import Run
from weft.train.step.train_step import TrainStep


def start(plan: str) -> Run:
    return Run(plan := Plan.parse(plan), build_mesh(plan), Ledger(), 0)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)).double()


def uneven_batch(rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return four samples of 6 tokens with 5, 4, 1 and 1 labels, or a rank's half."""
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(6) > torch.tensor([5, 4, 1, 1])[:, None], -100)
    batch = {"input_ids": ids, "labels": labels}
    return batch if rank is None else {name: tensor.chunk(2)[rank] for name, tensor in batch.items()}


def own_loop(plan: str, weighted: bool) -> tuple[dict[str, torch.Tensor], list[float], list[str]]:
    """Return weights after two steps, losses and warnings."""
    run = start(plan)
    model, losses = run.parallelize(llama()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = uneven_batch(run.mesh.data.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            output = model(**batch)
            loss = output.loss
            if weighted:
                num_tokens = (batch["labels"][:, 1:] != -100).sum()
                loss = run.global_mean(output.loss * num_tokens, num_tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    messages = [str(one.message) for one in caught if one.category is WeftWarning]
    return {name: weight.clone() for name, weight in data_parallel(model).weights()}, losses, messages


def one_device() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, losses = llama(), []
    for _ in range(2):
        loss = model(**uneven_batch()).loss
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.grad
        losses.append(loss.item())
    return {name: param.detach() for name, param in model.named_parameters()}, losses


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3"])
def test_global_mean_in_a_user_loop_matches_one_device(plan, ranks2):
    weights, losses = one_device()
    for got, seen_losses, messages in ranks2.run(own_loop, plan + " precision=fp64", True):
        assert messages == []
        assert seen_losses == pytest.approx(losses, rel=1e-6)  # the model computes its loss in fp32
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=1e-8)


def test_model_mean_loss_warns_once_on_rank_zero(ranks2):
    weights, _ = one_device()
    (got, _, first), (_, _, second) = ranks2.run(own_loop, "dp_replicate=2 precision=fp64", False)
    assert second == []
    assert first == [
        "loss: the model's own loss is a mean over this rank's tokens, and gradients are means over 2 ranks: the "
        "result equals one device's only if all ranks have the same number of labels. Before backward() write\n"
        '    num_tokens = (batch["labels"][:, 1:] != -100).sum()\n'
        "    loss = run.global_mean(output.loss * num_tokens, num_tokens)"
    ]
    assert any(not torch.allclose(got[name], weight, rtol=1e-3) for name, weight in weights.items())


def images(**kinds) -> nn.Module:
    norm = kinds.get("norm", nn.BatchNorm2d)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4), nn.Flatten())


def parallelize_warnings(plan: str, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, build_mesh(Plan.parse(plan)))
    return [str(one.message) for one in caught if one.category is WeftWarning]


REMEDY = (
    "so results differ from one device with the full batch. Normalise a fixed number of samples together, under "
    "every plan:\n    run.parallelize(model, norm_group=32)  # train.norm_group=32 in a config\nor freeze the "
    "statistics of a pretrained model before run.parallelize: norm.eval() on each of them, or use GroupNorm"
)


def batch_norm_warnings(plan: str) -> list[str]:
    return parallelize_warnings(plan, images())


def test_batch_norm_over_ranks_warns_on_rank_zero(ranks2):
    assert ranks2.run(batch_norm_warnings, "dp_replicate=2 accumulation=3") == [
        [
            "batch norm in 1, 4: each of 2 ranks x 3 microbatches normalizes its own samples, " + REMEDY,
        ],
        [],
    ]


def test_batch_norm_warns_if_microbatches_split_a_batch():
    assert parallelize_warnings("accumulation=2", images()) == [
        "batch norm in 1, 4: each of 2 microbatches normalizes its own samples, " + REMEDY
    ]
    assert parallelize_warnings("dp_replicate=1", images()) == []
    assert parallelize_warnings("accumulation=2", images(norm=lambda size: nn.GroupNorm(2, size))) == []
    assert len(parallelize_warnings("accumulation=2", images().eval())) == 1  # a train step sets training mode
    frozen = images()
    frozen[1].eval()
    frozen[4].eval()
    assert parallelize_warnings("accumulation=2", frozen) == []


def sync_batch_norm_warnings(plan: str) -> list[str]:
    mesh = build_mesh(Plan.parse(plan))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(images(), mesh.data.group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch_local_means(model, mesh, groups_norms=False)
    return [str(one.message) for one in caught]


def test_sync_batch_norm_does_not_warn(ranks2):
    assert ranks2.run(sync_batch_norm_warnings, "dp_replicate=2") == [[], []]


def test_batch_norm_with_norm_group_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(images(), build_mesh(Plan.parse("accumulation=2")), norm_group=4)


def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def test_group_norm_and_frozen_statistics_match_one_device():
    batch = [torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(3)).double(), torch.zeros(4)]
    for make in (lambda: images(norm=lambda size: nn.GroupNorm(2, size)), lambda: frozen_statistics(images())):
        found = []
        for plan in ("precision=fp64", "precision=fp64 accumulation=2"):
            torch.manual_seed(0)
            mesh = build_mesh(Plan.parse(plan))
            model = parallelize(make(), mesh)
            step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, mesh)
            found.append([step(batch).loss])
            model.eval()  # as in an evaluation between steps
            found[-1] += [step(batch).loss for _ in range(2)]
        assert found[1] == pytest.approx(found[0], rel=1e-12)
        assert found[0][2] != found[0][0]


def frozen_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def batch_warnings(plan: str, same_samples: bool) -> list[str]:
    run = start(plan)
    model = run.parallelize(nn.Linear(3, 2))
    step = run.train_step(model, torch.optim.SGD, lambda out, b: (F.mse_loss(out, b[1], reduction="sum"), 4), lr=0.1)
    seed = 0 if same_samples else run.mesh.data.rank
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step([torch.randn(4, 3, generator=generator), torch.zeros(4, 2)])
    return [str(one.message) for one in caught if one.category is WeftWarning]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=3"])
def test_unsharded_loader_warns_once_on_rank_zero(plan, ranks2):
    assert ranks2.run(batch_warnings, plan, False) == [[], []]
    assert ranks2.run(batch_warnings, plan, True) == [
        [
            "batch: all 2 data-parallel ranks got the same samples at the first step, so together they do only the "
            "work of one. Shard the loader: loader = run.shard(loader)."
        ],
        [],
    ]
