"""Training on a device that is not in the table and has no hardware, beside CPU ranks, equal to one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tools.mirror_device.device import NAME, load
from weft.config.decoder_shape import DecoderSpec
from weft.verify.parity import DecoderCase, ParityResult, train_case, train_plain
from weft.verify.rank_pool import RankPool

SPEC = DecoderSpec(vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8)
CASE = DecoderCase(SPEC, num_steps=3, seq_len=8)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks. The first registers the device; another pool's ranks would keep it."""
    with RankPool(2) as pool:
        yield pool


def train_on(plan: str, devices: tuple[str, str], case: DecoderCase) -> tuple[ParityResult, bool]:
    """Train on this rank's device. Also return True if its memory held the model."""
    device = devices[dist.get_rank()]
    if device != "cpu":
        load()
        torch.get_device_module(NAME).set_device(device)
    result = train_case(plan, case, device=device)
    result.grads = {name: grad.cpu() for name, grad in result.grads.items()}
    result.weights = {name: weight.cpu() for name, weight in result.weights.items()}
    return result, device == "cpu" or torch.get_device_module(NAME).max_memory_allocated() > 0


@pytest.mark.parametrize("devices", [("mirror:0", "cpu"), ("mirror:0", "mirror:1")], ids="-".join)
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on",
             "cp=2", "pp=2 accumulation=2"]
)  # fmt: skip
def test_device_beside_cpu_ranks_equals_one_process(ranks, plan, devices):
    plain = train_plain(CASE)
    for result, used_memory in ranks.run(train_on, plan, devices, CASE):
        assert used_memory
        assert result.largest_difference(plain) < 1e-12
