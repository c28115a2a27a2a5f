"""Document boundaries under context parallelism are computed once before the blocks, from the host's batch if given."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.parallel.context.test_context import hf_llama
from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.compile_blocks import compile_blocks, register_operators
from weft.parallel.context import modes
from weft.parallel.context.apply import Context
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.parallelize import parallelize
from weft.train.tasks.decoder_loss import model_forward
from weft.verify.parity import DecoderCase


def _hugging_face_batch(kind):
    ids = torch.arange(48).view(2, 24)
    if kind == "mask":
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)}


def boundary_lookups(kind, compiled, known):
    """Run two passes. Return how often ids were gathered, Views missing in blocks, Views read in blocks, boundaries."""
    plan = Plan.parse("cp=2 precision=fp64")
    if kind == "decoder":
        case = DecoderCase(LLAMA, documents=True)
        model, batch = case.model(), case.batch(0)
    else:
        model, batch = hf_llama(), _hugging_face_batch(kind)
    parallelize(model, build_mesh(plan))
    if compiled:
        register_operators(model, plan)
        compile_blocks(model, backend="aot_eager")
    gathers, missing, reads_inside, attending, views = [], [], [], [], []
    full_sequence, divide, attend = modes.full_sequence, Context.divide, Context.attend

    def gather(*args, **kwargs):
        gathers.append(1)
        return full_sequence(*args, **kwargs)

    def divided(self, seq_len, ids_BT):
        if attending and ids_BT is not None:
            reads_inside.append(1)
            missing.extend([1] if ids_BT not in self._divided else [])
        view = divide(self, seq_len, ids_BT)
        views.append(view.borders)
        return view

    def attended(self, *args):
        attending.append(1)
        try:
            return attend(self, *args)
        finally:
            attending.pop()

    with (
        patch.object(modes, "full_sequence", gather),
        patch.object(Context, "divide", divided),
        patch.object(Context, "attend", attended),
        sequence_in_use(model),
    ):
        for _ in range(2):
            part = shard_sequence(model, {name: one.clone() for name, one in batch.items()})
            if not known:
                part = {name: one.clone() for name, one in part.items()}
            out = model_forward(model, part) if kind == "decoder" else model(**part, use_cache=False).logits
            out.sum().backward()
    return len(gathers), len(missing), len(reads_inside), views


@pytest.mark.parametrize("kind", ["decoder", "mask", "positions"])
def test_boundaries_from_the_host_batch_need_no_collective(kind, ranks2):
    found, asked_results = (ranks2.run(boundary_lookups, kind, False, known) for known in (True, False))
    for (gathers, missing, reads, views), (asked_gathers, asked_missed, _, asked_views) in zip(
        found, asked_results, strict=True
    ):
        assert (gathers, missing, reads) == (0, 0, 4)
        assert (asked_gathers, asked_missed) == (2, 0)
        assert views == asked_views
        assert views[0] is not None


def test_compiled_blocks_reuse_document_boundaries(ranks2):
    for gathers, missing, reads, _ in ranks2.run(boundary_lookups, "decoder", True, False):
        assert (gathers, missing, reads) == (2, 0, 4)
