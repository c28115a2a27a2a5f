"""A small language model and its data, trained by transformers' Trainer and by weft.hf's on ranks."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.hf.accelerator import DataGather

VOCAB = 48


def model(seed: int = 0, **options: Any) -> transformers.PreTrainedModel:
    """Return a random Llama in float64."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def adapted(model: transformers.PreTrainedModel) -> Any:
    """Return the model with a LoRA of peft in float64."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config).double()


def rows(count: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """Return records of different lengths; a record's first tokens are not trained."""
    made = np.random.RandomState(seed)
    found = []
    for index in range(count):
        ids = made.randint(1, VOCAB, size=8 + index % 9).tolist()
        skipped = index % 4
        found.append({"input_ids": ids, "labels": [-100] * skipped + ids[skipped:]})
    return found


def collate(records: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad records on the right, to a multiple of 8."""
    longest = -(-max(len(one["input_ids"]) for one in records) // 8) * 8
    ids = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in records]
    labels = [one["labels"] + [-100] * (longest - len(one["labels"])) for one in records]
    mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in records]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss in float64; transformers' own loss is in float32."""
    sums = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return sums / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def accuracy(found: Any) -> dict[str, float]:
    """Return the accuracy of the next token, and a sum of logits that depends on every sample."""
    labels, logits = found.label_ids[:, 1:], found.predictions[:, :-1]
    counted = labels != -100
    return {
        "accuracy": float((logits.argmax(-1) == labels)[counted].mean()),
        "logits": float(np.abs(logits[counted]).sum()), "count": int(counted.sum()),
    }  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """Records without a length."""

    def __init__(self, records: list[Any]):
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


class Losses(transformers.TrainerCallback):
    """Records the logs of a trainer."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    """Return arguments of a short run."""
    settings = {
        "output_dir": str(folder), "use_cpu": True, "learning_rate": 3e-3, "num_train_epochs": 2, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.5, "weight_decay": 0.1,
        "adam_epsilon": 1e-6, "warmup_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "logging_nan_inf_filter": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**settings, **options})


def trained(trainer: Any, logs: Losses, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the log and the weights of a finished trainer."""
    losses = [one["loss"] for one in logs.logs if "loss" in one]
    norms = [float(one["grad_norm"]) for one in logs.logs if "grad_norm" in one]
    rates = [one["learning_rate"] for one in logs.logs if "learning_rate" in one]
    evals = [{k: v for k, v in one.items() if k in NAMES} for one in logs.logs if "eval_loss" in one]
    return {
        "losses": losses, "norms": norms, "rates": rates, "evals": evals, "steps": trainer.state.global_step,
        "weights": weights,
    }  # fmt: skip


NAMES = ("eval_loss", "eval_accuracy", "eval_logits", "eval_count")


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Set the variables of torchrun on a rank of a pool."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)


def on_one_device(folder: Path, num_rows: int = 22, trainer_class: Any = transformers.Trainer, **options: Any) -> Any:
    """Train with transformers' Trainer on this process."""
    return _train(trainer_class, folder, num_rows, **options)[0]


def on_ranks(plan: str, folder: Path, num_rows: int = 22, trainer_class: Any = None, **options: Any) -> Any:
    """Train with weft.hf on this rank of a pool."""
    import weft.hf

    kind = weft.hf.use(trainer_class or transformers.Trainer)
    with as_rank():
        return _train(kind, folder, num_rows, plan=plan, **options)[0]


def _train(
    kind: Any, folder: Path, num_rows: int, *, exact: bool = True, metrics: bool = False, resume: Any = None,
    stream: bool = False, evaluate_first: bool = False, lora: bool = False, **options: Any,
) -> Any:  # fmt: skip
    logs, plan = Losses(), {name: options.pop(name) for name in ("plan",) if name in options}
    trainer = kind(
        model=adapted(model()) if lora else model(), args=arguments(folder, **options), data_collator=collate,
        train_dataset=Stream(rows(num_rows)) if stream else rows(num_rows), eval_dataset=rows(7, seed=2),
        compute_metrics=accuracy if metrics else None, compute_loss_func=exact_loss if exact else None,
        callbacks=[logs], **plan,
    )  # fmt: skip
    if evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    run = getattr(trainer, "weft_run", None)
    if run is None:
        weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    else:
        weights = run.full_state_dict(trainer.model)
    return trained(trainer, logs, weights), trainer


def gathered(plan: str) -> tuple[list[int], float, float, list[float]]:
    """Return what DataGather makes of one number and of one row of each data rank: rows, sum, mean, joined numbers."""
    mesh = build_mesh(Plan.parse(plan))
    gather = DataGather(types.SimpleNamespace(pad_across_processes=None), mesh)
    own = torch.tensor(float(mesh.data.rank + 1))
    rows = gather.gather(torch.full((1, 2), mesh.data.rank))
    total, mean = gather.reduce(own, "sum", 0.5), gather.reduce({"a": own}, "mean")["a"]
    return rows[:, 0].tolist(), float(total), float(mean), gather.gather(own).tolist()
