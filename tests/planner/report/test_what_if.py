"""What-if conditions: the value that each one sets, and errors for invalid text."""

from __future__ import annotations

import pytest

from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.report.scenario import LEVERS, change, what_if
from weft.planner.report.tables import scenario_table
from weft.planner.report.verdict import nearest_yes
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

BASE = Question.of("llama3-8b", "2x8xh100", seq_len=4096, global_batch=64, built_only=False, most_plans=20_000)


@pytest.mark.parametrize(
    ("text", "read", "value"),
    [
        ("gpus=32", lambda q: str(q.cluster), "4x8xh100"),
        ("gpus=4", lambda q: str(q.cluster), "4xh100"),
        ("nodes=3", lambda q: q.cluster.num_devices, 24),
        ("seq=8k", lambda q: q.job.seq_len, 8000),
        ("seq=2x", lambda q: q.job.seq_len, 8192),
        ("batch=128", lambda q: q.job.global_batch, 128),
        ("nic=100", lambda q: q.cluster.device.nic_bytes_per_s, 100e9),
        ("nic=400Gb/s", lambda q: q.cluster.device.nic_bytes_per_s, 50e9),
        ("link=300GB/s", lambda q: q.cluster.device.scale_up_bytes_per_s, 300e9),
        ("hbm=96GiB", lambda q: q.cluster.device.memory_bytes, 96 * 2**30),
        ("tflops=500TFLOPS", lambda q: q.cluster.device.peak_flops("bf16"), 500e12),
        ("device=npu memory=24GiB bf16=120TFLOPS bandwidth=800GB/s", lambda q: str(q.cluster), "2x8xnpu"),
        (
            "device=npu memory=24GiB bf16=1TFLOPS bandwidth=1GB/s link=1GB/s",
            lambda q: q.cluster.device.scale_up_domain,
            8,
        ),
        ("watts=350W", lambda q: q.cluster.device.watts, 350),
        ("nic=0.5x", lambda q: q.cluster.device.nic_bytes_per_s, 25e9),
        ("hbm=141", lambda q: q.cluster.device.memory_bytes, 141 * 2**30),
        ("link=900", lambda q: q.cluster.device.scale_up_bytes_per_s, 900e9),
        ("domain=72", lambda q: q.cluster.device.scale_up_domain, 72),
        ("bandwidth=4800", lambda q: q.cluster.device.memory_bytes_per_s, 4800e9),
        ("tflops=2x", lambda q: q.cluster.device.peak_flops("bf16"), 1978e12),
        ("tflops=2x", lambda q: q.cluster.device.peak_flops("fp8"), 3958e12),
        ("device=h200", lambda q: str(q.cluster), "2x8xh200"),
        ("cluster=a100", lambda q: str(q.cluster), "1xa100"),
        ("optimizer=muon", lambda q: q.job.optimizer, "muon"),
        ("watts=350", lambda q: q.cluster.device.measured_flops / BASE.cluster.device.measured_flops, 0.5**0.85),
        ("states=bf16", lambda q: q.job.stack.main_bytes, 8.0),
        ("states=pure_bf16", lambda q: (q.job.stack.main_bytes, q.job.stack.master), (4.0, False)),
        ("gpus=8, hbm=2x", lambda q: (q.cluster.num_devices, q.cluster.device.name), (8, "h100*")),
    ],
)
def test_every_lever_sets_its_value(text, read, value):
    found = read(change(BASE, text))
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


