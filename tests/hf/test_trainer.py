"""transformers' Trainer under plans equals the same trainer on one device."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from tests.choice import todays
from tests.hf import cases
from tests.tools.warm_python import FORKS
from weft import env
from weft.errors import ConfigError, ModelError
from weft.hf import Trainer, use
from weft.hf.fused_head import token_fields
from weft.hf.loading import RankBatches, RankStream
from weft.hf.trainer import check_release
from weft.verify.rank_pool import RankError

pytestmark = pytest.mark.filterwarnings("default")  # warnings of transformers itself
#: Results of one device, by options.
_known: dict[str, Any] = {}


def on_one_device(folder, batch: int, **options: Any) -> Any:
    key = f"{batch} {sorted(options.items(), key=str)}"
    if key not in _known:
        _known[key] = cases.on_one_device(folder / "one", per_device_train_batch_size=batch, **options)
    return _known[key]


def expect_equal(found: Any, expected: Any, exact: bool) -> None:
    assert found["steps"] == expected["steps"]
    assert found["rates"] == expected["rates"]
    # Losses are logged in float32, which has steps of 2.4e-7 near 4. transformers computes its own losses in it.
    assert found["losses"] == pytest.approx(expected["losses"], abs=5e-7 if exact else 2e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-12, msg=name)
    assert len(found["evals"]) == len(expected["evals"])
    for own, one in zip(found["evals"], expected["evals"], strict=True):
        assert own == pytest.approx(one, rel=1e-6)


EVALUATED = {"metrics": True, "eval_strategy": "epoch"}
CASES = [
    ("dp_shard=2 zero=1", {}),
    ("dp_shard=2 zero=3", {"gradient_accumulation_steps": 4, "exact": False, **EVALUATED}),
    ("dp_replicate=2", {"train_sampling_strategy": "group_by_length"}),
    ("dp_shard=2 zero=2", {"stream": True, "max_steps": 3}),
    # The stream ends within a step; transformers adds the gradients of its last batch to the next step.
    (
        "dp_shard=2 zero=3",
        {"stream": True, "max_steps": 4, "gradient_accumulation_steps": 2, "evaluate_first": True},
    ),
    ("tp=2", {"num_rows": 6, **EVALUATED}),
    ("cp=2", {"num_rows": 6, "exact": False, **EVALUATED}),
    # The last step of the epoch has fewer microbatches than the others.
    ("pp=2", {"num_rows": 6, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "exact": False}),
    ("pp=2", {"num_rows": 8, "gradient_accumulation_steps": 2, **EVALUATED}),
]


@pytest.mark.parametrize(
    ("plan", "options"),
    todays(
        [
            *CASES,
            ("dp_shard=2 zero=3", {"lora": True, **EVALUATED}),
            ("tp=2", {"lora": True, "num_rows": 6, **EVALUATED}),
        ]
    ),
)
def test_trainer_equals_one_device(ranks2, tmp_path, plan, options):
    """The 9 samples are uneven: in the last step one data rank has 1 sample, and the other none."""
    options = {"num_train_epochs": 1, "num_rows": 9, **options}
    data_ranks = 2 if "dp_" in plan else 1
    expected = on_one_device(tmp_path, 2 * data_ranks, **options)
    found = ranks2.run(cases.on_ranks, plan, tmp_path / "ranks", **options)
    assert all(one["losses"] == found[0]["losses"] and one["evals"] == found[0]["evals"] for one in found)
    expect_equal(found[0], expected, options.get("exact", True))


def test_checkpoints_resume_under_another_plan_and_load_in_transformers(ranks2, tmp_path):
    options = {"num_train_epochs": 2, "num_rows": 9}
    expected = on_one_device(tmp_path, 4, **options)
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    out = tmp_path / "out"
    ranks2.run(cases.on_ranks, "dp_shard=2 zero=1", out, **saving, **options)
    assert sorted(one.name for one in out.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-6")
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=0, atol=1e-12)
    resumed = ranks2.run(
        cases.on_ranks, "tp=2", out, per_device_train_batch_size=4, resume=str(out / "checkpoint-4"), **options
    )[0]
    assert resumed["losses"] == pytest.approx(expected["losses"][4:], abs=5e-7)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-12)


class MeanLoss(transformers.Trainer):
    """The override in transformers' documentation: a mean that ignores num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=cases.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def collate_classes(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = cases.collate(records)
    return {**batch, "labels": batch["input_ids"][:, 0] % 3}


