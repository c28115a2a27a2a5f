"""DeepSpeed imports: the corpus with its reports, and individual settings."""

from __future__ import annotations

import math

import pytest

from tests.deepspeed.goldens import FOLDER, RANKS, USED, read, refused, report_of
from weft.config.files import format_config, load_config
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Rule
from weft.config.sections import ScheduleSection
from weft.errors import ConfigError, PlanError
from weft.interop.deepspeed import import_deepspeed, plan_from_deepspeed
from weft.interop.deepspeed_keys import groups, known_keys
from weft.optim.schedule import lr_factor
from weft.optim.step_decision import LossScale


def nested(values: dict[str, object]) -> dict[str, object]:
    tables: dict[str, object] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        node = tables
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tables


def problems(config: object, world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        import_deepspeed(config, world_size)
    return [str(problem) for problem in caught.value.problems]


def line(config: dict[str, object], key: str, world_size: int | None = None) -> str:
    imported = import_deepspeed(nested(config), world_size, not_built=())
    (found,) = [line for line in imported.lines if line.key == key]
    return found.sentence


@pytest.mark.parametrize("name", RANKS)
def test_corpus_reports_equal_the_golden_files(name):
    assert report_of(read(name)) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", RANKS)
def test_corpus_configs_load_unless_a_rule_refuses_them(name, tmp_path):
    imported = read(name)
    file = tmp_path / "weft.toml"
    file.write_text(format_config(imported.config()))
    if not refused(imported):
        assert load_config(file).config == imported.config()
        return
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert sorted(problem.message for problem in caught.value.problems) == sorted(refused(imported))


def test_corpus_has_no_unlisted_file():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RANKS) == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.parametrize("key", USED)
def test_frequently_set_keys_are_understood(key):
    for value in USED[key]:
        extra = {"optimizer.type": "AdamW", "scheduler.type": "WarmupDecayLR", "zero_optimization.stage": 3}
        imported = import_deepspeed(nested({**extra, key: value}), not_built=())
        (found,) = [line for line in imported.lines if line.key == key]
        assert found.kind in ("became", "follows", "nothing")
        assert not imported.typos
        imported.config()


def test_settings_refused_by_a_rule_are_reported_as_not_built():
    rule = Rule(
        name="zero-not-built",
        field="zero",
        reason="ZeRO is not built yet.",
        predicate=lambda plan, facts: plan.zero == 3,
        finding=lambda plan, facts: "it is not built yet",
        remedy=lambda plan, facts: "Use zero=0",
    )
    for stage, kind in ((3, "not built"), (2, "became")):
        imported = import_deepspeed(
            {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}, not_built=[rule]
        )
        assert [line.kind for line in imported.lines] == [kind, "became"]
        assert imported.plan == f"dp_shard=* zero={stage} precision=bf16"


def test_default_not_built_rules_are_the_plan_rules():
    imported = import_deepspeed({"zero_optimization": {"stage": 3}})
    refused_today = {violation.field for violation in check(Plan.parse("dp_shard=2 zero=3"))}
    assert (imported.lines[0].kind == "not built") == bool(refused_today & {"dp_shard", "zero"})


def test_documented_loss_scale_equals_the_implementation():
    scale = LossScale()
    texts = {key: group.text for group in groups() for key in group.keys}
    assert f"starts at 2^{round(math.log2(scale.scale))} " in texts["fp16.initial_scale_power"]
    assert f"after {scale.growth_interval} good steps" in texts["fp16.loss_scale_window"]
    for _ in range(40):
        scale.update(finite=False)
    assert f"below {scale.scale:g}" in texts["fp16.min_loss_scale"]


