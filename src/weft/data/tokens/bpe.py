"""Train a byte-level BPE tokenizer on text: the same text gives the same tokenizer, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.data.tokens.codec import END, PAD, SPECIAL_TOKENS
from weft.data.tokens.tokenizer import Tokenizer, save_json_tokenizer


def train_bpe(folder: Path, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE and save it in `folder`.

    Args:
        folder: of the tokenizer's files.
        texts: read once.
        vocab_size: entries with the special tokens; little text may give fewer.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        # All bytes, so that any text can be encoded; sorted, because the library's own order is not fixed.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return save_json_tokenizer(folder, "bpe", library.to_str(), END, PAD)
