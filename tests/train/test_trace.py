"""A step with non-finite values is traced to module, rank and samples under any plan; `weft runs explain` shows it."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.choice import gate_runs
from tests.train import trace_cases
from tests.train.trace_cases import traced
from weft.cli.app import run
from weft.errors import TrainingHalted
from weft.monitor.events import read_events
from weft.train.loop.reporting import evaluation_text
from weft.train.step.trace_event import LossPart, RankFinding, TracedSamples, judge, unusual, worst

WEIGHT = "blocks.1.mlp.down.weight"


@pytest.mark.parametrize(("plan", "late"), [("", False), ("", True), ("accumulation=4", False)])
def test_sample_with_nonfinite_loss_is_named(plan, late):
    event, (loss, _), place = traced(plan, "loss", late=late)
    assert math.isnan(loss)
    assert (event["event"], event["step"], event["kind"], event["cause"]) == ("trace", place // 8 + 1, "loss", "loss")
    assert event["samples"] == [place]
    assert event["microbatch"] == (place % 8 // 2 if plan else 0)
    assert event["text"] == "all modules have finite outputs, but the loss computed from them is not finite"


def test_samples_that_raise_the_loss_are_named():
    event, _, place = traced("accumulation=2", "spike", "spike")
    assert (event["cause"], event["samples"], event["module"]) == ("samples", [place], "")
    assert event["figures"]["loss"] > 500 * event["figures"]["usual_loss"]
    event, _, _ = traced("", "", "spike")
    assert event["cause"] == "weights"  # no sample stands out


def test_module_with_nonfinite_output_is_named(monkeypatch):

    build = trace_cases.build_decoder

    def built(*args, **kwargs):
        model = build(*args, **kwargs)
        model.blocks[1].attn.q.register_forward_hook(lambda module, args, output: output * float("inf"))
        return model

    monkeypatch.setattr(trace_cases, "build_decoder", built)
    event, _, _ = traced("", "")
    assert (event["cause"], event["module"], event["rank"]) == ("module", "blocks.1.attn.q", 0)
    assert event["text"].startswith("the output of blocks.1.attn.q is the first that is not finite, for every sample;")


@pytest.mark.parametrize("late", [False, True])
def test_nonfinite_gradient_is_named(late):
    event, (loss, grad_norm), _ = traced("", "gradient", "gradient", late=late)
    assert math.isfinite(loss)
    assert not math.isfinite(grad_norm)
    assert (event["cause"], event["parameters"]) == ("gradient", ["blocks.1.norm2.weight"])


@pytest.mark.parametrize(("plan", "late"), gate_runs(
    [(plan, late) for late in (True, False) for plan in
     ("dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2", "pp=2 microbatches=2")], 0,
))  # fmt: skip
def test_nonfinite_gradient_is_named_under_plans(plan, late, ranks2):
    (event, (loss, grad_norm), _), (other, _, _) = ranks2.run(traced, plan, "gradient", "gradient", late=late)
    assert event == other
    assert math.isfinite(loss)
    assert not math.isfinite(grad_norm)
    assert (event["cause"], event["parameters"]) == ("gradient", ["blocks.1.norm2.weight"])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=4 ep=2", "dp_shard=4 ep=4 zero=3", "dp_shard=2 tp=2 ep=2 zero=1"])
def test_expert_parallel_plans_name_the_same_cause(plan, ranks4):
    event, _, place = ranks4.run(traced, plan, "loss")[0]
    assert (event["cause"], event["samples"]) == ("loss", [place])
    assert event["rank"] == (2 if "tp" in plan else 3)
    weight = "blocks.1.mlp.experts.down"
    found = ranks4.run(traced, plan, "", weight=weight, on_rank=2)
    assert all(one[0] == found[0][0] for one in found)
    event = found[0][0]
    assert (event["cause"], event["module"], event["rank"]) == ("weights", "blocks.1.mlp.experts", 2)
    assert event["parameters"] == [weight]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=3 accumulation=2", "tp=2", "pp=2 microbatches=2"])
def test_two_ranks_name_the_same_cause_as_one(ranks2, plan):
    (event, (loss, _), place), (other, _, _) = ranks2.run(traced, plan, "loss")
    assert math.isnan(loss)
    assert event == other
    assert (event["cause"], event["samples"], event["step"]) == ("loss", [place], place // 8 + 1)
    # The sample is in the second half of its batch. The last stage has the loss, and so does the first rank of tp.
    assert event["rank"] == (0 if plan.startswith("tp") else 1)
    (event, _, _), (other, _, _) = ranks2.run(traced, plan, "", weight=WEIGHT, on_rank=1)
    assert event == other
    assert (event["cause"], event["module"], event["rank"]) == ("weights", "blocks.1.mlp.down", 1)
    assert event["parameters"] == [WEIGHT]


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["cp=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "tp=2 sp=on", "compile=on dp_replicate=2",
             "recompute=full dp_shard=2 zero=3", "precision=bf16 dp_shard=2 zero=3"],
)  # fmt: skip
def test_other_plans_name_the_same_cause(ranks2, plan):
    event, _, place = ranks2.run(traced, plan, "loss")[0]
    assert (event["cause"], event["samples"]) == ("loss", [place])
    event, _, _ = ranks2.run(traced, plan, "", weight=WEIGHT, on_rank=1)[0]
    assert (event["cause"], event["module"], event["rank"]) == ("weights", "blocks.1.mlp.down", 1)


# --- events from the findings of ranks ---

SAMPLES = TracedSamples(0, 1, [3], math.nan, [2.0, 2.1, 9.0], False)


def test_earliest_stage_and_call_is_named():
    finds = [
        RankFinding(0, 1, 0, order=0, module="late"),
        RankFinding(0, 0, 1, order=4, module="slow"),
        RankFinding(0, 0, 0, order=2, module="mid.down", got_finite=False),
        RankFinding(1, 0, 0, order=0),
    ]
    found = judge("loss", SAMPLES, finds)
    assert (found["rank"], found["module"], found["cause"]) == (2, "mid", "module")
    assert found["text"] == (
        "the input of mid.down is the first value that is not finite: mid computes it outside its modules"
    )
    found = judge("loss", SAMPLES, [RankFinding(0, 0, 0, order=3, module="a", input_finite=False)])
    assert found["cause"] == "input"


def test_untraceable_step_is_reported():
    found = judge("loss", SAMPLES, [RankFinding(0, 0, 0), RankFinding(0, 0, 1, error="ValueError: odd")])
    assert found["text"] == "the second forward that looks for the cause failed (ValueError: odd)"
    finite = TracedSamples(0, 0, [3], 2.0, [2.0], False)
    assert "in evaluation mode, gave finite numbers" in judge("loss", finite, [RankFinding(0, 0, 0)])["text"]
    alone = TracedSamples(0, 0, [3], 9.0, [9.0], False)
    assert "no other samples" in judge("spike", alone, [RankFinding(0, 0, 0)])["text"]


def test_spike_is_compared_with_ranks_of_other_samples():
    spike = TracedSamples(0, 0, [3], 9.0, [2.0, 2.1, 9.0], False)
    finds = [RankFinding(0, 0, 0, sizes={"a": 1.0, "b": 70.0, "c": 71.0}),
             *(RankFinding(data, 0, 0, sizes={"a": 1.1, "b": 7.0, "c": 7.0}) for data in (1, 2)),
             RankFinding(1, 0, 1, sizes={"a": 9.0, "b": 9.0})]  # fmt: skip
    found = judge("spike", spike, finds)
    assert (found["module"], found["figures"]["size"], found["figures"]["usual_size"]) == ("b", 70.0, 7.0)
    assert found["figures"]["usual_loss"] == pytest.approx(2.05)


def test_worst_part_is_the_first_nonfinite_or_the_highest():
    parts = [LossPart(4.0, 2.0), LossPart(9.0, 3.0), LossPart(0.0, 0.0)]
    assert worst(parts) == 1
    assert worst([*parts, LossPart(1.0, 1.0, False), LossPart(math.nan, 1.0)]) == 3
    assert worst([LossPart(0.0, 0.0)] * 3) == 0
    assert LossPart.joined([LossPart(1.0, 1.0), LossPart(math.inf, 1.0)]).is_bad
    assert unusual({"a": 1.0}, [{"b": 1.0}]) is None


def test_nonfinite_evaluation_is_reported_at_the_end():
    assert evaluation_text({"step": 14, "loss": "nan"}, []) == "step 14: loss nan"


# --- a run and its report ---

TASK = """
import torch
from weft.train.tasks.decoder import DecoderTask

