"""Codecs between texts and token ids: bytes, or a tokenizer.json with the tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from weft.data.text.chat_template import TrainedSpan
from weft.data.text.text_windows import GROUP_WINDOWS, WINDOW_CHARS, Tokens, encode_long
from weft.data.text.tokenizer_limits import bounded
from weft.errors import DataError

END, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END, PAD, TURN_START, TURN_END)
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
#: Prefixes that are put before a later part of a text, so that the tokenizer does not treat it as the start of a text.
_SENTINELS = ("\n", "x", "0", ".", " ")
_FILLER = "x"


class MarkedText(NamedTuple):
    """Text of a conversation.

    Names of special tokens in it are encoded as special tokens, except in `plain`, which are ranges of characters.
    `spans` are the trained ranges of characters, with their weights.
    """

    text: str
    plain: Sequence[tuple[int, int]]
    spans: Sequence[TrainedSpan]


def weights_of(offsets: np.ndarray, spans: Sequence[TrainedSpan]) -> np.ndarray:
    """Return the weight of each token, float32. A token belongs to a span if any of its characters does.

    A token that spans the boundary of prompt and answer is therefore part of the answer.

    Args:
        offsets: start and end (exclusive) of each token in characters, int64 [n, 2].
        spans: trained ranges of characters. Other tokens have the weight 0.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    weights = np.zeros(len(offsets), np.float32)
    for low, high, weight in spans:
        inside = np.where(starts == ends, (starts >= low) & (starts < high), (ends > low) & (starts < high))
        weights[inside] = weight
    return weights


