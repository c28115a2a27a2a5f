"""Graphs on a simulated GPU: valid captures, one launch for many kernels, no leaked memory."""

from __future__ import annotations

import json

import pytest

from tools.gpu_sim.plans import plans_on_paper, script_on_paper

pytestmark = pytest.mark.paper

#: Plan -> number of passes recorded per step.
PLANS = {"dp_shard=4 zero=2 accumulation=2 precision=bf16": 2}
MORE = {
    "precision=bf16": 1,
    "precision=fp32": 1,
    "precision=fp16 recompute=full": 1,
    "precision=fp8": 1,
    "precision=bf16 recompute=selective accumulation=2": 2,
    "precision=bf16 recompute=attention": 1,
    "dp_shard=4 zero=1 precision=bf16": 1,
    "dp_shard=2 zero=1 gather=diff4 precision=bf16": 1,
    "dp_replicate=2 accumulation=2 precision=bf16 reduce=bf16": 2,
    "dp_replicate=2 dp_shard=2 zero=1 precision=bf16": 1,
}
#: Trained tensors of the decoder with two layers.
NUM_PARAMS = 21


@pytest.mark.parametrize(
    ("known", "options"),
    [
        pytest.param(PLANS, (), id="few", marks=pytest.mark.full),
        pytest.param(MORE, (), id="more", marks=pytest.mark.full),
        pytest.param({"precision=bf16": 1}, ("--documents",), id="documents", marks=pytest.mark.full),
    ],
)
def test_step_obeys_capture_rules_with_few_launches(known, options):
    """A host wait, a host copy or a collective in a capture ends the run. Steps after it have none either."""
    done = plans_on_paper([f"{plan} graphs=on" for plan in known], "--layers=2", *options)
    assert len(done.reports) == len(known), done.stderr
    for report, passes in zip(done.reports, known.values(), strict=True):
        assert (report.error, report.mismatch, report.races) == ("", "", {}), report.lines()
        assert (report.num_syncs, report.num_blocking) == (0, 0), report.lines()
        assert report.kernels < 110 < 250 * passes < report.recorded, report.lines()
        # Remaining allocations of captures: gradients, and the loss and count of each pass.
        assert sum(report.outlived.values()) <= NUM_PARAMS + passes, report.lines()


#: Reports of plans, with code that a loss runs in addition.
COUNT = """
import json
import torch
import tools.gpu_sim.decoder_plans as plans
from tools.gpu_sim.cuda import current_device

plain, held = plans.token_cross_entropy, []
for act, plan in CASES:
    def spoiled(output, batch):
        exec(act)
        return plain(output, batch)

    plans.token_cross_entropy = spoiled
    subject = plans.PaperModel(layers=1, seq_len=128, batch=2)
    print(json.dumps(plans.plan_report(plan, current_device(), subject).as_dict()))
"""
#: Operations that a loss must not do, with the capture's error.
FAULTS = {
    "float(output.detach().sum())": "item",
    "torch.tensor([1.0], device=output.device)": "a copy from or to the host",
    "torch.cuda.synchronize()": "cuda.synchronize",
}
KEEPS = "held.append(output.sum())"


def reports(tmp_path, cases):
    """Return the reports of (extra code of the loss, plan) cases."""
    script = tmp_path / "count.py"
    script.write_text(COUNT.replace("CASES", repr(cases)))
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_same_kernels_run_with_fewer_launches(tmp_path):
    [sharded] = PLANS
    plans = ("precision=bf16", "precision=bf16 graphs=on", f"{sharded} graphs=on")
    eager, graphs, over_ranks = reports(tmp_path, [("", plan) for plan in plans])
    # A host wait, a host copy or a collective in a capture would end the step.
    for report in (graphs, over_ranks):
        assert (report["error"], report["mismatch"], report["races"], report["syncs"]) == ("", "", {}, {})
    assert over_ranks["recorded"] > over_ranks["kernels"]
    assert graphs["kernels"] < eager["kernels"] / 3
    # The batch and the replay's findings are copied in addition.
    assert 0 <= graphs["kernels"] + graphs["recorded"] - eager["kernels"] < 15
    assert graphs["step_s"] < eager["step_s"]
    assert not any("waits for the host" in why for why in graphs["idle_s"])


@pytest.mark.full
def test_operations_unsupported_in_graphs_are_reported_with_their_line(tmp_path):
    """Includes references to graph memory, which each replay would overwrite."""
    found = reports(tmp_path, [(act, "precision=bf16 graphs=on") for act in (*FAULTS, KEEPS)])
    for report, what in zip(found, FAULTS.values(), strict=False):
        start = "ModelError: graphs=on: forward and backward cannot be recorded as a CUDA graph"
        assert report["error"].startswith(start)
        assert f"not permitted when stream is capturing: {what} @ " in report["error"]
    assert not found[-1]["error"]
    assert sum(found[-1]["outlived"].values()) == 12 + 1 + 1
