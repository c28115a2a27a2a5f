"""Fine-tune a causal language model on a data set of texts or conversations, with TRL's SFTTrainer."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    dataset = load_dataset("json", data_files=script_args.dataset_name, split=script_args.dataset_train_split)
    parts = dataset.train_test_split(test_size=0.25, seed=0)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()


if __name__ == "__main__":
    main()
