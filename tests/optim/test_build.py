from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.config.sections import OptimizerGroup, OptimizerSection
from weft.errors import ConfigError
from weft.optim.build import build_optimizer, check_optimizer, freeze


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return net


def test_adamw_decays_only_matrices_and_skips_frozen_parameters():
    net = model()
    section = OptimizerSection(lr=0.01, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    optimizer = build_optimizer(net.named_parameters(), section)
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, vectors = optimizer.param_groups
    assert {id(p) for p in matrices["params"]} == {id(net[0].weight), id(net[2].weight)}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert (matrices["lr"], matrices["betas"], matrices["eps"], matrices["fused"]) == (0.01, (0.8, 0.9), 1e-6, True)
    assert id(net[0].bias) not in {id(p) for p in vectors["params"]}


def test_sgd_matches_torch():
    torch.manual_seed(0)
    ours, theirs = model(), model()
    theirs.load_state_dict(ours.state_dict())
    section = OptimizerSection(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=True)
    first = build_optimizer(ours.named_parameters(), section)
    second = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
    x = torch.randn(8, 3)
    for _ in range(3):
        for net, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)


def groups_of(section: OptimizerSection, net: nn.Module) -> dict[str, dict]:
    """Return each parameter's group by name, without the parameters."""
    names = {id(param): name for name, param in net.named_parameters()}
    optimizer = build_optimizer(net.named_parameters(), section)
    return {
        names[id(param)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_muon_trains_embedding_head_and_vectors_with_adamw():
    groups = groups_of(OptimizerSection(name="muon", lr=0.01), Decoder())
    assert [name for name, group in groups.items() if group["matrices"]] == ["block.weight"]
    assert {group["momentum"] for group in groups.values()} == {0.95}
    assert groups["block.bias"]["weight_decay"] == 0.0


def test_first_matching_group_sets_rate_and_decay():
    chosen = (
        OptimizerGroup(match="*.bias", weight_decay=0.5),
        OptimizerGroup(match="block.*", lr=0.002),
        OptimizerGroup(match="block.bias", lr=9.0),
    )
    groups = groups_of(OptimizerSection(lr=0.01, weight_decay=0.1, groups=chosen), Decoder())
    found = {name: (group["initial_lr"], group["weight_decay"]) for name, group in groups.items()}
    assert found == {
        "embed.weight": (0.01, 0.1),
        "block.weight": (0.002, 0.1),
        "block.bias": (0.01, 0.5),
        "head.weight": (0.01, 0.1),
    }


def test_learning_rate_zero_freezes_parameters():
    net, section = Decoder(), OptimizerSection(groups=(OptimizerGroup(match="embed.*", lr=0.0),))
    freeze(net, section)
    assert [name for name, param in net.named_parameters() if not param.requires_grad] == ["embed.weight"]
    assert "embed.weight" not in groups_of(section, net)


class Plain(torch.optim.Optimizer):
    """An optimizer without weight decay."""

    def __init__(self, params, lr, factor=1.0):
        super().__init__(params, {"lr": lr, "factor": factor})


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


def test_optimizer_class_gets_its_supported_settings():
    section = OptimizerSection(name="torch.optim:Adafactor", lr=0.02, options={"beta2_decay": -0.7})
    optimizer = build_optimizer(Decoder().named_parameters(), section)
    assert isinstance(optimizer, torch.optim.Adafactor)
    assert [(group["lr"], group["beta2_decay"]) for group in optimizer.param_groups] == [(0.02, -0.7)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    own = build_optimizer(Decoder().named_parameters(), OptimizerSection(name=f"{__name__}:Plain"))
    assert "weight_decay" not in own.param_groups[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": (OptimizerGroup(match="blok.*"),)},
         "optimizer.groups.0.match=blok.*: no parameter has such a name. Names are such as "
         "embed.weight, block.weight, block.bias, head.weight."),
        ({"groups": (OptimizerGroup(match="*"), OptimizerGroup(match="head.*"))},
         "optimizer.groups.1.match=head.*: earlier groups take every parameter that it matches. Names are such as "
         "embed.weight, block.weight, block.bias, head.weight."),
        ({"groups": (OptimizerGroup(match="*", lr=0.0),)},
         "optimizer.groups: every parameter has lr=0, so nothing is trained. Leave some out of the groups."),
        ({"name": "nowhere.at_all:Lion"},
         "optimizer.name=nowhere.at_all:Lion: it cannot be imported (No module named 'nowhere'). "
         "Name a class importable from this folder."),
        ({"name": "torch.nn:Linear"},
         "optimizer.name=torch.nn:Linear: it is not a subclass of torch.optim.Optimizer. Name one that is."),
        ({"name": f"{__name__}:WithoutRate"},
         f"optimizer.name={__name__}:WithoutRate: it has no lr argument, which the schedule sets. Wrap it in a class "
         "that does."),
        ({"name": f"{__name__}:Plain", "options": {"factr": 2}},
         f"optimizer.options.factr: {__name__}:Plain has no such argument. It takes factor."),
        ({"name": f"{__name__}:Plain", "options": {"lr": 2}},
         "optimizer.options.lr: this is a setting of the section itself. Use optimizer.lr=."),
        ({"name": "torch.optim:Adafactor", "options": {"beta2_decay": 3.0}},
         "optimizer.options: torch.optim:Adafactor refuses them: ValueError: beta2_decay should be <= 0 but is: 3.0. "
         "Change or leave them out."),
    ],
)  # fmt: skip
def test_invalid_optimizer_settings_raise_one_sentence(settings, message):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(Decoder().to("meta"), OptimizerSection(**settings))
    assert str(caught.value) == message
