"""Optimizer offload: offloaded tensors are only on the host, and their size matches the requested share."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.memory.links import LateLink
from tests.memory.residency import TwoMemories
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import LaunchError
from weft.memory.host_link import PlainLink
from weft.memory.offload import Host, HostPart, HostPool, choose, offload_lines, open_host, shard_offload, step_on_host
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.model import FlatModel
from weft.train.step.train_step import TrainStep
from weft.units import format_bytes

MODULE = importlib.import_module("weft.parallel.parallelize")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=20), st.floats(0, 1))
def test_chosen_share_is_off_by_at_most_half_the_largest(sizes, share):
    named = [(str(index), size) for index, size in enumerate(sizes)]
    taken = sum(size for name, size in named if name in choose(named, share))
    assert abs(taken - share * sum(sizes)) <= max(sizes, default=0) / 2 + 1e-6


def test_first_entries_are_chosen_and_all_or_none_at_the_limits():
    sizes = [("a", 4), ("b", 4), ("c", 4)]
    assert choose(sizes, 0.34) == {"a"}
    assert choose(sizes, 1.0) == {"a", "b", "c"}
    assert choose(sizes, 0.0) == frozenset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(16, 32, generator=generator), "y": torch.randn(16, 8, generator=generator)}


def train(plan: str, host: Host | None, monkeypatch, num_steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    monkeypatch.setattr(MODULE, "open_host", lambda plan, device, limit: host)
    trained = model()
    mesh = build_mesh(Plan.parse(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize(trained, mesh)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    step = TrainStep(
        trained,
        optimizer,
        lambda out, b: ((out.float() - b["y"]).square().sum(), len(out)),
        mesh,
        forward=lambda m, b: m(b["x"]),
        max_grad_norm=1.0,
    )
    for _ in range(num_steps):
        step(batch())
    return trained, optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_tensors_are_in_the_right_memory_without_mixing(precision, share, monkeypatch):
    with TwoMemories() as machine:
        host = Host(PlainLink(), machine.pool)
        trained, optimizer = train(f"precision={precision} offload=optimizer:{share}", host, monkeypatch)
        engine = data_parallel(trained)
        assert dict(engine.weights())
        assert list(engine.state_slices(optimizer))
    assert not any(machine.is_host(param) for param in trained.parameters())
    on_host_buckets = [bucket for bucket in engine.reducer.buckets if bucket.on_host]
    total = sum(bucket.size for bucket in engine.reducer.buckets)
    assert sum(bucket.size for bucket in on_host_buckets) / total == pytest.approx(share, abs=0.35)
    for bucket in engine.reducer.buckets:
        assert machine.is_host(bucket.master) == bucket.on_host
        assert not machine.is_host(bucket.weights)
        sums = [bucket.shard] if bucket.loose is None else [grad for _, grad in bucket.loose]
        assert not any(map(machine.is_host, sums))
    for param in optimizer.param_groups[0]["params"]:
        state = optimizer.state[param]
        assert {machine.is_host(state[key]) for key in ("exp_avg", "exp_avg_sq")} == {machine.is_host(param)}
    # Masters and gradients are in pinned memory, rounded up to pages. The optimizer allocates the other host tensors.
    pinned = sum(2 * 4 * bucket.length for bucket in on_host_buckets)
    assert pinned <= machine.pool.used_bytes <= pinned + 2 * 4096 * len(on_host_buckets)


def test_device_bytes_decrease_by_masters_and_states(monkeypatch):
    """Expect in bf16 on one rank 2 + 4 bytes of weights and gradients, down from 2 + 2 + 4 + 8.

    Gradients are copied to the host in fp32. Without offload they stay in bf16 until the optimizer reads them.
    """
    found = {}
    for offload in ("none", "optimizer"):
        with TwoMemories() as machine:
            host = Host(PlainLink(), machine.pool) if offload != "none" else None
            trained, optimizer = train(f"precision=bf16 offload={offload}", host, monkeypatch)
            found[offload] = machine.live_bytes(host=False)
            num_params = sum(param.numel() for param in trained.parameters())
        assert optimizer is not None
    assert found["none"] - found["optimizer"] == pytest.approx(10 * num_params, rel=0.03)
    assert found["optimizer"] == pytest.approx(6 * num_params, rel=0.1)


def test_gradients_are_offloaded_during_backward(monkeypatch):
    """Check that the first bucket is sent before the last gradient is computed."""
    link, order = LateLink(), []
    down = link.down
    monkeypatch.setattr(link, "down", lambda *args: (order.append("sent"), down(*args))[1])
    host = Host(link, HostPool(1 << 30))
    trained = model()
    mesh = build_mesh(Plan.parse("offload=optimizer"))
    engine = FlatModel(trained, mesh, host=host, bucket_bytes=4 * 1024)
    assert len(engine.reducer.buckets) > 2
    next(trained.parameters()).register_hook(lambda grad: order.append("first layer"))
    for _ in range(2):
        order.clear()
        engine.begin_step()
        with engine.microbatch(last=True):
            trained(batch()["x"]).sum().backward()
        engine.finish()
    assert order.index("sent") < order.index("first layer") < len(order) - 1


def test_offload_in_a_user_loop_matches_plain_torch(monkeypatch):
    """Compare weights with plain torch, with torch's clipping and an optimizer that was not passed to Weft."""
    results = []
    for offload in (False, True):
        trained = model().double()
        if offload:
            monkeypatch.setattr(MODULE, "open_host", lambda p, d, limit: Host(LateLink(), HostPool(1 << 30)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallelize(trained, build_mesh(Plan.parse("precision=fp64 offload=optimizer:0.7")))
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        for _ in range(4):
            for part in batch()["x"].double().chunk(2):
                trained(part).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in trained.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_loaded_weights_update_the_masters(monkeypatch):
    trained, _ = train("offload=optimizer", Host(PlainLink(), HostPool(1 << 30)), monkeypatch)
    other = {name: torch.full_like(tensor, 0.25) for name, tensor in trained.state_dict().items()}
    trained.load_state_dict(other)
    assert all(bool((tensor == 0.25).all()) for _, tensor in data_parallel(trained).weights())


def test_too_small_host_limit_raises_before_the_first_step(monkeypatch):
    host = Host(PlainLink(), HostPool(8192))
    with pytest.raises(LaunchError) as caught:
        train("offload=optimizer", host, monkeypatch)
    num_bytes = 4 * sum(-(-param.numel() // 16) * 16 for param in model().parameters())  # aligned as in the bucket
    assert str(caught.value) == (
        f"offload=optimizer: this rank needs {format_bytes(-(-num_bytes // 4096) * 4096)} of host memory for copies, "
        f"and its limit is 8.00 KiB. Put a smaller share on the host, such as offload=optimizer:0.5, or raise "
        f"memory.pinned_limit."
    )


def test_weights_are_uploaded_in_the_compute_dtype():
    link = LateLink()
    part = HostPart(Host(link, HostPool(1 << 20)), 8, torch.float32)
    part.master.fill_(1.0 + 2**-12)
    weights = torch.zeros(8, dtype=torch.bfloat16)
    part.bring(weights).wait()
    assert link.bytes == {"down": 0, "up": 16}
    assert torch.equal(weights, torch.ones(8, dtype=torch.bfloat16))
    assert part.master[0] == 1.0 + 2**-12


def test_fused_kernels_are_the_default_on_the_host():
    params = [nn.Parameter(torch.zeros(2))]
    default, explicit = torch.optim.AdamW(params), torch.optim.AdamW(params, foreach=False)
    other = torch.optim.RMSprop(params)
    for optimizer in (default, explicit, other):
        step_on_host(optimizer)
    assert default.param_groups[0]["fused"] is True
    assert explicit.param_groups[0]["fused"] is None
    assert "fused" not in other.param_groups[0]


def test_offload_lines_describe_the_placement():
    plan = Plan.parse("offload=optimizer:0.5+activations")
    cuda, cpu = (offload_lines(plan, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert cuda == [
        "50% of optimizer on the host: unrounded weights, optimizer states and the optimizer's step",
        "100% of activations on the host: what blocks keep for backward",
    ]
    assert cpu == [*cuda, "this rank's device is the host itself (cpu): copies are made, and no memory is saved"]
    assert offload_lines(Plan(), torch.device("cpu")) == []
    assert open_host(Plan(), torch.device("cpu")) is None


def test_offload_on_a_cpu_warns_at_start():
    with pytest.warns(UserWarning, match="offload=optimizer: this rank's device is the host itself"):
        parallelize(model(), build_mesh(Plan.parse("offload=optimizer")))


def test_offload_policy_for_fully_shard():
    plan = Plan.parse("dp_shard=2 zero=3 offload=params:0.5")
    policy = shard_offload(plan, torch.device("cpu"))["offload_policy"]
    assert policy.pin_memory is False
    assert shard_offload(plan, torch.device("cuda"))["offload_policy"].pin_memory is True
    assert shard_offload(plan, torch.device("cuda"), is_chosen=False) == {}
    assert shard_offload(Plan(), torch.device("cuda")) == {}
