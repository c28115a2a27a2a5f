"""TRL's trainers on a small model: the same script on one device and on ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from tests.hf.cases import Losses, as_rank

WORDS = [
    "the", "cat", "dog", "runs", "sleeps", "good", "bad", "film", "was", "is", "very", "not", "happy", "sad", "blue",
    "red", "house", "tree", "in", "on", "under",
]  # fmt: skip


def save_folder(folder: Path) -> None:
    """Save a random Llama with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    entries = ["[PAD]", "[UNK]", "[EOS]", *WORDS]
    library = Tokenizer(models.WordLevel({word: index for index, word in enumerate(entries)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(entries), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=2, bos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def texts(count: int, seed: int, longest: int = 12) -> list[str]:
    made = random.Random(seed)
    return [" ".join(made.choices(WORDS, k=made.randint(3, longest))) for _ in range(count)]


def table(kind: str, folder: Path | None = None) -> Any:
    """Return the records of a kind of trainer. If a folder is given, ranks read them from it, with a common cache."""
    import datasets

    if folder is not None:
        if not folder.exists():
            table(kind).save_to_disk(folder)
        return datasets.load_from_disk(folder)
    prompts, first, second = texts(12, 1), texts(12, 2), texts(12, 3)
    if kind == "sft":
        return datasets.Dataset.from_dict({"text": texts(12, 1)})
    if kind == "grpo":
        return datasets.Dataset.from_dict({"prompt": prompts})
    return datasets.Dataset.from_dict({"prompt": prompts, "chosen": first, "rejected": second})


def letters(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward completions by their number of letters."""
    return [len(one) % 7 / 7 for one in completions]


def complete(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return a completion of each prompt that depends on it and on its index in the group, instead of random ones."""
    tokenizer, found = trainer.processing_class, []
    for index, prompt in enumerate(prompts):
        start = len(prompt) * 7 + index % trainer.num_generations * 5
        found.append([3 + (start + step * (1 + len(prompt))) % len(WORDS) for step in range(2 + start % 4)] + [2])
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts], "completion_ids": found, "logprobs": None,
    }  # fmt: skip


def run(kind: str, source: Path, out: Path, batch: int, plan: str | None, **options: Any) -> Any:
    """Train with TRL's trainer of a kind; under a plan if it is given, on this rank."""
    import peft
    import transformers
    import trl

    kind, _, variant = kind.partition("-")
    name, config = {
        "sft": ("SFTTrainer", "SFTConfig"), "dpo": ("DPOTrainer", "DPOConfig"),
        "reward": ("RewardTrainer", "RewardConfig"), "grpo": ("GRPOTrainer", "GRPOConfig"),
    }[kind]  # fmt: skip
    args = getattr(trl, config)(
        output_dir=str(out), use_cpu=True, bf16=False, learning_rate=3e-3, num_train_epochs=1, logging_steps=1,
        report_to="none", disable_tqdm=True, save_strategy="no", per_device_train_batch_size=batch, adam_epsilon=1e-4,
        **options,
    )  # fmt: skip
    trainer_class, extra, logs = getattr(trl, name), {}, Losses()
    if kind == "grpo":
        extra |= {"reward_funcs": letters, "rollout_func": complete}
    if variant == "lora":
        extra["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    auto = transformers.AutoModelForSequenceClassification if kind == "reward" else transformers.AutoModelForCausalLM
    options = {"num_labels": 1} if kind == "reward" else {}
    torch.manual_seed(1)
    model = auto.from_pretrained(source, dtype=torch.float32, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if plan is not None:
        import weft.hf

        trainer_class = weft.hf.use(trainer_class)
        extra["plan"] = plan
    folder = source.with_name("table") if variant == "stored" else None
    trainer = trainer_class(
        model=model, args=args, train_dataset=table(kind, folder), processing_class=tokenizer, callbacks=[logs], **extra
    )
    trainer.train()
    if plan is None:
        weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    else:
        weights = trainer.weft_run.full_state_dict(trainer.model)
    return [one for one in logs.logs if "loss" in one], weights


def run_on_rank(*args: Any, **options: Any) -> Any:
    """Call `run` on a rank of a pool."""
    with as_rank():
        return run(*args, **options)
