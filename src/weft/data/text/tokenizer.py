"""Tokenizers: byte-level BPE, a saved tokenizer, or plain bytes.

A folder has `vocabulary.json` (kind, special ids, digest) and, unless the kind is "bytes", `tokenizer.json`. Plain text
is never encoded to special tokens: their names in the data are encoded as ordinary characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.data.text.answer_spans import THOUGHT, split_thoughts
from weft.data.text.chat_template import ChatTemplate, TrainedSpan, cut_out
from weft.data.text.codec import (
    END,
    PAD,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    ByteCodec,
    JsonCodec,
    MarkedText,
    full_ids,
    full_tokens,
    weights_of,
)
from weft.data.text.text_windows import TextEncoder, Tokens
from weft.data.text.tokenizer_limits import bounded
from weft.data.text.turns import Turn
from weft.errors import DataError
from weft.files import read_regular
from weft.hub import TOKENIZER, local_folder

_END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>", "[SEP]")
_BEGIN_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]")

#: Values of data.bos.
Bos = Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids and settings of a tokenizer.

    `turn_start_id` and `turn_end_id` are -1 if it has no chat tokens. `chat` is the chat template with the names of
    tokens that it may use, or None for ChatML. `begin_ids` are the tokens before each document.
    """

    kind: str
    vocab_size: int
    end_id: int
    pad_id: int
    turn_start_id: int
    turn_end_id: int
    digest: str
    chat: dict[str, str] | None = None
    begin_ids: tuple[int, ...] = ()


