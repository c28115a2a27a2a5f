"""Custom scripts save, load, export and average under every plan."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.parity.cases import LLAMA, HuggingFaceCase
from tests.parity.moe_cases import MOE, HuggingFaceMoECase, MoECase
from weft.checkpoint.load import load_checkpoint
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError, ModelError, WeftError
from weft.verify.parity import DecoderCase, local_microbatches

STEPS, HALF = 4, 2
CASE = DecoderCase(LLAMA, num_steps=STEPS)
TWO = ["dp_replicate=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "pp=2 accumulation=2"]


def start(plan_text: str) -> weft.Run:
    plan = Plan.parse(plan_text)
    return weft.Run(plan, build_mesh(plan), Ledger(), seed=0)


class Script:
    """Script with a model, a train step, a scheduler and an EMA."""

    def __init__(self, plan_text: str, case: DecoderCase = CASE):
        self.case = case
        self.run = start(f"{plan_text} precision=fp64")
        self.model = self.run.parallelize(case.model())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.step = self.run.train_step(self.model, optimizer, case.loss, forward=case.forward, max_grad_norm=0.5)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)
        self.ema = self.run.ema(self.model, decay=0.9)

    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.step, "scheduler": self.scheduler, "ema": self.ema}

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for index in range(first, last):
            batches = local_microbatches(self.case.batch(index), self.run.plan, self.run.mesh.data.rank)
            losses.append(self.step(batches).loss)
            self.scheduler.step()
            self.ema.update()
        return losses

    def result(self) -> dict:
        whole = self.run.full_state_dict(self.model)
        with self.ema.swapped():
            averages = self.run.full_state_dict(self.model)
            loss = self.evaluate()
        return {"weights": whole, "averages": averages, "loss": loss, "lr": self.scheduler.get_last_lr()}

    def evaluate(self) -> float:
        """Evaluate this rank's samples of three batches."""
        axis, halves = self.run.mesh.data, []
        for index in range(3):
            batch = self.case.batch(10 + index)
            halves.append({name: one.tensor_split(axis.size)[axis.rank] for name, one in batch.items()})
        return self.run.evaluate(self.model, halves, self.case.loss, forward=self.case.forward).loss


def save_half(plan_text: str, folder: str) -> str:
    script = Script(plan_text)
    script.train(0, HALF)
    return str(script.run.save(folder, step=HALF, extra={"best": 0.5}, **script.state()))


def resume(plan_text: str, folders: list[str]) -> list[dict]:
    """Resume from each folder in a script that has trained on something else."""
    script, found = Script(plan_text), []
    for folder in folders:
        loaded = script.run.load(folder, **script.state())
        assert loaded.step == HALF
        assert loaded.extra == {"best": 0.5}
        losses = script.train(loaded.step, STEPS)
        found.append({"losses": losses, **script.result()})
    return found


def assert_same(got: dict, want: dict, case: object) -> None:
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-10), case
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-10), case
    assert got["lr"] == want["lr"]
    for group in ("weights", "averages"):
        assert list(got[group]) == list(want[group]), case
        for name, tensor in want[group].items():
            assert float((got[group][name] - tensor).abs().max()) <= 1e-10, (case, group, name)


@pytest.mark.parametrize("pairs", ["a ring", pytest.param("all", marks=pytest.mark.full)])
def test_state_saved_under_one_plan_resumes_under_another(pairs, tmp_path, ranks2):
    script = Script("dp_replicate=1")
    script.train(0, HALF)
    want = {"losses": script.train(HALF, STEPS), **script.result()}
    folders = {plan: str(tmp_path / str(index)) for index, plan in enumerate(["dp_replicate=1", *TWO])}
    for plan, folder in folders.items():
        path = save_half(plan, folder) if plan == "dp_replicate=1" else ranks2.run(save_half, plan, folder)[0]
        assert path == str(Path(folder) / "step_00000002")
    plans = list(folders)
    for place, target in enumerate(plans):
        sources = plans if pairs == "all" else [plans[place - 1]]
        saved = [folders[source] for source in sources]
        found = resume(target, saved) if target == "dp_replicate=1" else ranks2.run(resume, target, saved)[0]
        for got, source in zip(found, sources, strict=True):
            assert_same(got, want, (source, target))


def step_inside(plan_text: str) -> tuple[str, bool]:
    """Return the error of a step inside `swapped`, and whether the averages were swapped back."""
    script = Script(plan_text)
    script.train(0, 1)
    try:
        with script.ema.swapped():
            script.step(local_microbatches(CASE.batch(1), script.run.plan, script.run.mesh.data.rank))
    except ModelError as error:
        script.ema.update()
        return str(error), True
    return "", False


