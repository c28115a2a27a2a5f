"""NEFTune, LoRA+, optimizers by common names, warm-up shares, deterministic steps and the profiler."""

from __future__ import annotations

import functools
import gzip
import json
import math

import pytest
import torch

from tests.choice import todays
from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.config.sections import OptimizerSection
from weft.errors import ConfigError
from weft.models.adapters import add_adapter
from weft.optim.build import build_optimizer
from weft.optim.lion import Lion
from weft.parallel.dropout.embedding_noise import embedding_noise
from weft.parallel.parallelize import parallelize
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches

CASE = DecoderCase(LLAMA, num_steps=3, max_grad_norm=0.5)
PLANS = ("dp_replicate=2 accumulation=2", "dp_shard=2 zero=3", "dp_shard=2 zero=1", "tp=2 sp=on", "tp=2", "cp=2",
         "pp=2 microbatches=2")  # fmt: skip
#: Settings of a case: optimizer, NEFTune's alpha, rank of an adapter with its LoRA+ ratio.
CASES = {
    "noise": ({}, 5.0, 0, 1.0),
    "lion": ({"name": "lion", "lr": 1e-3}, 0.0, 0, 1.0),
    "bytes": ({"name": "adamw_8bit"}, 0.0, 0, 1.0),
    "plus": ({"lr": 1e-3}, 0.0, 4, 8.0),
}


def losses(plan_text: str, name: str) -> list[float]:
    settings, alpha, rank, ratio = CASES[name]
    plan = Plan.parse(f"{plan_text} precision=fp64")
    adapter = {"adapter": {"rank": rank, "lora_plus_ratio": ratio}} if rank else {}
    config = RunConfig.model_validate({"optimizer": settings, **adapter})
    mesh, model = build_mesh(plan), CASE.model()
    if rank:
        add_adapter(model, rank=rank)
    parallelize(model, mesh, seed=3, noise=embedding_noise(model, alpha, CASE.seq_len))
    optimizer = build_optimizer(model.named_parameters(), config.full_optimizer, seed=3)
    step = TrainStep(model, optimizer, CASE.loss, mesh, forward=CASE.forward, max_grad_norm=CASE.max_grad_norm)
    return [step(local_microbatches(CASE.batch(one), plan, mesh.data.rank)).loss for one in range(CASE.num_steps)]


def all_losses(plan: str) -> dict[str, list[float]]:
    return {name: losses(plan, name) for name in CASES}


@functools.cache
def wanted() -> dict[str, list[float]]:
    return all_losses("dp_replicate=1")


@pytest.mark.parametrize(
    "plan", todays([*PLANS[:2], PLANS[3], *(pytest.param(one, marks=pytest.mark.full) for one in PLANS[4:])], parts=2)
)
def test_settings_train_alike_under_every_plan(plan, ranks2):
    for found in ranks2.run(all_losses, plan):
        for name, numbers in wanted().items():
            assert found[name] == pytest.approx(numbers, rel=1e-9), (plan, name)


def test_noise_is_uniform_and_only_in_training():
    model = CASE.model()
    parallelize(model, build_mesh(Plan.parse("precision=fp64")), seed=1, noise=("embed", 0.25))
    ids = torch.zeros(8, 512, dtype=torch.long)
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model(ids)
    model.eval()(ids)
    noise = (seen[0] - seen[1]).flatten()
    assert 0.2499 < float(noise.abs().max()) <= 0.25
    assert abs(float(noise.mean())) < 5 * 0.25 / math.sqrt(3 * noise.numel())
    assert float(noise.std()) == pytest.approx(0.25 / math.sqrt(3), rel=0.01)


def test_size_of_the_noise_follows_the_paper():
    path, largest = embedding_noise(CASE.model(), 5.0, 64)
    assert (path, largest) == ("embed", 5.0 / math.sqrt(64 * LLAMA.dim))
    with pytest.raises(ConfigError, match="the model has no embedding of tokens"):
        embedding_noise(torch.nn.Linear(2, 2), 5.0, 64)


def test_lion_equals_its_formula():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(3, 4, dtype=torch.float64)
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    for _ in range(3):
        grad = torch.randn(3, 4, dtype=torch.float64)
        weight.grad = grad
        optimizer.step()
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * (0.9 * momentum + 0.1 * grad).sign()
        momentum = 0.99 * momentum + 0.01 * grad
    assert torch.allclose(weight, expected, rtol=1e-12)


