"""What compiled blocks keep for backward: bytes as planned, and no input of a product that is cheap to make again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.lean import compiled_by
from weft.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel import parallelize
from weft.planner.cost.memory.layer_memory import layer_bytes
from weft.planner.space import Columns, Job, Shape
from weft.spec import DecoderSpec
from weft.spec.plan import Plan

SEQ = 256
LLAMA = DecoderSpec(vocab_size=64, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=352, max_seq_len=SEQ)
SPECS = {"llama": LLAMA, "gpt2": dataclasses.replace(LLAMA, family="gpt2", num_kv_heads=4)}


def kept_by_a_layer(plan: str, spec: DecoderSpec) -> int:
    """Bytes that one more layer keeps of a pass, on this rank."""
    with compiled_by("lean"):
        counts = [_kept(plan, dataclasses.replace(spec, num_layers=layers)) for layers in (2, 3)]
    return counts[1] - counts[0]


def _kept(plan: str, spec: DecoderSpec) -> int:
    torch._dynamo.reset()
    model = parallelize(build_decoder(spec, seed=0), build_mesh(Plan.parse(plan)))
    ids = torch.zeros(1, SEQ, dtype=torch.int64)
    model(ids)  # the first looks at the blocks
    known = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("plan", ["", "tp=2 sp=on", "tp=2"])
def test_a_layer_keeps_what_the_planner_says(plan, family, request):
    spec, text = SPECS[family], f"{plan} compile=on precision=bf16"
    job = Job(shape=Shape.of_decoder(spec), seq_len=SEQ, global_batch=1)
    parsed = Plan.parse(text)
    columns = Columns.make(1, microbatch=1, compile=True, tp=parsed.tp, sp=parsed.sp)
    planned = layer_bytes(job, columns).kept[0]
    if parsed.tp == 1:
        found = [kept_by_a_layer(text, spec)]
    else:
        found = request.getfixturevalue("ranks2").run(kept_by_a_layer, text, spec)
    for each in found:
        assert each == pytest.approx(planned, rel=0.04)