@pytest.mark.parametrize("plan", TWO)
def test_step_that_trains_the_averages_is_reported(plan, ranks2):
    for said, is_out in ranks2.run(step_inside, plan):
        assert "a step trained the averages" in said
        assert is_out


def full(plan_text: str) -> tuple[dict, dict, dict]:
    script = Script(plan_text)
    script.train(0, 1)
    everywhere = script.run.full_state_dict(script.model, everywhere=True)
    return script.run.full_state_dict(script.model), everywhere, script.result()["averages"]


@pytest.mark.parametrize("plan", [*TWO, "cp=2"])
def test_full_state_dict_matches_the_plain_model(plan, ranks2):
    plain = CASE.model()
    (first, everywhere, _), (other, also, _) = ranks2.run(full, plan)
    assert other == {}
    assert list(first) == list(everywhere) == list(also) == list(plain.state_dict())
    plain.load_state_dict(first)  # checks names and shapes
    assert first["head.weight"].data_ptr() == first["embed.weight"].data_ptr()


def averaged_by_torch() -> dict[str, torch.Tensor]:
    script = Script("dp_replicate=1")
    torchs = AveragedModel(script.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for index in range(3):
        script.train(index, index + 1)
        torchs.update_parameters(script.model)
    return {name: param.detach().clone() for name, param in torchs.module.named_parameters()}


def averaged(plan_text: str) -> dict[str, torch.Tensor]:
    script = Script(plan_text)
    script.train(0, 3)
    before = script.run.full_state_dict(script.model, everywhere=True)
    averages = script.result()["averages"]
    after = script.run.full_state_dict(script.model, everywhere=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return averages


@pytest.mark.parametrize(
    "plan", ["dp_shard=2 zero=1", "dp_shard=2 zero=2 offload=optimizer", "dp_shard=2 zero=3 offload=optimizer"]
)
def test_ema_matches_torch(plan, ranks2):
    want = averaged_by_torch()
    got = ranks2.run(averaged, plan)[0]
    assert all(float((got[name] - want[name]).abs().max()) < 1e-10 for name in want)


def refusals(plan_text: str) -> dict[str, str]:
    """Return the error messages of PyTorch's usual functions."""
    script = Script(plan_text)
    script.train(0, 1)
    model, optimizer = script.model, script.step.optimizer
    ways = {
        "state_dict": lambda: model.state_dict(),
        "part": lambda: model.get_submodule("blocks").state_dict(),
        "load": lambda: model.load_state_dict({}, strict=False),
        "optimizer": optimizer.state_dict,
        "optimizer load": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "copy": lambda: AveragedModel(model),
    }
    found = {}
    for name, way in ways.items():
        try:
            way()
        except (ModelError, ValueError) as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("plan", "words", "refused"),
    [
        ("dp_replicate=2", "", set()),
        ("dp_shard=2 zero=2", "zero=2", {"optimizer", "optimizer load"}),
        ("dp_shard=2 zero=3", "zero=3", {"state_dict", "part", "load", "optimizer", "optimizer load", "copy"}),
        ("tp=2", "tp=2", {"state_dict", "part", "load", "optimizer", "optimizer load"}),
        ("pp=2 accumulation=2", "pp=2", {"state_dict", "part", "load", "optimizer", "optimizer load"}),
    ],
)
def test_functions_that_return_shards_are_rejected_with_the_right_one(plan, words, refused, ranks2):
    for found in ranks2.run(refusals, plan):
        found = {name: text for name, text in found.items() if "run." in text}
        assert found.keys() == refused
        for name, text in found.items():
            assert f"under {words} " in text, name
        if "state_dict" in refused:
            assert "run.full_state_dict(model)" in found["state_dict"]
            assert "run.load(folder" in found["load"]
        if "copy" in refused:
            assert "Use run.ema(model, decay=0.999)" in found["copy"]


HF = {kind: HuggingFaceCase(LLAMA, kind=kind, num_steps=1) for kind in ("llama", "gpt2", "qwen2")}
HF["mixtral"] = HuggingFaceMoECase(MOE, kind="mixtral", num_steps=1)
EXPERTS = ["dp_shard=2 ep=2", "dp_shard=2 ep=2 zero=3"]


def export(plan_text: str, kind: str, folder: str) -> None:
    script = Script(plan_text, HF[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script.run.save_pretrained(script.model, folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_save_pretrained_matches_transformers_files(kind, tmp_path, ranks2):
    import transformers

    plain = HF[kind].model()
    plain.save_pretrained(tmp_path / "plain")
    want = files(tmp_path / "plain")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= want.keys()
    for index, plan in enumerate([*TWO, "cp=2"]):
        ranks2.run(export, plan, kind, str(tmp_path / str(index)))
        assert files(tmp_path / str(index)) == want, plan
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "2", dtype="auto")
    ids = HF[kind].batch(0)["input_ids"]
    assert torch.equal(back(ids).logits, plain.eval()(ids).logits)


def test_distributed_experts_are_saved_as_transformers_does(tmp_path, ranks2):
    HF["mixtral"].model().save_pretrained(tmp_path / "plain")
    for index, plan in enumerate(EXPERTS):
        ranks2.run(export, plan, "mixtral", str(tmp_path / str(index)))
        assert files(tmp_path / str(index)) == files(tmp_path / "plain"), plan


def resume_with_experts(plan_text: str, folder: str, first: int, last: int) -> dict:
    script = Script(plan_text, MoECase(MOE, num_steps=STEPS))
    loaded = script.run.load(folder, **script.state())
    assert (loaded.step if loaded else 0) == first
    losses = script.train(first, last)
    script.run.save(folder, step=last, **script.state())
    return {"losses": losses, **script.result()}


def test_distributed_experts_resume_on_one_rank(tmp_path, ranks2):
    resume_with_experts("dp_replicate=1", str(tmp_path / "plain"), 0, HALF)
    want = resume_with_experts("dp_replicate=1", str(tmp_path / "plain"), HALF, STEPS)
    ranks2.run(resume_with_experts, EXPERTS[0], str(tmp_path / "cut"), 0, HALF)
    got = ranks2.run(resume_with_experts, EXPERTS[1], str(tmp_path / "cut"), HALF, STEPS)[0]
    assert_same(got, want, EXPERTS)


def export_rounded(plan_text: str, folder: str) -> list[str]:
    run = start(f"{plan_text} precision=bf16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = run.parallelize(HF["llama"].model().bfloat16())
    run.save_pretrained(model, f"{folder}/loaded")
    run.save_pretrained(model, f"{folder}/masters", dtype=torch.float32)
    return [str(one.message) for one in told]


def test_bf16_model_reports_its_memory_and_is_saved_in_bf16(tmp_path, ranks2):
    from safetensors.torch import load_file

    plain = HF["llama"].model().bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    first, other = ranks2.run(export_rounded, "dp_shard=2 zero=3", str(tmp_path))
    assert files(tmp_path / "loaded") == files(tmp_path / "plain")
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert json.loads((tmp_path / "masters" / "config.json").read_text())["dtype"] == "float32"
    assert not other
    (line,) = first
    assert line.startswith("precision: the model was loaded in bfloat16 with ")
    assert "a float32 master too. Every plan keeps these masters. Use zero=1, 2 or 3" in line


def test_bf16_model_under_fp32_suggests_bf16_precision():
    with pytest.warns(UserWarning, match=r"loaded in bfloat16 with .* all in float32. Use precision=bf16"):
        start("dp_replicate=1").parallelize(nn.Linear(8, 8).bfloat16())


def loss_fn(output, batch):
    return output.float().square().sum(), output.shape[0]


def test_first_start_and_resume_use_the_same_code(tmp_path):
    data = TensorDataset(torch.randn(24, 8))
    seen = []
    for _ in range(2):
        run = start("dp_replicate=1 precision=fp16")
        model = run.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
        loader = run.shard(DataLoader(data, batch_size=4, shuffle=True))
        step = run.train_step(model, torch.optim.SGD, loss_fn, lr=0.1)
        loaded = run.load(tmp_path, model=model, optimizer=step, loader=loader)
        done = loaded.step if loaded else 0
        for index, batch in enumerate(loader, done + 1):
            step(batch)
            run.save(tmp_path, step=index, model=model, optimizer=step, loader=loader, keep=2)
            if index - done == 2:
                step.loss_scale.scale = 1024.0
                run.save(tmp_path, step=index, model=model, optimizer=step, loader=loader, keep=2)
                break
        seen.append((done, step.loss_scale.scale if not done else None, loader.state_dict()))
    assert seen == [(0, 1024.0, {"epoch": 0, "next_batch": 2}), (2, None, {"epoch": 0, "next_batch": 4})]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step")) == [
        "step_00000003",
        "step_00000004",
    ]


def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path):
    run = start("dp_replicate=1")
    model = run.parallelize(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        path = run.save(tmp_path, step=step, model=model, optimizer=optimizer)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    loaded = run.load(tmp_path, model=model, optimizer=optimizer)
    assert loaded.step == 1
    assert loaded.passed_over[0].startswith("step_00000002: model.safetensors does not match its digest")
    with pytest.raises(CheckpointError, match=r"step_00000002: model.safetensors does not match"):
        run.load(tmp_path, model=model, optimizer=optimizer, step=2)
    with pytest.raises(CheckpointError, match="step_00000007: no such checkpoint"):
        run.load(tmp_path, model=model, optimizer=optimizer, step=7)


def test_misuse_raises_one_message(tmp_path):
    run = start("dp_replicate=1")
    plain = nn.Linear(8, 2)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(
        ModelError,
        match=r"model of type Linear: this run did not parallelize it. Give the model "
        "that",
    ):
        run.save(tmp_path, step=1, model=plain, optimizer=sgd)
    with pytest.raises(ModelError, match=r"another run parallelized it"):
        start("dp_replicate=1").save(tmp_path, step=1, model=run.parallelize(plain), optimizer=sgd)
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"optimizer: it holds a parameter of shape \(3, 3\) that the parallelized"):
        run.save(tmp_path, step=1, model=plain, optimizer=other)
    with pytest.raises(ModelError, match=r"Linear: it has no save_pretrained. Use run.full_state_dict"):
        run.save_pretrained(plain, tmp_path)
    with pytest.raises(CheckpointError, match=r"loader=DataLoader: it has no state_dict"):
        run.save(tmp_path, step=1, model=plain, optimizer=sgd, loader=DataLoader([1]))
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    run.save(tmp_path, step=1, model=plain, optimizer=sgd)
    with pytest.raises(CheckpointError, match=r"scheduler: step_00000001 was saved without it. Leave scheduler= out."):
        run.load(tmp_path, model=plain, optimizer=sgd, scheduler=scheduler)
    deeper = run.parallelize(nn.Sequential(nn.Linear(8, 2)))
    with pytest.raises(
        CheckpointError,
        match=r"of another model: it lacks '0.bias', '0.weight' and it has 'bias', 'weight', which the model does "
        "not have",
    ):
        run.load(tmp_path, model=deeper, optimizer=torch.optim.SGD(deeper.parameters(), lr=0.1))


def fail_to_save(folder: str) -> str:
    run = start("dp_replicate=2")
    model = run.parallelize(nn.Linear(8, 2))
    try:
        run.save(folder, step=1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), extra={1: 2})
    except WeftError as error:
        return str(error)
    return ""


def test_write_error_of_rank_0_is_raised_on_all_ranks(tmp_path, ranks2):
    first, other = ranks2.run(fail_to_save, str(tmp_path))
    assert first == other
    assert "the key 1 is not text" in first


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=9),
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=5),
        lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
        lambda one: torch.optim.lr_scheduler.SequentialLR(
            one,
            [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.MultiStepLR(one, [1, 2])],
            milestones=[2],
        ),
    ],
)
def test_schedulers_resume_at_their_step(make, tmp_path):
    run = start("dp_replicate=1")
    model = run.parallelize(nn.Linear(2, 2))

    def fresh():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
        return optimizer, make(optimizer)

    def rates(optimizer, scheduler, number):
        found = []
        for _ in range(number):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = fresh()
    rates(optimizer, scheduler, 3)
    run.save(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    want = rates(optimizer, scheduler, 4)
    optimizer, scheduler = fresh()
    run.load(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler, 4) == want
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)