def test_lora_plus_raises_the_rate_of_b_alone():
    model = add_adapter(CASE.model(), rank=2)
    config = RunConfig.model_validate({"adapter": {"rank": 2, "lora_plus_ratio": 16}, "optimizer": {"lr": 1e-4}})
    groups = build_optimizer(model.named_parameters(), config.full_optimizer).param_groups
    rates = {id(param): group["lr"] for group in groups for param in group["params"]}
    by_kind = {name.rpartition(".")[2]: rates[id(one)] for name, one in model.named_parameters() if one.requires_grad}
    assert by_kind == {"lora_A": 1e-4, "lora_B": pytest.approx(1.6e-3)}


@pytest.mark.parametrize(
    "name, found",
    [
        ("adamw_torch_fused", ("adamw", "fp32")),
        ("adamw_8bit", ("adamw", "fp8")),
        ("adafactor", ("torch.optim:Adafactor", "fp32")),
        ("soap", ("pytorch_optimizer:SOAP", "fp32")),
    ],
)
def test_common_names_of_optimizers(name, found):
    section = load_config(None, [f"optimizer.name={name}"]).config.optimizer
    assert (section.name, section.states) == found


def test_a_state_format_wins_over_that_of_a_name():
    section = load_config(None, ["optimizer.name=adamw_8bit", "optimizer.states=bf16"]).config.optimizer
    assert (section.name, section.states) == ("adamw", "bf16")


def test_adafactor_by_name_steps():
    section = OptimizerSection(name="adafactor", lr=1e-2)
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model.named_parameters(), section)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert type(optimizer) is torch.optim.Adafactor


@pytest.mark.parametrize(
    "words, text",
    [
        (["schedule.warmup_ratio=0.1", "schedule.warmup_steps=3"], "Keep one of them"),
        (["train.profile=9-3"], "1 to 50 steps up to train.steps=300 can be profiled"),
        (["train.profile=299-301"], "1 to 50 steps up to train.steps=300 can be profiled"),
        (["train.profile=x"], "steps such as 10-12 or 10, counted from 1 is needed"),
        (["train.deterministic=true", "kernels.convolutions=measured"], "may choose other algorithms in each run"),
        (["adapter.lora_plus_ratio=16"], "there is no adapter"),
        (["adapter.rank=4", "adapter.lora_plus_ratio=0.5"], "a number from 1"),
    ],
)
def test_refused(words, text):
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert text in str(caught.value)


def test_missing_package_names_its_extra():
    section = OptimizerSection(name="soap")
    with pytest.raises(ConfigError, match=r"optimizer.name=pytorch_optimizer:SOAP: .* Install weft\[optim\]"):
        build_optimizer(torch.nn.Linear(2, 2).named_parameters(), section)


def test_warmup_is_a_share_of_the_steps():
    schedule = load_config(None, ["schedule.warmup_ratio=0.1"]).config.schedule
    assert [schedule.warmup(steps) for steps in (5, 40, 20000)] == [0, 4, 2000]


def test_run_profiles_deterministic_steps_with_noise(tmp_path):
    words = [f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "train.steps=4", "model.num_layers=1"]
    words += [
        "model.dim=32",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "train.seq_len=32",
        "train.global_batch=2",
        "launch.device=cpu",
    ]
    words += ["train.profile=2-3", "train.deterministic=true", "train.neftune_alpha=5", "eval.batches=1"]
    words += ["tokenizer.kind=bytes", "data.train=src/weft/optim/*.py", "sample.prompt=", "plan="]
    folder = prepare_run(load_config(None, words).config, world_size=1)
    before = torch.are_deterministic_algorithms_enabled()
    with (tmp_path / "log").open("w") as log:
        run_rank(folder.path, None, log, Start())
    assert torch.are_deterministic_algorithms_enabled() == before
    assert "deterministic" in (tmp_path / "log").read_text()
    (file,) = (folder.path / "profile").iterdir()
    assert file.name == "steps_2-3_rank0.json.gz"
    names = {one.get("name") for one in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"step 2", "step 3"} <= names
    assert not {"step 1", "step 4"} & names
