"""Recompute policies change the saved bytes but no result, on models of every kind."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.choice import todays
from tests.memory.models import GPT2, HAVE_ATTENTION, LLAMA, MODELS, token_ids
from tools.live_memory import LiveTensors
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError
from weft.memory.recompute import apply_recompute, recompute_of
from weft.models.inspect.blocks import repeated_blocks
from weft.models.registry import build_decoder

POLICIES = ["full", "selective", "attention", "70%"]


def two_steps(model: nn.Module, call) -> dict[str, torch.Tensor]:
    """Return losses, gradients and buffers of two training passes. The first pass inspects the blocks."""
    found = {}
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(10 + step)
        loss = call(model).square().mean()
        loss.backward()
        found[f"loss{step}"] = loss.detach()
        found[f"draw{step}"] = torch.rand(3)
        found |= {f"grad{step}.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"buffer{step}.{name}": b.clone() for name, b in model.named_buffers()}
    return found


@pytest.fixture(scope="module")
def references():
    known = {}

    def reference(name: str) -> dict[str, torch.Tensor]:
        if name not in known:
            model, call = MODELS[name]()
            known[name] = two_steps(model, call)
        return known[name]

    return reference


@pytest.mark.parametrize(("name", "setting"), todays(itertools.product(MODELS, POLICIES), parts=2))
def test_recompute_matches_no_recompute(name, setting, references):
    model, call = MODELS[name]()
    names = list(model.state_dict())
    if (name, setting) == ("plain-cnn", "full"):
        with pytest.raises(ModelError, match="it recomputes one repeated block at a time"):
            apply_recompute(model, Plan(recompute=setting))
        return
    apply_recompute(model, Plan(recompute=setting))
    assert list(model.state_dict()) == names
    if setting == "attention" and name not in HAVE_ATTENTION:
        with pytest.raises(ModelError, match="makes no call of scaled_dot_product_attention"):
            call(model)
        return
    found, expected = two_steps(model, call), references(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-10, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", ["llama-documents", "hf-gpt2", "cnn"])
def test_every_budget_choice_matches_no_recompute(name, references, monkeypatch):
    """The first backward recomputes blocks after the choice was made, which must not affect it."""
    used = set()
    for shift in range(10):
        model, call = MODELS[name]()
        recompute = apply_recompute(model, Plan(recompute="90%"))
        pick = lambda menus, budget, shift=shift: [(shift + index) % len(menu) for index, menu in enumerate(menus)]  # noqa: E731
        monkeypatch.setattr("weft.memory.recompute.cheapest_choice", pick)
        found = two_steps(model, call)
        for key, value in references(name).items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)
        used |= {policy.name for policy in recompute.policies.values()}
    assert used >= {"none", "selective", "full"}
    assert ("attention" in used) == (name in HAVE_ATTENTION)


def saved_and_peak_bytes(setting: str, model: nn.Module, call) -> tuple[int, int]:
    """Return the bytes alive after the second forward, without the output, and the peak in its backward."""
    apply_recompute(model, Plan(recompute=setting))
    for _ in range(2):
        model.zero_grad()
        with LiveTensors([*model.parameters(), *model.buffers()]) as live:
            output = call(model)
            saved = live.now - output.untyped_storage().nbytes()
            live.peak = 0
            output.sum().backward()
        del output
    return saved, live.peak


@pytest.mark.parametrize("name", ["llama", "llama-documents", "gpt2", "hf-gpt2", "hf-qwen2", "hf-gpt2-eager"])
def test_saved_bytes_decrease_with_the_policy(name):
    none, selective, full = (
        saved_and_peak_bytes(setting, *MODELS[name]()) for setting in ("none", "selective", "full")
    )
    assert full[0] < 0.25 * none[0]
    assert full[0] < selective[0] < 0.75 * none[0]
    assert full[1] < selective[1] < none[1]


def test_selective_saves_products_and_attention_that_recompute_needs():
    model, call = MODELS["llama"]()
    recompute = apply_recompute(model, Plan(recompute="selective"))
    call(model).sum().backward()
    # q, k, v, attention, o, gate, up, but not down, which is the last operation.
    assert {policy.saved for policy in recompute.policies.values()} == {frozenset(range(7))}


def test_selective_recomputes_attention_scores():
    """Without fused attention, scores grow quadratically with the sequence, so they are recomputed."""

    def at_length(setting, num_tokens):
        model, _ = MODELS["hf-gpt2-eager"]()
        return saved_and_peak_bytes(setting, model, lambda model: model(token_ids(1, num_tokens)).logits)[0]

    none, selective = (at_length(setting, 64) / at_length(setting, 16) for setting in ("none", "selective"))
    assert none > 5.5
    assert selective < 4.5


def test_weights_are_not_counted_as_activations():
    shape = replace(LLAMA, vocab_size=3000, tied=False)

    def build():
        return build_decoder(shape, dtype=torch.float64, seed=0), lambda model: model(token_ids())

    none, _ = saved_and_peak_bytes("none", *build())
    model, call = build()
    saved_and_peak_bytes("80%", model, call)
    assert recompute_of(model).full_bytes == pytest.approx(none, rel=0.02)


def test_attention_policy_recomputes_large_attention_state():
    """Use attention that saves its scores. Fused attention saves one number per row."""

    class Scores(nn.Module):
        def forward(self, q, k, v, visible):
            scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
            return nn.functional.scaled_dot_product_attention(
                scores.softmax(-1), scores.tanh(), v.repeat_interleave(2, 1)
            )

    def build():
        model, call = MODELS["llama"]()
        for block in model.blocks:
            block.attn.core = Scores()
        return model, call

    none, attention = saved_and_peak_bytes("none", *build()), saved_and_peak_bytes("attention", *build())
    assert attention[0] < 0.8 * none[0]
    assert attention[1] < none[1]


@pytest.mark.parametrize(
    ("setting", "name"),
    todays(
        itertools.product(["90%", "70%", ".5", "40%"], ["llama-documents", "hf-gpt2", "cnn", "hf-gpt2-eager"]), parts=3
    ),
)
def test_budget_is_met_and_mostly_used(name, setting):
    model, call = MODELS[name]()
    none, _ = saved_and_peak_bytes("none", *MODELS[name]())
    saved, _ = saved_and_peak_bytes(setting, model, call)
    recompute = recompute_of(model)
    allowed = none * (float(setting) if "." in setting else int(setting[:-1]) / 100)
    assert recompute.full_bytes == pytest.approx(none, rel=0.05)
    assert recompute.kept_bytes == pytest.approx(saved, rel=0.05)
    assert saved < 1.05 * allowed
    assert saved > 0.75 * allowed


def test_budget_in_bytes_mixes_policies_and_reports_them():
    model, call = MODELS["llama"]()
    saved, _ = saved_and_peak_bytes("350KiB", model, call)
    assert 0.8 * 350 * 2**10 < saved <= 350 * 2**10
    recompute = recompute_of(model)
    assert len(set(recompute.policies.values())) > 1
    text = recompute.describe()
    assert text.startswith("350KiB: 4 blocks as ")
    assert " of the blocks' forward again" in text


def test_large_budget_recomputes_nothing():
    model, call = MODELS["llama"]()
    saved_and_peak_bytes("1GiB", model, call)
    assert {policy.name for policy in recompute_of(model).policies.values()} == {"none"}


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("20KiB", r"Use recompute=1MiB, or a larger accumulation\."), ("3%", r"Use recompute=\d+%, or a larger")],
)
def test_budget_below_full_recompute_is_rejected(setting, remedy):
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute=setting))
    with pytest.raises(
        PlanError, match=f"recompute={setting}: one microbatch keeps .* even with recompute=full.*{remedy}"
    ):
        call(model)


def test_prepare_chooses_policies_without_side_effects(references):
    model, call = MODELS["cnn"]()
    recompute = apply_recompute(model, Plan(recompute="60%"))
    assert recompute.describe() == "60%: chosen in the first forward"
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    recompute.prepare(model, lambda: call(model))
    assert recompute.is_chosen
    torch.testing.assert_close(torch.rand(2), expected, rtol=0, atol=0)
    found = two_steps(model, call)
    for key, value in references("cnn").items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)


def test_forward_without_gradients_chooses_no_policy():
    model, call = MODELS["llama"]()
    recompute = apply_recompute(model, Plan(recompute="50%"))
    with torch.no_grad():
        call(model)
    assert not recompute.is_chosen
    call(model).sum().backward()
    assert recompute.is_chosen


@pytest.mark.parametrize("setting", ["full", "selective", "50%"])
def test_copied_model_has_own_weights_and_equal_policies(setting):
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute=setting))
    early = copy.deepcopy(model)
    call(model).sum().backward()
    late = copy.deepcopy(model)
    for copied in (early, late):
        with torch.no_grad():
            copied.embed.weight.mul_(2.0)
        copied.zero_grad()
        call(copied).sum().backward()
        assert [b._weft_policy for b in copied.blocks] == [b._weft_policy for b in model.blocks]
        assert not torch.equal(copied.embed.weight.grad, model.embed.weight.grad)
        assert all(type(block).__name__ == "Block" for block in copied.blocks)


def test_blocks_called_directly_choose_at_the_second_microbatch():
    model, _ = MODELS["llama"]()
    recompute = apply_recompute(model, Plan(recompute="50%"))
    from weft.models.attention import rotation, see_causally

    positions = torch.arange(24)[None]
    turn = rotation(positions, 8, 1e4, 1.0, torch.float64)
    for _ in range(2):
        x = model.embed(token_ids())
        for block in model.blocks:
            x = block(x, see_causally(positions, None, 0, x.dtype), turn)
        x.sum().backward()
    assert recompute.is_chosen


def test_second_apply_recompute_replaces_the_first():
    model, call = MODELS["llama"]()
    kinds = [type(module) for module in model.modules()]
    # A budget chooses the policy that was measured to be fastest.
    for setting, others in (
        ("attention", {"none", "selective"}),
        ("60%", {"none", "selective", "full"}),
        ("full", set()),
    ):
        apply_recompute(model, Plan(recompute=setting))
        call(model).sum().backward()
        assert {policy.name for policy in recompute_of(model).policies.values()} <= {setting, *others}
    full, _ = saved_and_peak_bytes("full", model, call)
    assert full == saved_and_peak_bytes("full", *MODELS["llama"]())[0]
    apply_recompute(model, Plan())
    assert [type(module) for module in model.modules()] == kinds


def test_block_with_replaced_forward_is_rejected():
    model = build_decoder(GPT2, seed=0)
    model.blocks[1].forward = model.blocks[1].forward
    with pytest.raises(
        ModelError, match=r"recompute=selective: the forward of blocks\.1 is replaced already\. Give the"
    ):
        apply_recompute(model, Plan(recompute="selective"))


def test_filled_cache_in_a_recomputed_block_is_rejected():
    from transformers import DynamicCache

    model, _ = MODELS["hf-qwen2"]()
    cache = DynamicCache(config=model.config)
    name = next(name for name in ("cache", "past_key_values") if name in inspect.signature(model.forward).parameters)
    with torch.no_grad():
        model(token_ids(), **{name: cache})
    apply_recompute(model, Plan(recompute="full"))
    with pytest.raises(ModelError, match="DynamicCache in a recomputed block: it has tokens already"):
        model(token_ids(), **{name: cache})


def test_recompute_none_leaves_the_model_unchanged():
    model = build_decoder(LLAMA, seed=0)
    kinds = [type(module) for module in model.modules()]
    assert apply_recompute(model, Plan()).describe() == "none: every activation is kept"
    assert [type(module) for module in model.modules()] == kinds


class Experts(nn.Module):
    """A block with a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)


