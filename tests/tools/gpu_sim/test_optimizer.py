"""Bytes per parameter that gradients and the optimizer step read and write on a GPU."""

from __future__ import annotations

import json

import pytest

from tools.gpu_sim.plans import script_on_paper

pytestmark = pytest.mark.paper

COUNT = """
import inspect, json
from weft.models import build_decoder
from weft.parallel.zero_flat.prefetch import AwaitsWeights
from tools.gpu_sim.decoder_plans import PaperModel, plan_report
from tools.gpu_sim.cuda import current_device

STEP = ("train/step/train_step.py", "train/step/update.py")
PARTS = ("parallel/zero", "parallel/state/gradients.py", "optim/", "comm/transports/", *STEP)
# Layers of torch are counted at Weft's line that calls them: it waits for weights and calls the module's forward.
text, first = inspect.getsourcelines(AwaitsWeights)
CALLS = {f"parallel/zero_flat/prefetch.py:{first + place}" for place in range(len(text))}
device, subject, found = current_device(), PaperModel(layers=2), {}
number = sum(param.numel() for param in build_decoder(subject.spec).parameters())
for plan in ("precision=bf16", "precision=fp32", "dp_shard=8 zero=1 precision=bf16"):
    report = plan_report(plan, device, subject)
    assert not report.error, report.error
    counted = [line for line in device.counts.line_bytes if line.startswith(PARTS) and line not in CALLS]
    lines = {line: device.counts.line_bytes[line] for line in counted}
    kernels = sum(device.counts.kernel_lines[line] for line in lines)
    found[plan] = [sum(lines.values()) / number, kernels, device.counts.kernels["weft::adam"]]
print(json.dumps(found))
"""


def test_adamw_step_reads_and_writes_memory_once(tmp_path):
    """With bf16, the norm reads 2 bytes; the step reads 2 + 12 and writes 12 + 2. Over ranks, gradients are gathered in
    fp32 first, and each rank updates an eighth."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["precision=bf16"][0] == pytest.approx(2 + 28, rel=0.01)
    assert found["precision=fp32"][0] == pytest.approx(4 + 28, rel=0.01)
    assert found["dp_shard=8 zero=1 precision=bf16"][0] == pytest.approx(6 + (4 + 30) / 8, rel=0.02)
    assert found["dp_shard=8 zero=1 precision=bf16"][2] <= 6  # flat slices instead of one for each of 20 parameters
