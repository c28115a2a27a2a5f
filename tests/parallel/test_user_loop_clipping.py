"""run.clip_grad_norm_ in a user's loop clips by the norm of the full gradient under any sharding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import CommError
from weft.models.registry import build_decoder
from weft.parallel.state.gradients import data_parallel
from weft.train.script.script_run import Run

DENSE = DecoderSpec(vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=16)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, top_k=2, expert_ffn_dim=8, balance="none")
STEPS, BATCH, CLIP = 3, 8, 0.05


def loop(
    plan_text: str | None, spec: DecoderSpec, use_torch: bool = False
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with backward, clip and step. Without a plan in plain PyTorch. use_torch: clip with torch's function."""
    model = build_decoder(spec, dtype=torch.float64, seed=3)
    run = None
    if plan_text is not None:
        plan = Plan.parse(plan_text)
        run = Run(plan, build_mesh(plan), Ledger(), 0)
        run.parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, size = (run.mesh.data.rank, run.mesh.data.size) if run else (0, 1)
    norms = []
    for step in range(STEPS):
        ids = torch.randint(61, (BATCH, 9), generator=torch.Generator().manual_seed(step))
        mine = ids[rank * BATCH // size : (rank + 1) * BATCH // size]
        F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten()).backward()
        ours = run is not None and not use_torch
        clip = run.clip_grad_norm_(model, CLIP) if ours else torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(clip))
        optimizer.step()
        optimizer.zero_grad()
    if run is None:
        return {name: param.detach().clone() for name, param in model.named_parameters()}, norms
    return {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}, norms


def compare(plan: str, spec: DecoderSpec, pool) -> None:
    want, want_norms = loop(None, spec)
    assert min(want_norms) > CLIP
    for got, norms in pool.run(loop, f"{plan} precision=fp64", spec):
        assert norms == pytest.approx(want_norms, rel=1e-10)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sp=on", "dp_shard=2 zero=1", "dp_shard=2 zero=3"])
def test_clipping_matches_one_process_on_two_ranks(plan, ranks2):
    compare(plan, DENSE, ranks2)


@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2", "dp_shard=2 ep=2 zero=1", "tp=2 ep=2"])
def test_clipping_with_experts_matches_one_process(plan, ranks2):
    compare(plan, EXPERTS, ranks2)


@pytest.mark.parametrize("plan", ["dp_replicate=2 tp=2", "dp_shard=2 tp=2 zero=2", "dp_shard=2 tp=2 zero=3"])
def test_clipping_matches_one_process_on_four_ranks(plan, ranks4):
    compare(plan, DENSE, ranks4)


@pytest.mark.parametrize(("plan", "spec"), [("tp=2", DENSE), ("dp_shard=2 ep=2", EXPERTS)])
def test_torch_clipping_of_sharded_gradients_is_rejected(plan, spec, ranks2):
    with pytest.raises(CommError, match=r"Use run.clip_grad_norm_\(model, max_norm\)"):
        ranks2.run(loop, f"{plan} precision=fp64", spec, use_torch=True)
