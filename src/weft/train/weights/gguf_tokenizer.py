"""A tokenizer of transformers as keys of a GGUF file, from which llama.cpp computes equal ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import transformers

from weft.errors import ModelError

_SPACE = "▁"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Patterns of pre-tokenizers: llama.cpp's name, and the value of `ignore_merges` that belongs to it.
_SPLITS = {
    rf"{_CONTRACTIONS}\p{{N}}{_REST}": ("qwen2", False),
    rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}": ("llama-bpe", True),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": ("tekken", True),
}
#: SentencePiece's forms (texts of normalizers, schemes of pre-tokenizers), and if they add a space before a text.
_SENTENCEPIECE = [
    (([_SPACE, _SPACE], []), True), (([], ["always"]), True), (([_SPACE], []), False), (([], ["never"]), False),
]  # fmt: skip


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Write tokens, merges or scores, special ids and the chat template.

    Args:
        writer: writer of the GGUF file.
        folder: a Hugging Face folder.
        vocab_size: rows of the embedding. Rows without a token get the name [PADn].

    Raises:
        ModelError: if llama.cpp has no tokenizer with the same ids.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    library: Any = getattr(tokenizer, "backend_tokenizer", None)
    saved: dict[str, Any] = {} if library is None else json.loads(library.to_str())
    if library is None or saved["model"].get("type") != "BPE":
        raise _refusal("it is not byte-pair encoding in a tokenizer.json")
    names = {id: name for name, id in library.get_vocab(with_added_tokens=True).items()}
    if names and max(names) >= vocab_size:
        raise _refusal(f"it has id {max(names)}, and the embedding has {vocab_size} rows")
    if not saved["model"]["merges"]:
        raise _refusal("it has no merges, which llama.cpp needs; tokenizer.kind=bpe has them")
    types = dict.fromkeys(names, gguf.TokenType.NORMAL)
    for added in saved["added_tokens"]:
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in saved["model"]["merges"]]
    if "ByteLevel" in [one["type"] for one in _parts(saved, "pre_tokenizer")]:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(saved))
        writer.add_token_merges(merges)
    else:
        adds_space, ranks = _sentencepiece(saved, [one.replace(" ", "") for one in merges])
        for id, name in names.items():
            if name == saved["model"]["unk_token"]:
                types[id] = gguf.TokenType.UNKNOWN
            elif name.startswith("<0x") and types[id] is gguf.TokenType.NORMAL:
                types[id] = gguf.TokenType.BYTE
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([float(-ranks.get(names.get(id, ""), len(merges))) for id in range(vocab_size)])
        writer.add_add_space_prefix(adds_space)
    writer.add_token_list([names.get(id, f"[PAD{id}]") for id in range(vocab_size)])
    writer.add_token_types([types.get(id, gguf.TokenType.UNUSED) for id in range(vocab_size)])
    _add_special(writer, tokenizer, library)


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"--gguf: llama.cpp would compute other ids than this tokenizer: {what}. Use weft export RUN FOLDER, and "
        "llama.cpp's convert_hf_to_gguf.py on the folder."
    )


def _parts(saved: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's normalizer or pre-tokenizer."""
    one = saved[field]
    return [] if one is None else one[field.replace("_", "") + "s"] if one["type"] == "Sequence" else [one]


def _split_name(saved: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level tokenizer."""
    *before, last = _parts(saved, "pre_tokenizer")
    kinds = [(one["type"], one.get("individual_digits"), one.get("behavior")) for one in before]
    found: tuple[str, bool] | None = None
    if last["type"] == "ByteLevel" and last["use_regex"]:
        names = {(): "gpt-2", (("Digits", True, None),): "smollm"}
        found = (names[tuple(kinds)], False) if tuple(kinds) in names else None
    elif kinds == [("Split", None, "Isolated")] and not before[0]["invert"]:
        found = _SPLITS.get(before[0]["pattern"].get("Regex", ""))
    normalizers = {one["type"] for one in _parts(saved, "normalizer")}
    if found is None or found[1] != saved["model"]["ignore_merges"]:
        raise _refusal("its pre-tokenizer is not that of GPT-2, SmolLM, Llama 3, Qwen 2 or Mistral's tekken")
    if normalizers - {"NFC"} or last["add_prefix_space"]:
        raise _refusal("it changes text or adds a space before it")
    return found[0]


def _sentencepiece(saved: Mapping[str, Any], merged: list[str]) -> tuple[bool, dict[str, int]]:
    """Return if a SentencePiece tokenizer adds a leading space, and the rank of each merged token.

    merged: tokens that its merges produce, in order.
    """
    texts = [one.get("prepend") or one.get("content") for one in _parts(saved, "normalizer")]
    # Gemma splits at spaces, which its normalizer has replaced.
    schemes = [one.get("prepend_scheme") for one in _parts(saved, "pre_tokenizer") if one["type"] != "Split"]
    adds = [adds for form, adds in _SENTENCEPIECE if form == (texts, schemes)]
    if not adds or not saved["model"]["byte_fallback"]:
        raise _refusal("it is neither byte-level nor SentencePiece's with byte_fallback")
    ranks: dict[str, int] = {}
    for rank, token in enumerate(merged):
        if ranks.setdefault(token, rank) != rank and merged[rank - 1] != token:
            raise _refusal(f"its merges into {token!r} have different ranks, and llama.cpp has one score per token")
    return adds[0], ranks


def _add_special(writer: gguf.GGUFWriter, tokenizer: Any, library: Any) -> None:
    """Write ids of special tokens, the flags add_bos_token and add_eos_token, and the chat template."""
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    plain, full = (library.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    adds_bos, adds_eos = full[0] != plain[0], full[-1] != plain[-1]
    if full != [*[ids["bos"]] * adds_bos, *plain, *[ids["eos"]] * adds_eos]:
        raise _refusal("it adds other tokens around a text than its begin and end of sequence")
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(adds_eos)
    for name, id in ids.items():
        if id is not None:
            getattr(writer, f"add_{name}_token_id")(id)
    if (template := tokenizer.chat_template) is not None:
        writer.add_chat_template(template if isinstance(template, str) else template["default"])
