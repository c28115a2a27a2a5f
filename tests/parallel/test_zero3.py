"""zero=3 beyond parity: units, memory, user loops, checkpoints, ranks that disagree."""

from __future__ import annotations

import gc
import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.full_state import capture, restore
from weft.comm.mesh import Mesh, build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import CommError, ModelError, PlanError
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_sharded.units import find_units

SPEC = DecoderSpec(vocab_size=64, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=32)
PLAN = "dp_shard=2 zero=3 precision=fp64"


def laid_out(plan: str, model: nn.Module) -> tuple[nn.Module, Mesh]:
    mesh = build_mesh(Plan.parse(plan))
    return parallelize(model, mesh), mesh


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}


def rows(index: int, rank: int | None = None) -> torch.Tensor:
    """Return batch `index` of 4 samples, or the half of rank 0 or 1."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x if rank is None else x[rank * 2 : rank * 2 + 2]


# --- units ---


def units(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model)]


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def test_units_are_blocks_embedding_and_head():
    assert units(build_decoder(SPEC)) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_tied_weights_stay_with_the_root():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "blocks": nn.ModuleList([Layer(4)]), "head": nn.Linear(4, 9)})
    model["head"].weight = model["embed"].weight
    assert units(model) == ["blocks.0"]


def test_units_of_stages_lists_and_sequences():
    stages = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer()))
    assert units(nn.Sequential(nn.Linear(8, 8), stages)) == ["0", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]
    assert units(nn.ModuleList([nn.ModuleList([Layer()]), nn.ModuleList([Layer()])])) == ["0.0", "1.0"]
    # Experts in blocks belong to their block. A backbone next to a head is not a block.
    mixtures = nn.ModuleList([nn.ModuleList([Layer(), Layer()]) for _ in range(2)])
    assert units(mixtures) == ["0.0", "0.1", "1.0", "1.1"]

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Layer(), Layer()])

    assert units(nn.ModuleList([Mixture(), Mixture()])) == ["0", "1"]

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

    assert units(nn.Sequential(Backbone(), nn.Linear(8, 8))) == ["0.layers.0", "0.layers.1", "1"]


def test_shared_module_is_one_unit_and_tied_blocks_are_split():
    shared = Layer()
    assert units(nn.ModuleList([shared, Layer(), shared])) == ["0", "1"]
    first, second = Layer(), Layer()
    second.up.weight = first.up.weight
    assert units(nn.ModuleList([first, second])) == ["0.down", "1.down"]

    class StoresTheFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [Layer(), Layer()]
            self.first, self.layers = layers[0], nn.ModuleList(layers)

    assert units(StoresTheFirst()) == ["layers.0", "layers.1"]


def test_small_layers_and_attention_projections_stay_with_the_root():
    model = nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200))
    assert units(model) == ["0"]
    model = nn.Module()
    model.attention = nn.MultiheadAttention(16, 2)  # it reads out_proj's weight without calling out_proj
    assert units(model) == []


# --- memory ---


def live_bytes(skip: set[int]) -> int:
    """Return the bytes of all tensors that gc tracks, each storage once."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and type(item).__name__ not in ("DTensor", "FakeTensor"):
            storage = item.untyped_storage()
            if storage.data_ptr() not in skip:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def transport_storages(mesh: Mesh) -> set[int]:
    """Return the storages of the shared-memory transports, whose size does not depend on the model."""
    found, seen, queue = set(), set(), [mesh.world.links]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.add(item.untyped_storage().data_ptr())
        else:
            queue += gc.get_referents(item)
    return found


def measure(plan: str) -> tuple[int, dict[str, float]]:
    """Return the number of parameters, and the bytes per parameter after a step, by kind and in total."""
    gc.collect()
    before = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)}
    model = build_decoder(SPEC, seed=0)
    num_params = sum(param.numel() for param in model.parameters())
    model, mesh = laid_out(plan, model)
    engine = data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.adopt(optimizer)
    engine.begin_step()
    for index in range(mesh.plan.accumulation):
        with engine.microbatch(last=index == mesh.plan.accumulation - 1):
            model(torch.arange(16).view(2, 8)).float().square().sum().backward()
    engine.finish()
    optimizer.step()
    engine.publish()
    shards = engine.parameters.shards.values()
    found = {
        "parameters": sum(shard.local.nbytes for shard in shards) / num_params,
        "gradients": sum(shard.local.grad.nbytes for shard in shards) / num_params,
        "states": sum(
            v.nbytes for s in optimizer.state.values() for v in s.values() if v.ndim
        ) / num_params,
        "all": live_bytes(before | transport_storages(mesh)) / num_params,
    }  # fmt: skip
    return num_params, found