def classify(trainer_class: Any, folder: Any, plan: str | None, **options: Any) -> Any:
    logs = cases.Losses()
    trainer = (trainer_class if plan is None else use(trainer_class))(
        model=classifier(), args=cases.arguments(folder, num_train_epochs=1, **options), data_collator=collate_classes,
        train_dataset=cases.rows(7), callbacks=[logs], **({} if plan is None else {"plan": plan}),
    )  # fmt: skip
    trainer.train()
    return [one["loss"] for one in logs.logs if "loss" in one], trainer


def classify_on_rank(*args: Any, **options: Any) -> Any:
    with cases.as_rank():
        return classify(*args, **options)[0]


@pytest.mark.parametrize("kind", [transformers.Trainer, MeanLoss])
def test_losses_that_are_means_of_a_batch(ranks2, tmp_path, kind):
    """The model's own loss of a classifier and an override ignore num_items_in_batch."""
    expected, _ = classify(kind, tmp_path, None, per_device_train_batch_size=4)
    found = ranks2.run(classify_on_rank, kind, tmp_path, "dp_replicate=2")[0]
    assert found == pytest.approx(expected, abs=3e-7)


def refused(plan: str, folder: Any, **options: Any) -> None:
    cases.on_ranks(plan, folder, **{"num_train_epochs": 1, "num_rows": 4, **options})