class ByteCodec:
    """Codec with one token per byte of UTF-8, followed by the special tokens."""

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) for text in texts]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        return [_byte_tokens(text) for text in texts]

    def marked(self, texts: Sequence[MarkedText]) -> list[Tokens]:
        return [self._marked(one) for one in texts]

    def _marked(self, marked: MarkedText) -> Tokens:
        found = _byte_tokens(marked.text)
        ids, offsets = found.ids, found.offsets()
        kept = np.ones(len(ids), bool)
        for match in re.finditer("|".join(map(re.escape, SPECIAL_TOKENS)), marked.text):
            low, high = match.span()
            if not any(first < high and last > low for first, last in marked.plain):
                inside = np.flatnonzero((offsets[:, 0] >= low) & (offsets[:, 1] <= high))
                kept[inside[1:]] = False
                ids[inside[0]], offsets[inside[0]] = 256 + SPECIAL_TOKENS.index(match.group()), (low, high)
        return Tokens(ids[kept], offsets[kept])

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
                continue
            parts += [run.decode("utf-8", "replace"), SPECIAL_TOKENS[token - 256]]
            run = bytearray()
        return "".join([*parts, run.decode("utf-8", "replace")])

    def library_json(self) -> str:
        """Return a tokenizer.json with the same ids: the bytes, then the special tokens."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: chr(byte) for byte in shown}
        for byte in range(256):  # GPT-2's alphabet: bytes that cannot be shown get letters from 256 on
            letters.setdefault(byte, chr(256 + len(letters) - len(shown)))
        library = Library(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(list(SPECIAL_TOKENS))
        return library.to_str()

    def token_bytes(self, vocab_size: int) -> np.ndarray:
        return (np.arange(vocab_size) < 256).astype(np.int64)

    def special_ids(self) -> list[int]:
        return list(range(256, 256 + len(SPECIAL_TOKENS)))


class JsonCodec:
    """Codec that encodes with a tokenizer.json, by the tokenizers library.

    Methods raise DataError if the tokenizer encodes plain text to a token of `control_ids`.

    control_ids: tokens that plain text must never be encoded to. Negative ids are ignored.
    """

    def __init__(self, text: str, control_ids: Iterable[int]):
        self._text = text
        self._library = _library(text)
        # Without this, "<|endoftext|>" in a document would be encoded as the end token.
        self._library.encode_special_tokens = True
        self._control = {token: self._library.id_to_token(token) or "" for token in control_ids if token >= 0}
        self._control_ids = np.array(sorted(self._control))

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts of at most WINDOW_CHARS characters, int64."""
        found = [np.array(encoding.ids, dtype=np.int64) for encoding in self._batch(texts, fast=True)]
        return [
            self._encode_split(text).ids if self._has_control(ids) else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of texts of at most WINDOW_CHARS characters, with offsets."""
        found = [
            Tokens(np.array(encoding.ids, dtype=np.int64), encoding) for encoding in self._batch(texts, fast=False)
        ]
        return [
            self._encode_split(text) if self._has_control(one.ids) else one
            for text, one in zip(texts, found, strict=True)
        ]

    def marked(self, texts: Sequence[MarkedText]) -> list[Tokens]:
        """Return the tokens of conversations. Special token names within the ranges `plain` are encoded as text."""
        filled = [self._filled(one) for one in texts]
        encodings: list[Any] = []
        for group in _groups(filled, is_limited=False):
            parts = [filled[index] for index in group]
            encodings += bounded(
                lambda parts=parts: self._rendered.encode_batch(parts, add_special_tokens=False), sum(map(len, parts))
            )
        found = [Tokens(np.array(encoding.ids, dtype=np.int64), encoding) for encoding in encodings]
        return [
            tokens if safe == one.text else self._unfilled(one, safe, tokens)
            for one, safe, tokens in zip(texts, filled, found, strict=True)
        ]

    def _batch(self, texts: Sequence[str], *, fast: bool) -> list[Any]:
        encode = self._library.encode_batch_fast if fast else self._library.encode_batch
        parts = list(texts)
        return bounded(lambda: encode(parts, add_special_tokens=False), sum(map(len, parts)))

    def _has_control(self, ids: np.ndarray) -> bool:
        return bool(np.isin(ids, self._control_ids).any())

    def _encode_split(self, text: str) -> Tokens:
        """Encode a text with each control token's name split in two, so that the tokenizer does not match it.

        Raises DataError if the result contains control tokens.
        """
        names = filter(None, self._control.values())
        pattern = "|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names)
        ids, offsets, position = [], [], 0
        for part in re.split(pattern, text):
            encoded = self._continued(part) if position else self._encode_all(part)
            ids.append(encoded.ids)
            offsets.append(encoded.offsets() + position)
            position += len(part)
        found = Tokens(np.concatenate(ids), np.concatenate(offsets))
        if self._has_control(found.ids):
            raise DataError("tokenizer: it turns plain text into special tokens. Use another tokenizer, or kind=bpe.")
        return found

    def _encode_all(self, text: str) -> Tokens:
        [encoding] = self._batch([text], fast=False)
        return Tokens(np.array(encoding.ids, dtype=np.int64), encoding)

    def _continued(self, text: str) -> Tokens:
        """Encode a later part of a text, without the space that some tokenizers add at the start of a text."""
        for sentinel in _SENTINELS:
            tokens = self._encode_all(sentinel + text)
            offsets = tokens.offsets()
            first = int((offsets[:, 1] <= len(sentinel)).sum())
            if (offsets[first:, 0] >= len(sentinel)).all():
                return Tokens(tokens.ids[first:], offsets[first:] - len(sentinel))
        return self._encode_all(text)

    def _filled(self, marked: MarkedText) -> str:
        """Return the text with each special token name in its plain ranges replaced by as many filler letters."""
        if not marked.plain or self._names is None:
            return marked.text
        parts, position = [], 0
        for low, high in marked.plain:
            content = self._names.sub(lambda match: _FILLER * len(match.group()), marked.text[low:high])
            parts += [marked.text[position:low], content]
            position = high
        return "".join([*parts, marked.text[position:]])

    def _unfilled(self, marked: MarkedText, filled: str, tokens: Tokens) -> Tokens:
        """Return the tokens of the original text, given the tokens of `filled`.

        Of the sections between special tokens, only those that differ from the original text are encoded again.
        """
        ids, offsets = tokens.ids, tokens.offsets()
        special = [*self._special_indices(ids, offsets, filled), len(ids)]
        out_ids, out_offsets, begin, position = [], [], 0, 0
        for index in special:
            low, high = position, int(offsets[index][0]) if index < len(ids) else len(filled)
            if filled[low:high] == marked.text[low:high]:
                out_ids.append(ids[begin:index])
                out_offsets.append(offsets[begin:index])
            else:
                is_start = np.array_equal(self._encode_all(filled[low:high]).ids, ids[begin:index])
                section = marked.text[low:high]
                plain = self.tokens([section])[0] if is_start else self._continued(section)
                if self._has_control(plain.ids):
                    plain = self._encode_split(section)
                out_ids.append(plain.ids)
                out_offsets.append(plain.offsets() + low)
            if index < len(ids):
                out_ids.append(ids[index : index + 1])
                out_offsets.append(offsets[index : index + 1])
                begin, position = index + 1, int(offsets[index][1])
        return Tokens(np.concatenate(out_ids), np.concatenate(out_offsets))

    def _special_indices(self, ids: np.ndarray, offsets: np.ndarray, text: str) -> Iterator[int]:
        for index in np.flatnonzero(np.isin(ids, self.special_ids())).tolist():
            low, high = offsets[index]
            if text[low:high].strip() == (self._library.id_to_token(int(ids[index])) or "").strip():
                yield index

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        names = sorted(filter(None, self.special_names()), key=len, reverse=True)
        first = "".join(sorted({re.escape(name[0]) for name in names}))  # there may be thousands of names
        return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, names))})") if names else None

    @cached_property
    def _rendered(self) -> Any:
        """Library tokenizer for rendered templates: it encodes names of special tokens as special tokens."""
        from tokenizers import AddedToken

        library = _library(self._text)
        library.encode_special_tokens = False
        known = library.get_added_tokens_decoder()
        library.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False)
                for token, name in self._control.items()
                if name and token not in known
            ]
        )
        return library

    def library_json(self) -> str:
        return self._text

    def special_names(self) -> list[str]:
        return [self._library.id_to_token(token) or "" for token in self.special_ids()]

    def decode(self, ids: Sequence[int]) -> str:
        batch = [list(ids)]
        return bounded(lambda: self._library.decode_batch(batch, skip_special_tokens=False), 8 * len(ids))[0]

    def special_ids(self) -> list[int]:
        added = self._library.get_added_tokens_decoder()
        return sorted({token for token, entry in added.items() if entry.special} | set(self._control))

    def token_bytes(self, vocab_size: int) -> np.ndarray:
        from tokenizers.pre_tokenizers import ByteLevel

        added = self._library.get_added_tokens_decoder()
        is_byte_level = "ByteLevel" in json.dumps(json.loads(self._library.to_str()).get("decoder"))
        alphabet = frozenset(ByteLevel.alphabet()) if is_byte_level else None
        sizes = np.zeros(vocab_size, np.int64)
        for name, token in self._library.get_vocab(with_added_tokens=True).items():
            if token in added:
                sizes[token] = 0 if added[token].special else len(added[token].content.encode())
            elif alphabet is not None and all(letter in alphabet for letter in name):
                sizes[token] = len(name)
            elif _BYTE_FALLBACK.fullmatch(name):
                sizes[token] = 1
            else:
                sizes[token] = len(name.replace("\u2581", " ").encode())
        sizes[list(self._control)] = 0
        return sizes


def full_ids(codec: ByteCodec | JsonCodec, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of texts of any length, int64."""
    found: dict[int, np.ndarray] = {}
    for group in _groups(texts):
        found |= zip(group, codec.ids([texts[index] for index in group]), strict=True)
    return [found[index] if index in found else encode_long(text, codec).ids for index, text in enumerate(texts)]


def full_tokens(codec: ByteCodec | JsonCodec, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of texts of any length, with offsets."""
    found: dict[int, Tokens] = {}
    for group in _groups(texts):
        encoded = codec.tokens([texts[index] for index in group])
        found |= {index: Tokens(one.ids, one.offsets()) for index, one in zip(group, encoded, strict=True)}
    return [
        found[index] if index in found else encode_long(text, codec, with_offsets=True)
        for index, text in enumerate(texts)
    ]


def _library(text: str) -> Any:
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    library.no_truncation()
    library.no_padding()
    # It does not change the ids here, but may remove spaces from the offsets.
    library.post_processor = None
    return library


def _groups(texts: Sequence[str], *, is_limited: bool = True) -> Iterator[list[int]]:
    """Yield the indices of texts to encode in one call, which takes more than 100 bytes of memory per token.

    A group ends with the text that brings it to GROUP_WINDOWS * WINDOW_CHARS characters.

    is_limited: skip texts longer than WINDOW_CHARS.
    """
    group, num_chars = list[int](), 0
    for index, text in enumerate(texts):
        if is_limited and len(text) > WINDOW_CHARS:
            continue
        group.append(index)
        num_chars += len(text)
        if num_chars >= GROUP_WINDOWS * WINDOW_CHARS:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


def _byte_tokens(text: str) -> Tokens:
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    starts = np.repeat(np.arange(len(codes), dtype=np.int64), widths)
    ids = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)
    return Tokens(ids, np.stack([starts, starts + 1], axis=1))
