"""Checkpoints of adapters: they contain only the adapter, resume under any plan, and reject another base by name."""

from __future__ import annotations

import math

import pytest
import torch

import weft
from tests.choice import gate_runs, todays
from tests.parity.adapter_cases import AdapterCase, extra_subjects, packed_subjects, stack_subjects
from tests.parity.cases import cases
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.read import Part
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError
from weft.models.adapters import merged_tensors
from weft.models.peft_files import load_adapter
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero.magnitudes import start_magnitudes
from weft.train.states.model_state import digest_of
from weft.verify.parity import Case, local_microbatches

HALF, STEPS = 2, 4
CASE = AdapterCase(cases()["decoder"], kind="dora")
PLANS = ["dp_replicate=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2 sp=on", "pp=2 accumulation=2"]


class Tuning:
    """A script that trains an adapter. scaled: the base's first weight is changed."""

    def __init__(self, plan_text: str, case: Case = CASE, scaled: float = 1.0):
        plan = Plan.parse(plan_text)
        self.case, self.run = case, weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
        model = case.model()
        if scaled != 1.0:
            model.get_parameter("blocks.0.attn.q.weight").data.mul_(scaled)
        self.model = self.run.parallelize(model if self.run.plan.precision == "fp64" else model.float())
        self.step = self.run.train_step(self.model, torch.optim.AdamW, case.loss, forward=case.forward, lr=3e-3)

    def train(self, first: int, last: int) -> list[float]:
        mesh = self.run.mesh
        batches = [
            local_microbatches(self.case.batch(index), self.run.plan, mesh.data.rank) for index in range(first, last)
        ]
        return [self.step(one).loss for one in batches]

    def save(self, folder: str) -> str:
        return str(self.run.save(folder, step=HALF, model=self.model, optimizer=self.step))

    def load(self, folder: str):
        return self.run.load(folder, model=self.model, optimizer=self.step)


def save_half(plan: str, folder: str) -> dict:
    script = Tuning(plan)
    script.train(0, HALF)
    path = script.save(folder)
    script.run.save_adapter(script.model, f"{folder}/peft")
    whole = script.run.full_state_dict(script.model)
    return {"path": path, "merged": merged_tensors(script.model, whole) if whole else {}}


def resume(plan: str, folders: list[str]) -> list[list[float]]:
    script, found = Tuning(plan), []
    for folder in folders:
        script.load(folder)
        found.append(script.train(HALF, STEPS))
    return found


@pytest.mark.parametrize("pairs", ["a ring", pytest.param("all", marks=pytest.mark.full)])
def test_adapter_saved_under_one_plan_resumes_under_another(pairs, tmp_path, ranks2):
    script = Tuning("precision=fp64")
    script.train(0, HALF)
    want = script.train(HALF, STEPS)
    plans = ["", *PLANS]
    folders = [str(tmp_path / str(number)) for number in range(len(plans))]
    saved = [
        save_half("precision=fp64", folder) if not plan else ranks2.run(save_half, f"{plan} precision=fp64", folder)[0]
        for plan, folder in zip(plans, folders, strict=True)
    ]
    first = load_checkpoint(saved[0]["path"]).state["adapter"]
    for plan, one in zip(plans, saved, strict=True):
        checkpoint = load_checkpoint(one["path"])
        names = checkpoint.entries("model").keys()
        assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B", "lora_magnitude"}, plan
        assert {name.rpartition("/")[0] for name in checkpoint.entries("optimizer")} == names, plan
        assert checkpoint.state["adapter"] == first, plan  # digests of the base do not depend on the plan
        # The export for peft has the same adapter, and merging it gives the same model.
        back = load_adapter(CASE.of.model(), f"{one['path'].rpartition('/')[0]}/peft")
        assert one["merged"].keys() == CASE.of.model().state_dict().keys()
        for name, tensor in merged_tensors(back, back.state_dict()).items():
            assert name == "head.weight" or torch.allclose(tensor, one["merged"][name], rtol=0, atol=1e-12), (
                plan,
                name,
            )
    for place, plan in enumerate(plans):
        some = folders if pairs == "all" else [folders[place - 1]]
        results = [resume("precision=fp64", some)] if not plan else ranks2.run(resume, f"{plan} precision=fp64", some)
        for rank in results:
            for losses, folder in zip(rank, some, strict=True):
                assert losses == pytest.approx(want, rel=1e-10), (plan, folder)