@pytest.mark.parametrize(
    ("plan", "options", "text"),
    [
        ("dp_replicate=4", {}, "the plan needs 4 ranks"),
        ("tp=2 accumulation=3", {"gradient_accumulation_steps": 2}, "accumulation=3: gradient_accumulation_steps=2"),
        ("tp=2 precision=fp32", {"bf16": True}, "precision=fp32: bf16=True asks for another precision"),
        ("auto", {}, "plan=auto: "),
        ("dp_replicate=2 sync=average:2", {}, "sync=average:2: a trainer evaluates"),
        ("tp=2", {"torch_compile": True}, "torch_compile=True: with plan="),
        ("tp=2", {"auto_find_batch_size": True}, "auto_find_batch_size=True: with plan="),
        ("tp=2", {"bf16_full_eval": True}, "bf16_full_eval=True: with plan="),
        ("tp=2 sp=on", {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: with plan="),
        ("cp=2", {"exact": True}, "cp=2: compute_loss_func shifts labels"),
        (
            "pp=2",
            {"stream": True, "max_steps": 4, "gradient_accumulation_steps": 2, "num_rows": 6, "exact": False},
            "train_dataset: the stream ends after 1 of the 2 microbatches",
        ),
    ],
)
def test_contradictions_are_refused_in_one_sentence(ranks2, tmp_path, plan, options, text):
    with pytest.raises(RankError) as caught:
        ranks2.run(refused, plan, tmp_path, **options)
    assert text in caught.value.said
    assert "\n" not in caught.value.said


def test_models_whose_loss_a_plan_would_change_are_refused(ranks2, tmp_path):
    with pytest.raises(RankError, match="pp=2: MeanLoss computes its loss by calls of the model"):
        ranks2.run(classify_on_rank, MeanLoss, tmp_path, "pp=2", gradient_accumulation_steps=2)
    with pytest.raises(RankError, match="cp=2: BertForSequenceClassification is no causal language model"):
        ranks2.run(classify_on_rank, transformers.Trainer, tmp_path, "cp=2")


def test_a_trainer_works_without_ranks(tmp_path):
    _, trainer = classify(transformers.Trainer, tmp_path, "dp_replicate=*")
    assert isinstance(trainer, Trainer)
    trainer.save_model(str(tmp_path / "saved"))
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(plain.state_dict(), trainer.weft_run.full_state_dict(trainer.model))


def test_backward_in_an_own_training_step_is_refused(tmp_path):
    class Own(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    with pytest.raises(Exception, match=r"Own.training_step: it runs backward itself"):
        classify(Own, tmp_path, "dp_replicate=*")


def test_use_refuses_other_classes_and_releases():
    with pytest.raises(ModelError, match=r"no subclass of transformers\.Trainer"):
        use(dict)
    assert use(transformers.Trainer) is Trainer
    with pytest.raises(ConfigError, match=r"Trainer\.create_accelerator_and_postprocess, which this release"):
        check_release(dict)


def test_a_group_without_a_backend_for_the_device_is_replaced(tmp_path):
    """accelerate starts nccl without gloo; here the group lacks another device."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, weft\n"
        "from weft.comm.mesh import leave_unusable_group\n"
        "torch.distributed.init_process_group('gloo')\n"
        "leave_unusable_group(torch.device('cpu'))\n"
        "assert torch.distributed.is_initialized()\n"
        "leave_unusable_group(torch.device('xpu'))\n"
        "assert not torch.distributed.is_initialized()\n"
        "with weft.init('dp_replicate=2', device='cpu') as run:\n"
        "    assert run.mesh.world_size == 2\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=env.child_env(**{FORKS: "1"})
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("num_rows", "size", "num_ranks"), list(itertools.product((1, 7, 8, 9), (1, 2), (1, 2, 3))))
def test_ranks_divide_batches_and_streams(num_rows, size, num_ranks):
    sampler = torch.utils.data.BatchSampler(range(num_rows), size, drop_last=False)
    for drop_last in (False, True):
        batches = [RankBatches(sampler, rank, num_ranks, fills=False, drop_last=drop_last) for rank in range(num_ranks)]
        streams = [RankStream(range(num_rows), size, rank, num_ranks, drop_last=drop_last) for rank in range(num_ranks)]
        found = [[index for batch in one for index in batch] for one in batches]
        # All ranks together read each sample once, and a stream gives the same samples to a rank.
        count = num_rows // (size * num_ranks) * size * num_ranks if drop_last else num_rows
        if not drop_last:
            assert found == [list(one) for one in streams]
        assert sorted(itertools.chain(*map(list, streams))) == list(range(count))
        assert len({len(one) for one in batches}) == 1
    filled = [list(RankBatches(sampler, rank, num_ranks, fills=True, drop_last=False)) for rank in range(num_ranks)]
    assert len({len(one) for one in filled}) == 1


def test_fields_of_a_fused_head():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[1, -100, 4], [0, 2, -100]])
    found = token_fields(logits, labels, 0.5, ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs"))
    probs = (logits / 0.5).softmax(-1)
    for row, column in ((0, 0), (0, 2), (1, 0), (1, 1)):
        p, label = probs[row, column], labels[row, column]
        assert found["log_probs"][row, column] == pytest.approx(float(p[label].log()))
        assert found["entropy"][row, column] == pytest.approx(float(-(p * p.log()).sum()))
        assert bool(found["is_top1"][row, column]) == bool(p.argmax() == label)
        assert found["mean_logits"][row, column] == pytest.approx(float(logits[row, column].mean() / 0.5))
        assert found["log_sum_sq_probs"][row, column] == pytest.approx(float(p.square().sum().log()))
    assert all(not value[labels == -100].any() for value in found.values())


def test_metrics_are_gathered_over_the_data_ranks(ranks2):
    for plan, wanted in (("dp_replicate=2", ([0, 1], 3.0, 1.5, [1.0, 2.0])), ("tp=2", ([0], 1.0, 1.0, [1.0]))):
        assert ranks2.run(cases.gathered, plan) == [wanted, wanted]