class Spoilt(DecoderTask):
    def loss(self, output, batch):
        loss_sum, count = super().loss(output, batch)
        (mark,) = self.data.tokenizer.encode("Z")
        return loss_sum * torch.where((batch["input_ids"] == mark).any(), float("nan"), 1.0), count
"""


@pytest.fixture
def spoilt_run(tmp_path, text, start):
    """Run on documents of which some contain a Z, which makes the loss non-finite."""
    lines = text.read_text().splitlines()
    text.write_text("\n".join(line.replace("loom", "ZOOM", place % 3 == 0) for place, line in enumerate(lines)) + "\n")
    (tmp_path / "spoilt.py").write_text(TASK)
    folder, _, shown = start(
        f"task={tmp_path / 'spoilt.py'}:Spoilt", "run.name=spoilt", "train.steps=14", "eval.every=0",
        "train.max_bad_steps=50", "checkpoint.every=0",
    )  # fmt: skip
    return folder, shown


def test_explain_shows_traces_and_invalid_requests(tmp_path, spoilt_run, capsys):
    folder, shown = spoilt_run
    traces = [event for event in read_events(folder.events) if event["event"] == "trace"]
    bad = [event["step"] for event in read_events(folder.events) if event["event"] == "step" and event["loss"] == "nan"]
    assert bad
    assert [event["step"] for event in traces] == bad
    step = bad[0]
    assert f"weft runs explain {folder.path} --step {step} shows the samples." in shown
    assert run(["runs", "explain", str(folder.path), "--step", str(step)]) == 0
    message = capsys.readouterr().out
    assert message.startswith(f"step {step}: all modules have finite outputs, but the loss")
    assert f"--- sample {traces[0]['samples'][0]}\n" in message
    assert "ZOOM" in message.replace("[[", "").replace("]]", "")
    assert "tokens trained" in message
    assert run(["runs", "explain", str(folder.path)]) == 0
    assert capsys.readouterr().out.startswith(f"step {bad[-1]}: ")

    sound = next(number for number in range(1, 14) if number not in bad)
    assert run(["runs", "explain", str(folder.path), "--step", str(sound)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {folder.path}, --step {sound}: this step has no trace. Use ")
    assert run(["runs", "explain", str(tmp_path / "none")]) == 2
    assert "it has no config.toml, so it is not a run folder of Weft." in capsys.readouterr().err

    [shard, *_] = sorted((tmp_path / "cache").rglob("train*/*.bin")) or sorted((tmp_path / "cache").rglob("*.bin"))
    kept = shard.read_bytes()
    shard.write_bytes(bytes(kept[:1]) * len(kept))
    assert run(["runs", "explain", str(folder.path), "--step", str(step)]) == 2
    assert capsys.readouterr().err == (
        f"error: {folder.path}: sample {traces[0]['samples'][0]} is not the one that step {step} saw: the data has "
        "changed since, or the task draws its samples at random. Bring back the data as it was.\n"
    )
    shutil.rmtree(tmp_path / "cache")
    assert run(["runs", "explain", str(folder.path), "--step", str(step)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    folder.events.write_text("\n".join(json.dumps({"event": "step", "step": one}) for one in (1, 2)) + "\n")
    assert run(["runs", "explain", str(folder.path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder.path}: none of its steps went wrong")


def test_first_consecutive_bad_steps_are_traced(tmp_path, text, start):
    (tmp_path / "always.py").write_text(TASK.replace('encode("Z")', 'encode("a")'))
    with pytest.raises(TrainingHalted):
        start(f"task={tmp_path / 'always.py'}:Spoilt", "run.name=always", "train.max_bad_steps=5")
    steps = [event["step"] for event in read_events(tmp_path / "always" / "events.jsonl") if event["event"] == "trace"]
    assert steps == [1, 2, 3]