@pytest.mark.parametrize("reshard", ["after_forward", "after_backward", "after_step"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rank_has_only_its_shard_after_a_step(precision, reshard, ranks2, ranks4):
    """Expect 16 bytes per parameter over the shard group: weight, gradient and two moments in fp32."""
    for layout, ranks, size in (("dp_shard=4", ranks4, 4), ("dp_replicate=2 dp_shard=2", ranks4, 2)):
        plan = f"{layout} zero=3 precision={precision} accumulation=2 reshard={reshard}"
        for _, found in ranks.run(measure, plan):
            assert found["parameters"] == pytest.approx(4 / size, rel=0.03)
            assert found["gradients"] == pytest.approx(4 / size, rel=0.03)
            assert found["states"] == pytest.approx(8 / size, rel=0.03)
            assert found["all"] == pytest.approx(16 / size, rel=0.03)


# --- user loops ---


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).double()


def own_loop(plan: str, how: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = mlp()
    early = torch.optim.AdamW(model.parameters(), lr=0.05) if how == "built before" else None
    model, mesh = laid_out(plan, model)
    optimizer = early or torch.optim.AdamW(model.parameters(), lr=0.05)
    if how == "adopted":
        data_parallel(model).adopt(optimizer)
    norms = []
    for step in range(3):
        for part in range(2):
            model(rows(2 * step + part, mesh["dp_shard"].rank)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        (model if how == "model" else optimizer).zero_grad()
    return weights(model), norms


def reference() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, norms = mlp(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        for part in range(2):
            model(rows(2 * step + part)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize("how", ["adopted", "seen at its first step", "built before", "model"])
def test_user_loop_matches_one_process(how, ranks2):
    want, want_norms = reference()
    for got, norms in ranks2.run(own_loop, PLAN, how):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
        assert norms == pytest.approx(want_norms, rel=1e-10)


def test_user_loop_over_replicas_matches_one_process(ranks4):
    want, want_norms = reference()
    for got, norms in ranks4.run(own_loop, "dp_replicate=2 dp_shard=2 zero=3 precision=fp64", "adopted"):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
        assert norms == pytest.approx(want_norms, rel=1e-10)


def foreign_parameter(plan: str) -> str:
    model, _ = laid_out(plan, mlp())
    try:
        data_parallel(model).adopt(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))
    except ModelError as error:
        return str(error)
    return ""


def test_optimizer_with_foreign_parameter_is_rejected(ranks2):
    assert (
        "it holds a parameter of shape (3,) that the parallelized model does not have"
        in ranks2.run(foreign_parameter, PLAN)[0]
    )


# --- checkpoints ---


class Half(nn.Module):
    """A frozen half, a buffer, a scalar, and rows that do not divide evenly over 2 and 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen = nn.Linear(8, 7).requires_grad_(False)
        self.trained = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x).relu()) * self.scale + self.shift


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train_half(plan: str, kind: str, first: int, num_steps: int, saved: dict | None) -> dict:
    """Train from `saved`, which replaces other weights. Return a checkpoint's tensors."""
    model = Half().double()
    if saved is not None:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(1.0)
    model, mesh = laid_out(plan, model)
    optimizer = optimizer_of(model, kind)
    engine = data_parallel(model)
    engine.adopt(optimizer)
    if saved is not None:
        restore(model, optimizer, saved)
    for step in range(first, first + num_steps):
        engine.begin_step()
        with engine.microbatch(last=True):
            # All ranks have the same samples, so that every plan trains on the same data.
            model(rows(step)).square().sum().backward()
        engine.finish()
        engine.scale(1 / mesh.data.size)
        optimizer.step()
        engine.publish()
    captured = capture(model, optimizer)
    return {group: {name: tensor.clone() for name, tensor in tensors.items()} for group, tensors in captured.items()}


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_checkpoint_resumes_under_every_plan(kind, ranks2, ranks4):
    one = train_half("precision=fp64", kind, 0, 4, None)
    saved = ranks2.run(train_half, PLAN, kind, 0, 2, None)[0]
    assert saved["model"].keys() == one["model"].keys()
    assert saved["optimizer"].keys() == one["optimizer"].keys()
    for plan, ranks in (("dp_shard=4", ranks4), ("dp_replicate=2 dp_shard=2", ranks4), ("dp_shard=2", ranks2)):
        for got in ranks.run(train_half, f"{plan} zero=3 precision=fp64", kind, 2, 2, saved):
            torch.testing.assert_close(got, one, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(train_half("precision=fp64", kind, 2, 2, saved), one, rtol=1e-10, atol=1e-12)


# --- ranks that disagree ---


class Chooser(nn.Module):
    """Blocks of which a rank may skip one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: torch.Tensor, skip: int | None, shallow: bool) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = block(x)
        return x if not shallow else x.detach() + 0 * x.sum()


def disagree(plan: str, what: str) -> str:
    model, mesh = laid_out(plan, Chooser().double())
    engine = data_parallel(model)
    rank = mesh.data.rank
    try:
        engine.begin_step()
        with engine.microbatch(last=True):
            skip = {"skip": 1, "skip last": 2}.get(what) if rank == 1 else None
            output = model(rows(0, mesh["dp_shard"].rank), skip, False)
            if not (what == "no backward" and rank == 1):
                output.square().sum().backward()
        engine.finish()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "plan, what, text",
    [
        (PLAN, "skip", "rank 0 gathers the weights of blocks.1 while rank 1 gathers the weights of blocks.2: "),
        (PLAN, "skip last", "rank 0 gathers the weights of blocks.2 while rank 1 gathers the weights of blocks.1: "),
        (PLAN + " reshard=after_backward", "skip last",
         "rank 0 gathers the weights of blocks.2 while rank 1 reduces the gradients of blocks.1: "),
        (PLAN + " reshard=after_backward", "no backward",
         "rank 0 reduces the gradients of blocks.2 while rank 1 ends the step: "),
    ],
)  # fmt: skip
def test_different_module_calls_on_ranks_raise_with_names(plan, what, text, ranks2):
    for message in ranks2.run(disagree, plan, what):
        assert message.startswith(text)
        assert "Call the same modules in the same order on all of them" in message


class Forked(nn.Module):
    """Blocks that each use one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([Fork(), Fork()])

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x, left), not left)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x).tanh()


def fork_gradients(plan: str) -> dict[str, torch.Tensor]:
    model, mesh = laid_out(plan, Forked().double())
    engine = data_parallel(model)
    engine.begin_step()
    with engine.microbatch(last=True):
        model(rows(0, mesh["dp_shard"].rank), mesh.rank == 0).square().sum().backward()
    engine.finish()
    return {name: grad.clone() for name, grad in engine.gradients()}


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch below 2.13")
def test_ranks_may_use_different_parameters_of_a_block(ranks2):
    model = Forked().double()
    (model(rows(0, 0), True).square().sum() + model(rows(0, 1), False).square().sum()).backward()
    want = {name: param.grad for name, param in model.named_parameters()}
    for got in ranks2.run(fork_gradients, PLAN):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def gradients_after_a_failure(plan: str) -> dict[str, torch.Tensor]:
    """Run a step that fails in its second microbatch, then a step that succeeds."""
    model, mesh = laid_out(plan, mlp())
    engine, rank = data_parallel(model), mesh["dp_shard"].rank
    engine.begin_step()
    with engine.microbatch(last=False):
        model(rows(7, rank)).square().sum().backward()
    try:
        with engine.microbatch(last=False):
            model(rows(7, rank)).square().sum().backward()
            raise ValueError
    except ValueError:
        pass
    engine.begin_step()
    for index in range(2):
        with engine.microbatch(last=index == 1):
            model(rows(index, rank)).square().sum().backward()
    engine.finish()
    return {name: grad.clone() for name, grad in engine.gradients()}


@pytest.mark.parametrize("reshard", ["after_forward", "after_step"])
def test_failed_step_leaves_no_gradients(reshard, ranks2, ranks4):
    model = mlp()
    for index in range(2):
        model(rows(index)).square().sum().backward()
    want = {name: param.grad for name, param in model.named_parameters()}
    for layout, ranks in (("dp_shard=2", ranks2), ("dp_replicate=2 dp_shard=2", ranks4)):
        times = 2 if "replicate" in layout else 1
        plan = f"{layout} zero=3 precision=fp64 accumulation=2 reshard={reshard}"
        for got in ranks.run(gradients_after_a_failure, plan):
            torch.testing.assert_close(got, {name: times * grad for name, grad in want.items()}, rtol=1e-12, atol=1e-14)


def test_zero_3_without_dp_shard_is_rejected():
    with pytest.raises(PlanError, match="zero=3: it shards over dp_shard, and dp_shard is 1"):
        parallelize(mlp(), build_mesh(Plan(zero=3)))