MORE_CASES = {
    "rows": (extra_subjects()["rows-untied"].case, ["dp_shard=2 zero=3", "tp=2", "pp=2 accumulation=2"]),
    "saved": (extra_subjects()["saved-tied"].case, ["dp_shard=2 zero=1", "tp=2 sp=on", "pp=2 accumulation=2"]),
    "stacks": (stack_subjects()["stacks"].case, ["dp_shard=2 ep=2", "tp=2", "dp_shard=2 zero=3"]),
    "quantized stacks": (packed_subjects()["nf4-stacks"].case, ["dp_shard=2 ep=2", "dp_shard=2 zero=3"]),
}


def halves(plan: str, name: str, folder: str, source: str) -> tuple[list[float], list[str]]:
    """Train and save the first half, load another folder's half, and return the losses of the second half."""
    script = Tuning(plan, MORE_CASES[name][0])
    if source:
        script.load(source)
        return script.train(HALF, STEPS), []
    script.train(0, HALF)
    path = script.save(folder)
    return [], sorted(load_checkpoint(path).entries("model"))


@pytest.mark.parametrize("name", todays(MORE_CASES, parts=2))
def test_rows_modules_and_experts_resume_under_another_plan(name, tmp_path, ranks2):
    case, plans = MORE_CASES[name]
    script = Tuning("precision=fp64", case)
    trained = {key for key, param in case.model().named_parameters() if param.requires_grad}
    script.train(0, HALF)
    want = script.train(HALF, STEPS)
    for place, plan in enumerate(plans):
        [_, names], _ = ranks2.run(halves, f"{plan} precision=fp64", name, str(tmp_path / str(place)), "")
        assert set(names) == trained, plan
    for place, plan in enumerate(plans):
        before = str(tmp_path / str((place - 1) % len(plans)))
        for losses, _ in ranks2.run(halves, f"{plan} precision=fp64", name, "", before):
            assert losses == pytest.approx(want, rel=1e-10), plan


def test_base_digest_is_equal_in_every_precision(tmp_path, ranks2):
    ranks2.run(save_half, "dp_shard=2 zero=3 precision=bf16", str(tmp_path))
    assert Tuning("precision=fp32").load(str(tmp_path)).step == HALF


def refusals(plan: str, folder: str, whole: str) -> list[str]:
    """Return load errors for another base, rank, kind or targets, and for mixing full models with adapters."""
    plain = cases()["decoder"]
    wrong = [
        Tuning(plan, scaled=1.5),
        Tuning(plan, AdapterCase(plain, kind="lora")),
        Tuning(plan, AdapterCase(plain, kind="dora", targets=("attn.q",))),
    ]
    found = []
    for script in wrong:
        with pytest.raises(WeftError) as error:
            script.load(folder)
        found.append(str(error.value))
    with pytest.raises(WeftError) as error:
        Tuning(plan).load(whole)
    found.append(str(error.value))
    with pytest.raises(WeftError) as error:
        Tuning(plan, plain).load(folder)
    return [*found, str(error.value)]


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_other_base_or_adapter_is_rejected_by_name(plan, tmp_path, ranks2):
    folder, whole = str(tmp_path / "adapter"), str(tmp_path / "whole")
    Tuning("precision=fp64").save(folder)
    Tuning("precision=fp64", cases()["decoder"]).save(whole)
    said = ranks2.run(refusals, f"{plan} precision=fp64", folder, whole)
    assert said[0] == said[1]
    adapter, model = f"{folder}/step_00000002: ", f"{whole}/step_00000002: "
    starts = [
        f"{adapter}an adapter of another base: 'blocks.0.attn.q.weight' had other values when it was saved.",
        f"{adapter}it has an adapter with kind=dora, and the model's has kind=lora. Use kind=dora.",
        f"{adapter}its adapter adapts 'blocks.0.attn.k', and the model's differs. Use the targets",
        f"{model}it has a full model, and this one trains only an adapter.",
        f"{adapter}it has only an adapter (kind=dora, rank=2), and the model has none. Call add_adapter",
    ]
    for text, start in zip(said[0], starts, strict=True):
        assert text.startswith(start), text


