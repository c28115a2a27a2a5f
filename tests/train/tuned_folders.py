"""Small random Hugging Face folders with tokenizers, and tables to train them on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

WORDS = [
    "the", "cat", "dog", "runs", "sleeps", "good", "bad", "film", "was", "is", "very", "not", "happy", "sad", "blue",
    "red", "house", "tree", "in", "on", "under", "paris", "london", "berlin", "john", "mary", "visits", "likes",
]  # fmt: skip
TAGS = {"paris": "PLACE", "london": "PLACE", "berlin": "PLACE", "john": "PERSON", "mary": "PERSON"}
#: Task and options of each case, the family of its folder, and its table.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "classify": ("classify_text", "bert", "texts.jsonl", {}),
    "classify-pairs": ("classify_text", "roberta", "texts.csv", {"pair": "other"}),
    "classify-decoder": ("classify_text", "llama", "texts.jsonl", {}),
    "regress": ("classify_text", "distilbert", "texts.csv", {"label": "score", "regression": True}),
    "tokens": ("classify_tokens", "bert", "words.jsonl", {}),
    "tokens-roberta": ("classify_tokens", "roberta", "words.jsonl", {}),
    "masked": ("masked_lm", "bert", "texts.jsonl", {}),
    "masked-distilbert": ("masked_lm", "distilbert", "texts.jsonl", {"share": 0.3}),
    "t5": ("seq2seq", "t5", "reversed.jsonl", {"target_len": 16}),
    "bart": ("seq2seq", "bart", "reversed.jsonl", {"target_len": 16}),
    "embed": ("embed", "bert", "pairs.jsonl", {"negative": "other"}),
    "embed-decoder": ("embed", "llama", "pairs.jsonl", {"pooling": "last", "temperature": 0.1}),
    "reward": ("reward", "llama", "answers.jsonl", {"center": 0.1}),
    "reward-encoder": ("reward", "bert", "answers.jsonl", {}),
}


def save_tokenizer(folder: Path, family: str) -> int:
    """Save a word-piece tokenizer that splits unknown words into letters; return its vocabulary size."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "abcdefghijklmnopqrstuvwxyz"
    entries = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    library = Tokenizer(models.WordPiece({word: index for index, word in enumerate(entries)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    inputs = ["input_ids", *(["token_type_ids"] if family == "bert" else []), "attention_mask"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, model_input_names=inputs, **named)
    tokenizer.save_pretrained(folder)
    return len(entries)


def save_model(folder: Path, family: str, dropout: float = 0.0) -> None:
    """Save a random model of a family as if pretrained, with a language model head."""
    import transformers

    entries = save_tokenizer(folder, family) + 5  # some embedding rows belong to no token
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    shapes: dict[str, Any] = {
        "bert": lambda: transformers.BertConfig(max_position_embeddings=64, **layers, **off),
        "roberta": lambda: transformers.RobertaConfig(
            max_position_embeddings=65, type_vocab_size=1, **layers, **off, pad_token_id=0
        ),
        "distilbert": lambda: transformers.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64, dropout=dropout,
            attention_dropout=dropout, seq_classif_dropout=dropout,
        ),
        "llama": lambda: transformers.LlamaConfig(
            **layers, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout
        ),
        "t5": lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=dropout, pad_token_id=0,
            decoder_start_token_id=0, eos_token_id=3,
        ),
        "bart": lambda: transformers.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=dropout, **ids,
        ),
    }  # fmt: skip
    kind = {"llama": "CausalLM", "t5": "Seq2SeqLM", "bart": "Seq2SeqLM"}.get(family, "MaskedLM")
    config = shapes[family]()
    config.vocab_size = entries
    torch.manual_seed(3)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(folder)


def write_tables(folder: Path, number: int = 40) -> None:
    """Write every table of the cases, with different lengths and one long text."""
    rng = random.Random(1)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 9))) + rng.choice(["", " xyzzy"])

    texts = [text() for _ in range(number)]
    texts[3] = " ".join(WORDS)
    labels = ["good" if "good" in one or "happy" in one else "bad" for one in texts]
    rows = [
        {"text": one, "other": text(), "label": label, "score": len(one) / 50}
        for one, label in zip(texts, labels, strict=True)
    ]
    _write(folder / "texts.jsonl", rows)
    with (folder / "texts.csv").open("w") as file:
        file.write("text,other,label,score\n")
        file.writelines(f"{one['text']},{one['other']},{one['label']},{one['score']}\n" for one in rows)
    words = [one.split() for one in texts]
    _write(folder / "words.jsonl", [{"tokens": one, "tags": [TAGS.get(word, "O") for word in one]} for one in words])
    _write(folder / "reversed.jsonl", [{"source": one, "target": " ".join(one.split()[::-1])} for one in texts])
    pairs = [{"query": one, "positive": " ".join(one.split()[:2]), "other": text()} for one in texts]
    _write(folder / "pairs.jsonl", pairs)
    answers = [{"prompt": f"{one} ", "chosen": "good film", "rejected": text()} for one in texts]
    _write(folder / "answers.jsonl", answers)


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(case: str, root: Path) -> list[str]:
    """Return the settings of a case whose folders and tables are in `root`."""
    task, family, table, options = CASES[case]
    words = {
        "task": task, "model.path": root / family, "data.train": root / table, "data.eval": root / "eval" / table,
        "data.cache_dir": root / "cache", "train.seq_len": 24, "train.global_batch": 8, "train.steps": 6,
        "eval.every": 3, "checkpoint.every": 3, "launch.device": "cpu", "run.dir": root / "runs", "run.name": case,
        **{f"task.options.{name}": str(value).lower() if value is True else value for name, value in options.items()},
    }  # fmt: skip
    return [f"{name}={value}" for name, value in words.items()]