def deepspeed_rate(step: int, name: str, total: int, warmup: int, low: float) -> float:
    """Return DeepSpeed's factor at a step (0-based) with a linear warm-up, from its formulas."""
    if step < warmup:
        return step / warmup
    if name == "WarmupLR":
        return 1.0
    if name == "WarmupDecayLR":
        return max(0.0, (total - step) / max(1, total - warmup))
    progress = min(1.0, (step - warmup + 1) / max(1, total - warmup))
    return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_learning_rate_schedule_matches_deepspeed(name):
    """Equal up to one step: DeepSpeed's first step has rate 0, Weft's has the first increment."""
    total, warmup = 400, 50
    params: dict[str, object] = {"warmup_num_steps": warmup, "warmup_type": "linear"}
    if name != "WarmupLR":
        params["total_num_steps"] = total
    if name == "WarmupCosineLR":
        params["cos_min_ratio"] = 0.1
    imported = import_deepspeed({"scheduler": {"type": name, "params": params}})
    section = imported.config().schedule
    assert isinstance(section, ScheduleSection)
    for step in range(total):
        theirs = deepspeed_rate(step, name, total, warmup, 0.1)
        assert abs(lr_factor(step, total, section) - theirs) <= 1 / warmup + 1e-9
    assert imported.overrides.get("train.steps", total) == total