def test_digests_of_slices_sum_to_tensor_digest():
    torch.manual_seed(1)
    whole = torch.randn(70, 300)
    wanted = digest_of(whole.view(-1), Part((70, 300)))
    rows = [Part((70, 300), 0, ((0, 20), (40, 60))), Part((70, 300), 0, ((20, 40), (60, 80)))]  # the last one is padded
    padded = torch.cat([whole, torch.full((10, 300), 7.0)])
    lines = [torch.cat([padded[low:high] for low, high in one.rows]).view(-1) for one in rows]
    assert sum(digest_of(line, part) for line, part in zip(lines, rows, strict=True)) == wanted
    columns = [Part((70, 300), 1, ((first, first + 100),)) for first in (0, 100, 200)]
    assert sum(digest_of(whole[:, one.rows[0][0] : one.rows[0][1]].reshape(-1), one) for one in columns) == wanted
    turned = Part((70, 300), order=(1, 0))
    assert digest_of(whole.t().reshape(-1), turned) == wanted
    runs = [(0, 333), (333, 12000), (12000, 21000)]
    assert sum(digest_of(whole.view(-1)[low:high], Part((70, 300)), low) for low, high in runs) == wanted
    assert digest_of(whole.bfloat16().view(-1), Part((70, 300))) == wanted
    assert digest_of(whole.double().view(-1), Part((70, 300))) == wanted
    for change in (lambda x: x * 1.02, lambda x: x.flip(0), lambda x: x.roll(1, 1)):
        assert digest_of(change(whole).reshape(-1), Part((70, 300))) != wanted
    assert math.isfinite(int(digest_of(torch.zeros(0), Part((0, 3)))))


def save_merged(plan: str, folder: str) -> None:
    script = Tuning(plan, AdapterCase(cases()["hf-qwen2"], kind="dora"))
    script.run.save_pretrained(script.model, folder)


@pytest.mark.parametrize("plan", gate_runs(["tp=2", "pp=2", "dp_shard=2 zero=3"], 0))
def test_save_pretrained_merges_adapter(plan, tmp_path, ranks2):
    ranks2.run(save_merged, f"{plan} precision=fp64", str(tmp_path))
    model, ids = AdapterCase(cases()["hf-qwen2"], kind="dora").model().eval(), torch.arange(12)[None]
    merged = type(model.base_model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    wanted = model.base_model(ids).last_hidden_state
    torch.testing.assert_close(merged(ids).last_hidden_state, wanted, rtol=0, atol=1e-12)


def test_optimizer_of_stage_without_trained_parameters(ranks2, tmp_path):
    assert ranks2.run(_few, "pp=2 precision=fp64", str(tmp_path)) == [True, True]


def _few(plan: str, folder: str) -> bool:
    script = Tuning(plan, AdapterCase(cases()["decoder"], targets=("blocks.1.attn.q",)))
    losses = script.train(0, HALF)
    script.save(folder)
    script.load(folder)
    return all(map(math.isfinite, losses + script.train(HALF, STEPS)))


def magnitudes(plan: str, case: AdapterCase) -> list[float]:
    """Return the largest difference of each magnitude from its initial value after overwriting and resetting all."""
    script = Tuning(plan, case)
    engine = data_parallel(script.model)
    before = {name: tensor.clone() for name, tensor in engine.weights() if name.endswith("lora_magnitude")}
    for name, tensor in engine.local_weights().items():
        if name.endswith("lora_magnitude"):
            tensor.fill_(7.0)
    engine.publish()
    start_magnitudes(script.model)
    after = dict(engine.weights())
    seen = dict(script.model.named_parameters())
    assert all(not torch.any(param == 7.0) for name, param in seen.items() if name.endswith("lora_magnitude"))
    return [float((after[name] - tensor).abs().max()) for name, tensor in before.items()]


@pytest.mark.parametrize("plan", ["", "dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize("name", ["decoder", "hf-gpt2"])
def test_magnitudes_can_be_reset_after_base_is_loaded(plan, name, ranks2):
    case = AdapterCase(cases()[name], kind="dora", start_noise=0.0)
    for found in (
        ranks2.run(magnitudes, f"{plan} precision=fp64", case) if plan else [magnitudes("precision=fp64", case)]
    ):
        assert len(found) == (14 if name == "decoder" else 8)
        assert max(found) < 1e-12
