"""`weft train` on a machine with a GPU: the loop, evaluation, checkpoints and the final sample."""

from __future__ import annotations

import pytest

from tools.gpu_sim.plans import script_on_paper

pytestmark = pytest.mark.paper

STEPS = 8
#: Number of host waits in such a run, including two evaluations and two checkpoints of eleven parameters.
MOST_WAITS = 157
RUN = f"""
import sys
from pathlib import Path
from weft.config.files import load_config
from weft.train import prepare_run, run_rank

place = Path(sys.argv[1])
(place / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 500)
settings = [
    f"data.train={{place}}/words.txt", f"run.dir={{place}}", f"data.cache_dir={{place}}/cache", "run.name=paper",
    "tokenizer.kind=bytes", "model.dim=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1",
    "model.ffn_dim=64", "train.seq_len=64", "train.global_batch=4", "train.steps={STEPS}", "eval.every=4",
    "eval.batches=2", "checkpoint.every=4", "sample.max_tokens=4", "plan=precision=bf16",
]
run_rank(prepare_run(load_config(None, settings).config, world_size=1).path, None, sys.stdout)
"""


def test_run_succeeds_without_extra_waits(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    done = script_on_paper(script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "on 1 cuda rank" in done.stdout
    assert f"done    {STEPS} steps\n" in done.stdout
    (report,) = done.reports
    assert not report.mismatch
    assert not report.races
    assert report.num_syncs <= MOST_WAITS, report.lines()