def test_missing_optimizer_values_have_deepspeeds_defaults():
    section = import_deepspeed({"optimizer": {"type": "Adam"}}).config().optimizer
    assert (section.name, section.lr, section.betas, section.weight_decay) == ("adamw", 1e-3, (0.9, 0.999), 0.0)
    section = import_deepspeed({"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}).config().optimizer
    assert (section.name, section.lr, section.momentum, section.weight_decay) == ("sgd", 0.5, 0.0, 0.0)


def test_adam_without_decoupled_decay():
    config = {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False}
    key = "optimizer.params.adam_w_mode"
    assert line(config, key) == "follows from optimizer.name=adamw: without weight decay the two are the same"
    assert line({**config, "optimizer.params.weight_decay": 0.1}, key).startswith(
        "not supported yet: weight decay inside"
    )
    assert line({**config, "optimizer.type": "AdamW"}, key).startswith("follows from optimizer.name=adamw")


def test_schedulers_peak_replaces_the_optimizers_lr():
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    }
    assert import_deepspeed(config).overrides["optimizer.lr"] == 1e-4
    config["scheduler"]["params"] = {}
    assert import_deepspeed(config).overrides["optimizer.lr"] == 1e-3
    config["scheduler"]["type"] = "WarmupDecayLR"  # its own default replaces the optimizer's lr
    config["optimizer"]["params"]["lr"] = 3e-5
    assert import_deepspeed(config).overrides["optimizer.lr"] == 1e-3


@pytest.mark.parametrize("dtype, word", [("bf16", "bf16"), ("torch.bfloat16", "bf16"), ("fp32", "fp32")])
def test_gradient_communication_dtype(dtype, word):
    key = "communication_data_type"
    assert line({key: dtype}, key) == f"became plan reduce={word}"
    assert line({key: "auto"}, key) == "follows from plan.reduce (fp32 unless you set it)"
    assert line({key: "fp16"}, key) == (
        "not supported yet: Weft sends gradients in fp32 or bf16, which have the same range; fp16 overflows"
    )


def test_offload_of_parameters_needs_stage_3():
    key = "zero_optimization.offload_param.device"
    assert line({key: "cpu", "zero_optimization.stage": 2}, key).startswith(
        "has no effect in Weft: DeepSpeed reads it from"
    )
    assert line({key: "cpu", "zero_optimization.stage": 3}, key) == "became plan offload=params"


def test_one_rank_has_nothing_to_shard():
    imported = import_deepspeed({"zero_optimization": {"stage": 3}}, 1, not_built=())
    assert imported.plan == "dp_replicate=1"
    assert imported.lines[0].sentence == "became plan zero=0: there is one rank, so there is nothing to shard"


def test_secrets_are_not_reported():
    imported = import_deepspeed({"comet": {"enabled": True, "api_key": "hunter2"}})
    assert "hunter2" not in "".join(map(str, imported.lines))


def test_plan_from_a_file(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    assert plan_from_deepspeed(file, 4) == Plan(dp_shard=4, zero=2, precision="bf16")
    assert plan_from_deepspeed({"zero_optimization": {"stage": 1}}, world_size=2) == Plan(dp_shard=2, zero=1)
    with pytest.raises(PlanError) as caught:
        plan_from_deepspeed(str(file))
    expected = (
        "dp_shard=*: the file leaves the number of ranks open. Give world_size=, or start the ranks with torchrun."
    )
    assert str(caught.value) == expected
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert plan_from_deepspeed(file).dp_shard == 8


def test_all_errors_are_reported_with_their_lines(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{\n  "train_batch_size": 30,\n  "train_micro_batch_size_per_gpu": 4,\n  "gradient_accumulation_steps": 2,\n'
        '  "fp16": {\n    "enabled": true},\n  "bf16": {"enabled": true},\n  "optimizer": {"type": "AdmW",\n'
        '    "params": {"lr": -1}},\n  "zero_optimization": {"stage": 4}\n}\n'
    )
    assert problems(file, 4) == [
        f"{file}:2: train_batch_size=30: it must be 4 (micro batch) x 2 (accumulation) x 4 (ranks) = 32. "
        "Use train_batch_size=32, or change the others.",
        f"{file}:6: fp16.enabled=true: bf16.enabled is true too, and a model has one precision. "
        "Switch one of them off.",
        f"{file}:8: optimizer.type=AdmW: DeepSpeed knows Adam, AdamW, SGD, Lion, Lamb, Adagrad, Muon, MuAdam, MuAdamW, "
        "MuSGD, RMSprop, Adadelta. Did you mean 'AdamW'?",
        f"{file}:10: zero_optimization.stage=4: the value must be a whole number from 0 to 3. "
        "Use e.g. zero_optimization.stage=1.",
    ]


@pytest.mark.parametrize(
    "config, text",
    [
        ({"fp16": True}, 'fp16=true: the value must be a table. Write e.g. {"enabled": true}.'),
        ({"train_batch_size": "many"}, "train_batch_size=many: the value must be a whole number from 1 to 999999999. "),
        ({"train_batch_size": True}, "train_batch_size=true: the value must be a whole number"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage=auto: "auto" is not a value of this key.'),
        ({"gradient_clipping": -1}, "gradient_clipping=-1: the value must be a number from 0."),
        ({"gradient_clipping": math.nan}, "gradient_clipping=nan: the value must be a number from 0."),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled=yes: the value must be true or false. Write true or false."),
        (
            {"bf16": {"enabled": [{"": "\x7f\ud800"}]}},
            r'bf16.enabled=[{"" = "\x7f\ud800"}]: the value must be true or false.',
        ),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "Did you mean 'WarmupCosineLR'?"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "the value must be two numbers from 0 and below 1.",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0}}},
            "optimizer.params.lr=0: the value must be a number above 0.",
        ),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "DeepSpeed knows cpu, nvme, none."),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "4 is not a multiple of 3. Use a divisor."),
        ({"tensor_parallel": {"autotp_size": 3}}, "groups need a multiple of 3 ranks, and there are 4."),
        ({"train_batch_size": 10}, "train_batch_size=10: it must be a multiple of 1 (accumulation) x 4 (ranks) = 4."),
    ],
)
def test_wrong_value_is_one_line(config, text):
    (found,) = problems(config, 4)
    assert text in found


@pytest.mark.parametrize("world_size", [0, -3, 10**12])
def test_wrong_number_of_ranks(world_size):
    (found,) = problems({}, world_size)
    assert found.startswith(f"world_size={world_size}: the number of ranks must be a whole number from 1")


def test_key_groups_are_well_formed():
    for group in groups():
        assert group.outcome in ("becomes", "follows", "nothing", "not built", "removed")
        assert not group.text.endswith(".")
    assert len(known_keys()) == sum(len(group.keys) for group in groups()) > 300