class Pair(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class ModelWithModules(nn.Module):
    """A model with the given modules as attributes."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        for name, module in modules.items():
            setattr(self, name, module)
        self.head = nn.Linear(2, 4)


CONTAINERS = {
    "ModuleDict with numbers": (lambda: {"l": nn.ModuleDict({"0": Experts(), "1": Experts()})}, ["l.0", "l.1"]),
    "ModuleDict with names": (lambda: {"l": nn.ModuleDict({"a": Experts(), "b": Experts()})}, ["l.a", "l.b"]),
    "ModuleDict of parts": (
        lambda: {"l": nn.ModuleDict({"wte": nn.Embedding(4, 2), "h": nn.ModuleList([Experts(), Experts()])})},
        ["l.h.0", "l.h.1"],
    ),
    "ModuleList of ModuleLists": (
        lambda: {"l": nn.ModuleList([nn.ModuleList([nn.LayerNorm(2), Experts()]) for _ in range(2)])},
        ["l.0.0", "l.0.1", "l.1.0", "l.1.1"],
    ),
    "ModuleList of ModuleDicts": (
        lambda: {"l": nn.ModuleList([nn.ModuleDict({"n": nn.LayerNorm(2), "f": Experts()}) for _ in range(2)])},
        ["l.0.n", "l.0.f", "l.1.n", "l.1.f"],
    ),
    "numbered attributes": (lambda: {"layer0": Experts(), "layer1": Experts()}, ["layer0", "layer1"]),
    "attributes": (lambda: {"first": Pair(), "second": Pair()}, ["first", "second"]),
    "Sequential": (lambda: {"l": nn.Sequential(Experts(), Experts())}, ["l.0", "l.1"]),
    "Sequential of Sequentials": (
        lambda: {"l": nn.Sequential(nn.Sequential(Experts(), Experts()), nn.Sequential(Experts()))},
        ["l.0.0", "l.0.1", "l.1.0"],
    ),
    "linear layers": (lambda: {"fc1": nn.Linear(2, 2), "fc2": nn.Linear(2, 2)}, []),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_blocks_in_every_kind_of_container_are_found(name):
    build, expected = CONTAINERS[name]
    assert list(repeated_blocks(ModelWithModules(**build()))) == expected


def test_blocks_of_every_kind_of_model_are_found():
    found = {name: list(repeated_blocks(build()[0])) for name, build in MODELS.items()}
    assert found["llama"] == [f"blocks.{index}" for index in range(4)]
    assert found["hf-gpt2"] == [f"transformer.h.{index}" for index in range(3)]
    assert found["hf-qwen2"] == [f"model.layers.{index}" for index in range(3)]
    assert found["cnn"] == ["1.0", "1.1", "2.0"]
    assert found["plain-cnn"] == []
    shared = nn.Linear(2, 2)
    assert list(repeated_blocks(nn.Sequential(nn.ModuleList([Experts(), Experts()])))) == ["0.0", "0.1"]
    assert list(repeated_blocks(nn.ModuleList([shared, nn.ReLU(), shared]))) == ["0"]


class Stateful(Pair):
    """Updates state in forward: a counter, a running buffer, a list and a tensor that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes, self.aux = 0, [], None
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        out = super().forward(x) * self.calls / len(self.sizes) * 1.5**self.calls + self.mean
        self.aux = out.square().mean()
        return out


class Counter(Pair):
    """Updates only a counter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", [Stateful, Counter])
@pytest.mark.parametrize("recompute", ["full", "selective", "60%"])
def test_state_updated_in_forward_advances_once(recompute, kind):
    """Run two forwards before their backwards, so that recompute finds later state."""

    def train(recompute: str):
        torch.manual_seed(0)
        model = nn.Sequential(kind(), kind()).double()
        apply_recompute(model, Plan(recompute=recompute))
        found = []
        for step in range(4):
            xs = [torch.randn(3, 2, generator=torch.Generator().manual_seed(step + n)).double() for n in range(2)]
            losses = [model(x).sum() + sum(getattr(block, "aux", None) or 0 for block in model) for x in xs]
            for loss in losses:
                loss.backward()
            found += [loss.item() for loss in losses]
        state = [(block.calls, getattr(block, "sizes", None)) for block in model]
        return found, state, [param.grad for param in model.parameters()], list(model.buffers())

    for found, expected in zip(train(recompute), train("none"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_full_recompute_without_blocks_is_rejected():
    with pytest.raises(ModelError, match=r"recompute=full: it recomputes one repeated block at a time, and Linear has"):
        apply_recompute(nn.Linear(2, 2), Plan(recompute="full"))


class Stack(nn.Module):
    """Wide blocks in a container that `container` makes."""

    def __init__(self, container) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = container([nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            for part in [layer] if not isinstance(layer, nn.ModuleList) else layer:
                x = x + part(x)
        return x


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList,
        lambda blocks: nn.ModuleDict({str(number): block for number, block in enumerate(blocks)}),
        lambda blocks: nn.ModuleList(nn.ModuleList([block]) for block in blocks),
    ],
    ids=["ModuleList", "ModuleDict", "ModuleList of ModuleLists"],
)
def test_blocks_in_every_container_save_fewer_bytes(container):
    """Check a regression: blocks in a ModuleDict saved everything."""

    def saved(recompute: str) -> int:
        model = Stack(container)
        apply_recompute(model, Plan(recompute=recompute))
        found: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(torch.randn(256, 8))
        del output
        return sum(found.values())

    assert saved("full") < saved("none") / 3


class CallsLayersOfBlocks(nn.Module):
    """Calls the layers of its blocks instead of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.down(block.up(x).relu())
        return x


def test_layers_are_recomputed_if_blocks_are_not_called():
    model = CallsLayersOfBlocks()
    recompute = apply_recompute(model, Plan(recompute="full"))
    assert list(recompute.policies) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


class CalledWithOtherWeights(nn.Module):
    """Calls its blocks with computed weights, with parameters of other modules, and with another buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Tanh()) for _ in range(3))
        self.others = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Tanh())
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x):
        scaled = {name: param * 1.01 for name, param in self.blocks[0].named_parameters()}
        x = torch.func.functional_call(self.blocks[0], scaled, (x,))
        x = torch.func.functional_call(self.blocks[1], dict(self.others.named_parameters()), (x,))
        return torch.func.functional_call(self.blocks[2], {"1.shift": self.shift * 2}, (x,))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return (x * x) @ self.shift.diag()


@pytest.mark.parametrize("setting", ["full", "selective", "70%"])
def test_blocks_called_with_other_weights_equal_one_process(setting):
    grads = []
    for each in ("none", setting):
        model = CalledWithOtherWeights()
        apply_recompute(model, Plan(recompute=each))
        own = [*model.parameters(), *model.buffers()]
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
        assert all(one is other for one, other in zip(own, [*model.parameters(), *model.buffers()], strict=True))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


class TakesGradient(nn.Module):
    """Multiply the output by the gradient of an energy. differentiable: the gradient has a graph in training."""

    def __init__(self, *, differentiable: bool):
        super().__init__()
        self.layer, self.out, self.differentiable = nn.Linear(4, 4), nn.Linear(4, 4), differentiable

    def forward(self, x):
        hidden = self.layer(x).tanh()
        graph = self.differentiable and torch.is_grad_enabled()
        (gate,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=graph, retain_graph=True)
        return self.out(hidden) * gate


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("setting", ["full", "90%", "selective"])
def test_block_that_takes_a_gradient(setting, differentiable):
    grads = []
    for each in ("none", setting):
        torch.manual_seed(0)
        model = nn.Sequential(*(TakesGradient(differentiable=differentiable) for _ in range(3)))
        apply_recompute(model, Plan(recompute=each))
        x = torch.ones(2, 4, requires_grad=True)
        if each == "selective":
            with pytest.raises(ModelError, match=r"recompute=selective: the forward of 0 computes a gradient"):
                model(x)
            return
        for _ in range(2):
            model(x).sum().backward()
        grads.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