def test_levers_change_nothing_else():
    for name, lever in LEVERS.items():
        same = change(BASE, f"{name}=1x")
        for other, each in LEVERS.items():
            assert each.now(same) == pytest.approx(each.now(BASE)), (name, other)
        assert lever.unit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu=16", "what-if=gpu: not a quantity that can be changed. Did you mean 'gpus'?"),
        ("gpus", "what-if='gpus': a change is name=value. Write e.g. 'gpus=16,nic=2x,seq=16384'."),
        ("gpus=12", "gpus=12: nodes have 8 devices. Use a multiple of 8."),
        ("gpus=many", "gpus=many: a whole number of devices above 0 is needed, or a multiple of today's 16."),
        ("gpus=2.5", "a whole number of devices above 0"),
        ("watts=900", "watts=900: h100 draws 700. Use less."),
        ("nic=300gb/s", "nic=300gb/s: a number of GB/s for each device above 0 is needed"),
        ("watts=350V", "watts=350V: a number of watts above 0 is needed"),
        ("nic=0", "nic=0: a number of GB/s for each device above 0 is needed"),
        ("seq=1M", "seq=1000000: llama3-8b reads at most 8192 tokens. Use less."),
        ("device=h1000", "device=h1000: unknown device."),
    ],
)
def test_invalid_changes_are_rejected(text, message):
    with pytest.raises(ConfigError) as caught:
        change(BASE, text)
    assert message in str(caught.value)


def test_more_of_every_resource_helps():
    now = what_if("gpus=1x", BASE).answer.best
    for text in ("gpus=2x", "nic=4x", "tflops=2x", "hbm=2x"):
        found = what_if(text, BASE)
        assert found.answer.best.tokens_per_s >= now.tokens_per_s * 0.999, text
        assert scenario_table(found)["best"]["step_s"] == found.answer.best.step_s


def test_nearest_fitting_change_fits():
    question = Question.of("llama3-70b", "rtx4090", built_only=False)
    found = nearest_yes(question)
    assert found
    for each in found:
        assert each.answer.best.fits >= question.fits
    assert found[0].text.startswith("cluster=")


def test_fp8_products_are_priced_if_the_device_supports_them():
    plain, narrow = what_if("nic=1x", BASE).answer.best, what_if("precision=fp8", BASE).answer.best
    assert 0.5 * plain.step_s < narrow.step_s < 0.98 * plain.step_s  # two of three products, with one scale per row
    assert narrow.plan.precision == "bf16"  # the plan of the runtime, once it multiplies in fp8
    for text, message in [
        ("device=a100,precision=fp8", "precision=fp8: a100 multiplies in no format of that name. Leave it out; only"),
        ("precision=fp4", "precision=fp4: h100 multiplies in no format of that name. Use precision=fp8."),
    ]:
        with pytest.raises(ConfigError) as caught:
            what_if(text, BASE)
        assert message in str(caught.value)


def test_optimizers_differ_in_memory_and_time():
    plan = [Plan.parse("dp_shard=16 zero=1 precision=bf16 compile=on recompute=full")]
    adamw, sgd, muon, small = (
        estimated(plan, change(BASE, text) if text else BASE)[0]
        for text in ("", "optimizer=sgd", "optimizer=muon", "states=fp8")
    )
    assert sgd.memory["optimizer"] == pytest.approx(adamw.memory["optimizer"] * 8 / 12)
    assert small.memory["optimizer"] == pytest.approx(adamw.memory["optimizer"] * 6 / 12)
    shape = BASE.job.shape
    matrices = shape.num_params - 2 * shape.table_params
    assert muon.memory["optimizer"] == pytest.approx(adamw.memory["optimizer"] - 4 * matrices / 16, rel=1e-3)
    assert sgd.terms["optimizer"] < adamw.terms["optimizer"]
    # By hand: 5 iterations of 4 m^2 k + 2 m^3 FLOPs for each m x k matrix, 1/16 of them per rank, at most at the peak.
    h, kv, ffn = 4096, 1024, 14336
    flops = sum(5 * (4 * m * m * k + 2 * m**3) for m, k in 2 * [(h, h)] + 2 * [(kv, h)] + 3 * [(h, ffn)]) * 32 / 16
    turning = muon.terms["optimizer"] - sgd.terms["optimizer"]
    assert flops / 989e12 < turning < 2 * flops / 989e12


def test_invalid_optimizers_are_rejected():
    for text in ("optimizer=lion", "states=int8", "optimizer=muon,states=bf16"):
        with pytest.raises(ConfigError, match=r"Write e\.g\.|Use it with"):
            change(BASE, text)