def save_in_background(plan_text: str, folder: str) -> dict:
    """Save in the background, train on, save again, and then let a save fail."""
    script = Script(plan_text)
    script.train(0, HALF)
    before = script.run.full_state_dict(script.model)
    path = script.run.save(folder, step=HALF, background=True, keep=1, extra={"best": 0.5}, **script.state())
    script.train(HALF, STEPS)
    assert script.run.wait_saved() == path
    assert script.run.wait_saved() is None
    script.run.save("/proc/nowhere", step=3, background=True, **script.state())
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 could not be written"):
        script.run.save(folder, step=4, **script.state())
    script.run.save(folder, step=4, background=True, keep=1, **script.state())
    loaded = script.run.load(folder, **script.state())  # waits for the save
    return {"before": before, "step": loaded.step, "names": sorted(one.name for one in Path(folder).glob("step*"))}


def test_background_save_has_its_step_and_errors_are_raised_at_next_call(tmp_path, ranks2):
    got = ranks2.run(save_in_background, TWO[2], str(tmp_path))
    assert [one["step"] for one in got] == [4, 4]
    assert got[0]["names"] == ["step_00000004"]
    saved = tmp_path / "once"
    (told,) = {str(one) for one in ranks2.run(background_save_result, TWO[2], str(saved))}
    weights = load_checkpoint(Path(told)).tensors("model")
    assert all(torch.equal(weights[name], one) for name, one in got[0]["before"].items() if name in weights)


def background_save_result(plan_text: str, folder: str) -> str:
    script = Script(plan_text)
    script.train(0, HALF)
    path = script.run.save(folder, step=HALF, background=True, **script.state())
    script.train(HALF, STEPS)
    script.run.wait_saved()
    return str(path)
