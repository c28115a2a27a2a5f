"""`kernels.attention` on a machine with a GPU: compiled and recomputed blocks use the requested kernel."""

from __future__ import annotations

import json

import pytest

from tools.gpu_sim.plans import script_on_paper

pytestmark = pytest.mark.paper

#: Two attention blocks under several plans; counts attention operators by kernel name.
SCRIPT = """
import json
import re
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.train.engines.gpu_kernels import GpuKernels
from weft.comm.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel.parallelize import parallelize
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.run_config import RunConfig
from weft.config.plan import Plan
from tools.gpu_sim import compiled
from weft.train import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

GPU, SEEN = torch.device("cuda", 0), Counter()
SPEC = DecoderSpec(
    vocab_size=64, dim=32, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=64, max_seq_len=32
)
COUNTED = compiled._Run.counted


def note(what):
    if found := re.search(r"_(flash|efficient)_attention(_backward)?[.]", str(what)):
        SEEN[found[1] + (found[2] or "")] += 1


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        note(func)
        return func(*args, **(kwargs or {}))


def counted(run, node):
    note(node.target)
    COUNTED(run, node)


def calls(kernel, plan_text):
    plan = Plan.parse(f"precision=bf16 {plan_text}")
    chosen = GpuKernels(RunConfig.model_validate({"kernels": {"attention": kernel}}), plan, GPU)
    mesh = build_mesh(plan, GPU)
    model = parallelize(build_decoder(SPEC, seed=0), mesh)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), token_cross_entropy, mesh, forward=model_forward)
    ids = torch.arange(64).reshape(2, 32)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(32).expand(2, 32).contiguous()}
    SEEN.clear()
    if plan.compile:  # a dispatch mode would prevent compilation
        step(batch)
    else:
        with Calls():
            step(batch)
    chosen.close()
    return dict(SEEN)


compiled._Run.counted = counted
print(json.dumps([
    [calls(kernel, "recompute=full"), calls(kernel, "compile=on")] for kernel in ("auto", "efficient")
]))
"""


@pytest.mark.full  # the gate checks the choice of kernels on its own: tests/train/test_gpu_kernels.py
def test_compiled_and_recomputed_blocks_use_the_requested_kernel(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr

    def by(name):
        return [{name: 4, f"{name}_backward": 2}, {name: 2, f"{name}_backward": 2}]

    assert json.loads(done.stdout) == [by("flash"), by("efficient")]
