"""Train a causal language model on a text file, and report its perplexity on another, with transformers' Trainer."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Folder of a config and a tokenizer."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of the model."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "A text file, one document per line."})
    validation_file: str = field(metadata={"help": "A text file, one document per line."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a sample."})


class Blocks(Dataset):
    """The tokens of a file, joined and divided into blocks of equal length."""

    def __init__(self, file, tokenizer, block_size):
        tokens = []
        for line in Path(file).read_text().splitlines():
            tokens += [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]
        self.blocks = torch.tensor(tokens[: len(tokens) // block_size * block_size]).view(-1, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def accuracy(found):
    return {"accuracy": float((found.predictions == found.label_ids[:, 1:]).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model_args.dtype))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Blocks(data_args.train_file, tokenizer, data_args.block_size),
        eval_dataset=Blocks(data_args.validation_file, tokenizer, data_args.block_size),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits[:, :-1].argmax(-1),
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