class Tokenizer:
    """A tokenizer loaded from a folder by `Tokenizer.load`.

    Folders are made by `save_bytes_tokenizer`, `import_tokenizer` and `train_bpe`.
    """

    def __init__(self, vocabulary: Vocabulary, tokenizer_json: str | None):
        self.vocabulary = vocabulary
        self.vocab_size, self.digest = vocabulary.vocab_size, vocabulary.digest
        self.end_id, self.pad_id = vocabulary.end_id, vocabulary.pad_id
        self.begin_ids = np.array(vocabulary.begin_ids, np.int64)
        control = (
            self.end_id, self.pad_id, vocabulary.turn_start_id, vocabulary.turn_end_id, *vocabulary.begin_ids
        )  # fmt: skip
        self._codec = ByteCodec() if tokenizer_json is None else JsonCodec(tokenizer_json, control)
        self._special = frozenset(self._codec.special_ids())

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read a tokenizer from its folder.

        Raises:
            DataError: if the folder has no tokenizer, or its content does not match its digest.
        """
        folder = Path(folder)
        try:
            values = json.loads((folder / "vocabulary.json").read_text("utf-8"))
            vocabulary = Vocabulary(**{**values, "begin_ids": tuple(values.get("begin_ids", ()))})
            source = folder / "tokenizer.json"
            text = None if vocabulary.kind == "bytes" else source.read_text("utf-8")
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"tokenizer={folder}: no tokenizer can be read there ({error}). Prepare the data again."
            ) from error
        if _digest(vocabulary, text) != vocabulary.digest:
            raise DataError(
                f"tokenizer={folder}: the files do not match their digest. Delete the folder and prepare again."
            )
        return cls(vocabulary, text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text with the tokens that begin a document, and without the end token."""
        return [*self.vocabulary.begin_ids, *self.encode_batch([text])[0].tolist()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts of any length, int64 each, without begin and end tokens."""
        return full_ids(self._codec, texts)

    def encode_answers(self, answers: Sequence[tuple[str, str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode prompts with their answers, each pair as one text. Return the ids, and a bool mask of the answer.

        A token that spans the boundary is part of the answer.

        Args:
            answers: pairs of prompt and answer.
        """
        encoded = full_tokens(self._codec, [prompt + answer for prompt, answer in answers])
        spans = [TrainedSpan(len(prompt), len(prompt) + len(answer)) for prompt, answer in answers]
        return [(one.ids, weights_of(one.offsets(), [span]) != 0) for one, span in zip(encoded, spans, strict=True)]

    def text_encoder(self) -> TextEncoder:
        """Return an encoder of one text that is fed in parts."""
        return TextEncoder(self._codec)

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Return the text of `ids`, with special tokens only if `specials`. Invalid UTF-8 becomes U+FFFD."""
        kept = [int(token) for token in ids]
        return self._codec.decode(kept if specials else [token for token in kept if token not in self._special])

    def decode_parts(self, parts: Iterable[Iterable[int]]) -> list[str]:
        """Return the texts of consecutive parts of a document, with special tokens.

        Joined, they are the text of all ids. Decoding a part separately would lose the space that some tokenizers drop
        at the start of a text.

        Args:
            parts: ids of consecutive parts.
        """
        ids, borders = list[int](), [0]
        for part in parts:
            ids += map(int, part)
            borders.append(len(ids))
        text, cuts = self._codec.decode(ids), [0]
        for border in borders[1:-1]:
            # An incomplete character belongs to the part with its last token.
            before = self._codec.decode(ids[:border]).rstrip("\ufffd")
            same = next(
                (place for place, (one, other) in enumerate(zip(before, text, strict=False)) if one != other),
                len(before),
            )
            cuts.append(max(cuts[-1], min(same, len(text))))
        return [text[low:high] for low, high in pairwise([*cuts, len(text)])]

    def library_json(self) -> str:
        """Return the content of a tokenizer.json that gives the same ids."""
        return self._codec.library_json()

    def is_special(self, token: int) -> bool:
        """Return True if the token is a special token."""
        return token in self._special

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Number of bytes of text per token, int64 [vocab_size], 0 for special tokens. Exact for byte-level BPE."""
        return self._codec.token_bytes(self.vocab_size)

    @property
    def has_chat(self) -> bool:
        """True if the tokenizer has a chat template, or tokens that begin and end a turn of a chat."""
        return self.template is not None or (self.vocabulary.turn_start_id >= 0 and self.vocabulary.turn_end_id >= 0)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The tokenizer's chat template, or None for ChatML."""
        if self.vocabulary.chat is None or not isinstance(self._codec, JsonCodec):
            return None
        return ChatTemplate(self.vocabulary.chat, self._codec.special_names())

    def marked_turns(self, turns: Sequence[Turn], tools: str = "") -> MarkedText:
        """Return the text of a conversation for `encode_marked`, rendered by the chat template or as ChatML.

        Args:
            turns: the turns of the conversation.
            tools: JSON list of the tools that the assistant may call, or "".

        Raises:
            DataError: if the template rejects the conversation.
        """
        if self.template is None:
            return _chatml(turns)
        text, spans = self.template.render(turns, tools)
        literals = self.template.split_literals(turns, tools) if self.template.has_special(turns, tools) else []
        return MarkedText(text, _plain_ranges(literals), spans)

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of conversations, int64, and the weight of each token in the loss, float32."""
        encoded: list[Tokens] = self._codec.marked(texts)
        return [(one.ids, weights_of(one.offsets(), text.spans)) for one, text in zip(encoded, texts, strict=True)]

    def encode_turns(self, turns: Sequence[Turn], tools: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of one conversation, and the weight of each token in the loss (float32).

        Without a chat template (ChatML), the tokens that begin a document are not included.

        Args:
            turns: the turns of the conversation.
            tools: JSON list of the tools that the assistant may call, or "".

        Raises:
            DataError: if the template rejects the conversation.
        """
        return self.encode_marked([self.marked_turns(turns, tools)])[0]

    def encode_prompt(self, turns: Sequence[Turn], tools: str = "") -> np.ndarray:
        """Return the ids of a conversation and of the prompt for the assistant's next turn.

        Without a chat template (ChatML), the result begins with the tokens that begin a document.

        Args:
            turns: the turns of the conversation.
            tools: JSON list of the tools that the assistant may call, or "".

        Raises:
            DataError: if the template rejects the conversation.
        """
        template = self.template
        if template is None:
            text, plain, _ = _chatml(turns)
            asked = MarkedText(f"{text}{TURN_START}assistant\n", plain, [])
            return np.concatenate([self.begin_ids, self.encode_marked([asked])[0][0]])
        literals = template.split_literals(turns, tools, prompt=True) if template.has_special(turns, tools) else []
        text = template.prompt(turns, tools)
        return self.encode_marked([MarkedText(text, _plain_ranges(literals), [])])[0][0]


def _plain_ranges(parts: Sequence[tuple[str, bool]]) -> list[tuple[int, int]]:
    ranges, position = list[tuple[int, int]](), 0
    for part, is_plain in parts:
        if is_plain:
            ranges.append((position, position + len(part)))
        position += len(part)
    return ranges


def _chatml(turns: Sequence[Turn]) -> MarkedText:
    """Return a conversation as ChatML, for tokenizers without a template. Roles and contents are plain text."""
    parts, plain, spans, position = list[str](), [], [], 0
    for turn in turns:
        start = position + len(TURN_START)
        content = start + len(turn.role) + 1
        end = content + len(turn.content)
        plain += [(start, start + len(turn.role)), (content, end)]
        if turn.role == "assistant":
            own = [TrainedSpan(content, end + len(TURN_END), turn.weight)]
            for part, kind in split_thoughts(turn.content) if turn.masks_reasoning else ():
                content += len(part)
                own = cut_out(own, content - len(part), content) if kind == THOUGHT else own
            spans += own
        parts.append(f"{TURN_START}{turn.role}\n{turn.content}{TURN_END}\n")
        position += len(parts[-1])
    return MarkedText("".join(parts), plain, spans)


def save_bytes_tokenizer(folder: Path) -> Tokenizer:
    """Save a tokenizer whose vocabulary is the 256 bytes and the special tokens."""
    return _save(folder, Vocabulary("bytes", 260, 256, 257, 258, 259, ""), None)


def save_json_tokenizer(
    folder: Path, kind: str, text: str, end: str, pad: str, chat: dict[str, str] | None = None,
    begin_ids: Sequence[int] = (),
) -> Tokenizer:  # fmt: skip
    """Save a tokenizer of the tokenizers library.

    Args:
        folder: folder of the tokenizer's files.
        kind: "bpe" (trained by Weft) or "file" (imported).
        text: content of a tokenizer.json.
        end: name of the token that ends a document.
        pad: name of the padding token.
        chat: as in `Vocabulary`.
        begin_ids: tokens before each document.
    """
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    ids = [library.token_to_id(name) for name in (end, pad, TURN_START, TURN_END)]
    numbers = [-1 if token is None else token for token in ids]
    # Ids may have gaps, so the table must include the highest one.
    vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1
    vocabulary = Vocabulary(kind, vocab_size, *numbers, digest="", chat=chat, begin_ids=tuple(begin_ids))
    return _save(folder, vocabulary, text)


def _save(folder: Path, vocabulary: Vocabulary, text: str | None) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary(**{**asdict(vocabulary), "digest": _digest(vocabulary, text)})
    if text is not None:
        (folder / "tokenizer.json").write_text(text, "utf-8")
    (folder / "vocabulary.json").write_text(json.dumps(asdict(vocabulary), indent=1) + "\n", "utf-8")
    return Tokenizer(vocabulary, text)


def _digest(vocabulary: Vocabulary, text: str | None) -> str:
    numbers = {**asdict(vocabulary), "digest": ""}
    if vocabulary.chat is None:  # keeps the digests of tokenizers without templates
        del numbers["chat"]
    if not vocabulary.begin_ids:  # keeps the digests of tokenizers without begin tokens
        del numbers["begin_ids"]
    content = json.dumps(numbers, sort_keys=True) + "\n" + (text or "")
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def find_tokenizer_file(path: str) -> Path:
    """Return the path of the tokenizer.json for `tokenizer.path`.

    Raises:
        DataError: if there is no such file.
    """
    place = local_folder(path, TOKENIZER)
    found = place / "tokenizer.json" if place.is_dir() else place
    if not path or not found.is_file():
        raise DataError(
            f'tokenizer.path={path}: no tokenizer.json there. Give the file or its folder, or use tokenizer.kind="bpe".'
        )
    return found


def with_added_tokens(text: str, tokens: Sequence[str]) -> str:
    """Return a tokenizer.json with more tokens, which match their exact text anywhere. Their ids follow the last one.

    Args:
        text: content of a tokenizer.json.
        tokens: texts of the new tokens.

    Raises:
        DataError: if the tokenizer has one of them already.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    if not tokens:
        return text
    library = Library.from_str(text)
    known = library.get_vocab(with_added_tokens=True)
    if (old := next((token for token in tokens if token in known), None)) is not None:
        raise DataError(
            f"tokenizer.add_tokens={old}: the tokenizer has this token already, with id {known[old]}. Leave it out."
        )
    library.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return library.to_str()


def import_tokenizer(
    folder: Path, path: str, *, template: bool = False, bos: Bos = "auto", add_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Copy the tokenizer of `path` into `folder`.

    Args:
        folder: new folder of the tokenizer.
        path: a tokenizer.json, or a folder with one.
        template: copy its chat template too, if it has one.
        bos: the option data.bos, which selects the tokens that begin a document.
        add_tokens: texts of tokens to add.

    Raises:
        DataError: if it is missing or unreadable, lacks an end token or the token that data.bos requires, or already
            has a token of `add_tokens`.
    """
    from tokenizers import Tokenizer as Library

    source = find_tokenizer_file(path)
    try:
        text = source.read_text("utf-8")
        names = bounded(lambda: Library.from_str(text), len(text)).get_vocab(with_added_tokens=True)
    # The library raises bare Exception for every kind of invalid file, and for read errors.
    except Exception as error:
        raise DataError(
            f"tokenizer.path={path}: not a tokenizer.json ({error}). Give one saved by `tokenizers`."
        ) from error
    settings = _settings(source.parent / "tokenizer_config.json")
    end = next((name for name in (_token_name(settings.get("eos_token")), *_END_NAMES) if name in names), None)
    if end is None:
        raise DataError(
            f"tokenizer.path={path}: it has no end token ({', '.join(_END_NAMES)}, "
            "or eos_token in tokenizer_config.json). "
            'Add one to the tokenizer, or use tokenizer.kind="bpe".'
        )
    pad = next((name for name in (_token_name(settings.get("pad_token")), PAD, "<pad>", "[PAD]") if name in names), end)
    begin_ids = _begin_ids(text, names, settings, path, bos)
    chat = _chat(source.parent, settings) if template else None
    text = with_added_tokens(text, add_tokens)
    return save_json_tokenizer(folder, "file", text, end, pad, chat, begin_ids)


def _begin_ids(text: str, names: Mapping[str, int], settings: Mapping[str, Any], path: str, bos: Bos) -> list[int]:
    """Return the ids of the tokens that precede a text: by default ("auto") those that transformers adds.

    bos: False for none; True requires at least one. Raises DataError if the tokenizer then has no such token.
    """
    from tokenizers import Tokenizer as Library

    if bos is False:
        return []
    own = _token_name(settings.get("bos_token"))
    if "add_bos_token" in settings or "add_eos_token" in settings:  # if so, transformers ignores the post-processor
        found = [names[own]] if settings.get("add_bos_token") and own is not None and own in names else []
    else:
        found, library = [], Library.from_str(text)
        if library.post_processor is not None:
            [encoding] = bounded(lambda: library.encode_batch(["a"]), 1)
            marks = encoding.special_tokens_mask
            found = encoding.ids[: next((place for place, mark in enumerate(marks) if not mark), 0)]
    if found or bos == "auto":
        return found
    name = next((name for name in (own, *_BEGIN_NAMES) if name in names), None)
    if name is None:
        raise DataError(
            f"data.bos=true: the tokenizer of {path} has no bos_token. Name it in tokenizer_config.json, or use "
            'data.bos="auto".'
        )
    return [names[name]]


def _chat(folder: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the chat template of a folder, with the names of tokens that it may use, or None."""
    file, found = folder / "chat_template.jinja", settings.get("chat_template")
    if file.is_file():
        found = read_regular(file, folder).decode("utf-8", "replace")
    elif isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        return None
    names = {key: _token_name(value) for key, value in settings.items() if key.endswith("_token")}
    return {"chat_template": found, **{key: name for key, name in names.items() if name is not None}}


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"tokenizer.path={path}: not valid JSON ({error}). Repair it or remove it.") from error
    return settings if isinstance(settings, dict) else {}


def _token_name(entry: Any) -> str | None:
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


# Training of a byte-level BPE tokenizer. Equal text gives an equal tokenizer, byte for byte.


def train_bpe(folder: Path, texts: Iterable[str], vocab_size: int, add_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE and save it in `folder`.

    Args:
        folder: folder of the tokenizer's files.
        texts: an iterable that is consumed once.
        vocab_size: number of entries, including special tokens. Little text may give fewer.
        add_tokens: texts of tokens to add after training, in addition to `vocab_size`.

    Raises:
        DataError: if the trained tokenizer already has a token of `add_tokens`.
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
        # All bytes, so that any text can be encoded. Sorted, because the library's order is not deterministic.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return save_json_tokenizer(folder, "bpe", with_added_tokens(library.to_str(), add_tokens), END, PAD)
