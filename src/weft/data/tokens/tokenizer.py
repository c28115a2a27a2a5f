"""Text to token ids and back: byte-level BPE, a saved tokenizer, or plain bytes.

A folder holds `vocabulary.json` (kind, special ids, digest) and, unless the kind is "bytes", `tokenizer.json`.
Text never becomes a special token: what looks like one in the data is encoded as the characters it is made of.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.read import Turn
from weft.data.tokens.chat_template import ChatTemplate, TrainedSpan
from weft.errors import DataError
from weft.files import read_regular

END, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END, PAD, TURN_START, TURN_END)
_END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>", "[SEP]")
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The numbers that others need. turn_start_id and turn_end_id are -1 where the tokenizer has no chat tokens.

    chat: the chat template and the names of tokens that it knows; None: chats are ChatML.
    """

    kind: str
    vocab_size: int
    end_id: int
    pad_id: int
    turn_start_id: int
    turn_end_id: int
    digest: str
    chat: dict[str, str] | None = None


class _ByteCodec:
    """One token per byte of UTF-8, then the special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) for text in texts]

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
        """As the `tokenizers` library has it: the ids are the bytes, then come the special tokens."""
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


class _JsonCodec:
    """A tokenizer.json, through the `tokenizers` library."""

    def __init__(self, text: str, control_ids: Iterable[int]):
        from tokenizers import Tokenizer as Library

        self._text = text
        self._library = Library.from_str(text)
        self._library.no_truncation()
        self._library.no_padding()
        # Without this, "<|endoftext|>" in a document would become the real end token.
        self._library.encode_special_tokens = True
        self._control = {token: self._library.id_to_token(token) or "" for token in control_ids if token >= 0}
        self._control_ids = np.array(sorted(self._control))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        for index, ids in enumerate(arrays):
            if np.isin(ids, self._control_ids).any():
                arrays[index] = self._encode_apart(texts[index])
        return arrays

    def _encode_apart(self, text: str) -> np.ndarray:
        """Encode with each control token's text cut in two, for tokenizers that match it even as plain text."""
        names = filter(None, self._control.values())
        pattern = "|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names)
        parts = self._library.encode_batch_fast(re.split(pattern, text), add_special_tokens=False)
        ids = np.array([token for part in parts for token in part.ids], dtype=np.int64)
        if np.isin(ids, self._control_ids).any():
            raise DataError("tokenizer: it turns plain text into special tokens. Use another tokenizer, or kind=bpe.")
        return ids

    def library_json(self) -> str:
        return self._text

    def encode_rendered(self, text: str, spans: Sequence[TrainedSpan]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text in which special tokens count, and the weights of those that begin in one of the spans."""
        encoding = self._rendered.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        trained = np.zeros(len(starts), np.float32)
        for low, high, weight in spans:
            trained[(starts >= low) & (starts < high)] = weight
        return np.array(encoding.ids, dtype=np.int64), trained

    def encode_pieces(
        self, pieces: Sequence[tuple[str, bool]], spans: Sequence[TrainedSpan]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same, of pieces that join to the text; in those marked true what looks like a special token is text."""
        ids, trained, place = [], [], 0
        for text, is_plain in pieces:
            if is_plain:
                ids.append(self.encode_batch([text])[0])
                weight = next((weight for low, high, weight in spans if low <= place < high), 0.0)
                trained.append(np.full(ids[-1].size, weight, np.float32))
            else:
                moved = [TrainedSpan(low - place, high - place, weight) for low, high, weight in spans]
                both = self.encode_rendered(text, moved)
                ids.append(both[0])
                trained.append(both[1])
            place += len(text)
        return np.concatenate(ids), np.concatenate(trained)

    @cached_property
    def _rendered(self) -> Any:
        """The library as it is used for what a template renders: there special tokens count."""
        from tokenizers import Tokenizer as Library

        library = Library.from_str(self._text)
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = False
        return library

    def special_names(self) -> list[str]:
        return [self._library.id_to_token(token) or "" for token in self.special_ids()]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def special_ids(self) -> list[int]:
        added = self._library.get_added_tokens_decoder()
        return sorted({token for token, entry in added.items() if entry.special} | set(self._control))

    def token_bytes(self, vocab_size: int) -> np.ndarray:
        added = self._library.get_added_tokens_decoder()
        alphabet = _byte_level_alphabet() if self._is_byte_level() else None
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

    def _is_byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._library.to_str()).get("decoder"))


class Tokenizer:
    """`Tokenizer.load(folder)`; folders are made by `save_bytes_tokenizer`, `import_tokenizer` and `bpe.train_bpe`."""

    def __init__(self, vocabulary: Vocabulary, tokenizer_json: str | None):
        self.vocabulary = vocabulary
        self.vocab_size, self.digest = vocabulary.vocab_size, vocabulary.digest
        self.end_id, self.pad_id = vocabulary.end_id, vocabulary.pad_id
        control = (self.end_id, self.pad_id, vocabulary.turn_start_id, vocabulary.turn_end_id)
        self._codec = _ByteCodec() if tokenizer_json is None else _JsonCodec(tokenizer_json, control)
        self._special = frozenset(self._codec.special_ids())

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read a tokenizer from its folder.

        Raises:
            DataError: when the folder has no tokenizer, or its content does not match its digest.
        """
        folder = Path(folder)
        try:
            vocabulary = Vocabulary(**json.loads((folder / "vocabulary.json").read_text("utf-8")))
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
        """Return the ids of a text, without special tokens around it."""
        return self._codec.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one int64 array of ids per text, without end tokens."""
        return self._codec.encode_batch(texts)

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Return the text of `ids`; special tokens are left out unless `specials`.

        Bytes that are not UTF-8 become U+FFFD.
        """
        kept = [int(token) for token in ids]
        return self._codec.decode(kept if specials else [token for token in kept if token not in self._special])

    def library_json(self) -> str:
        """Return the content of a tokenizer.json that gives the same ids."""
        return self._codec.library_json()

    def is_special(self, token: int) -> bool:
        """Return whether the token stands for a mark and not for text."""
        return token in self._special

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: bytes of text each token stands for, special tokens 0; exact for byte-level BPE."""
        return self._codec.token_bytes(self.vocab_size)

    @property
    def has_chat(self) -> bool:
        """Whether it has the tokens that begin and end a turn of a chat."""
        return self.template is not None or (self.vocabulary.turn_start_id >= 0 and self.vocabulary.turn_end_id >= 0)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Its own chat template; None: chats are ChatML."""
        if self.vocabulary.chat is None or not isinstance(self._codec, _JsonCodec):
            return None
        return ChatTemplate(self.vocabulary.chat, self._codec.special_names())

    def encode_turns(self, turns: Sequence[Turn], tools: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return ids and the weight of each in the loss (float32), of a conversation through its own template.

        Args:
            turns: of the conversation.
            tools: JSON of what the assistant may call; "": nothing.

        Raises:
            DataError: where the template refuses the conversation.
        """
        template, codec = self.template, self._codec
        assert template is not None
        assert isinstance(codec, _JsonCodec)
        text, spans = template.render(turns, tools)
        if template.has_special(turns, tools):
            return codec.encode_pieces(template.apart(turns, tools), spans)
        return codec.encode_rendered(text, spans)

    def encode_prompt(self, turns: Sequence[Turn], tools: str = "") -> np.ndarray:
        """Return ids of a conversation and of the text before the assistant's next turn.

        Args:
            turns: of the conversation.
            tools: JSON of what the assistant may call; "": nothing.

        Raises:
            DataError: if the template refuses the conversation.
        """
        template, codec = self.template, self._codec
        if template is None:
            start, end, newline = self.vocabulary.turn_start_id, self.vocabulary.turn_end_id, self.encode("\n")
            ids = []
            for turn in turns:
                ids += [start, *self.encode(f"{turn.role}\n"), *self.encode(turn.content), end, *newline]
            return np.array([*ids, start, *self.encode("assistant\n")], np.int64)
        assert isinstance(codec, _JsonCodec)
        if template.has_special(turns, tools):
            return codec.encode_pieces(template.apart(turns, tools, prompt=True), [])[0]
        return codec.encode_rendered(template.prompt(turns, tools), [])[0]


def save_bytes_tokenizer(folder: Path) -> Tokenizer:
    """Save a tokenizer of the 256 bytes and the special tokens."""
    return _save(folder, Vocabulary("bytes", 260, 256, 257, 258, 259, ""), None)


def save_json_tokenizer(
    folder: Path, kind: str, text: str, end: str, pad: str, chat: dict[str, str] | None = None
) -> Tokenizer:
    """text: content of a tokenizer.json. end, pad: names of its tokens. chat: as `Vocabulary` has it."""
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    ids = [library.token_to_id(name) for name in (end, pad, TURN_START, TURN_END)]
    numbers = [-1 if token is None else token for token in ids]
    # Ids may have gaps, so the table must reach the highest one.
    vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1
    return _save(folder, Vocabulary(kind, vocab_size, *numbers, digest="", chat=chat), text)


def _save(folder: Path, vocabulary: Vocabulary, text: str | None) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary(**{**asdict(vocabulary), "digest": _digest(vocabulary, text)})
    if text is not None:
        (folder / "tokenizer.json").write_text(text, "utf-8")
    (folder / "vocabulary.json").write_text(json.dumps(asdict(vocabulary), indent=1) + "\n", "utf-8")
    return Tokenizer(vocabulary, text)


def _digest(vocabulary: Vocabulary, text: str | None) -> str:
    numbers = {**asdict(vocabulary), "digest": ""}
    if vocabulary.chat is None:  # as before there were templates
        del numbers["chat"]
    content = json.dumps(numbers, sort_keys=True) + "\n" + (text or "")
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def find_tokenizer_file(path: str) -> Path:
    """Return the tokenizer.json that `tokenizer.path` stands for.

    Raises:
        DataError: where there is none.
    """
    place = Path(path).expanduser()
    found = place / "tokenizer.json" if place.is_dir() else place
    if not path or not found.is_file():
        raise DataError(
            f'tokenizer.path={path}: no tokenizer.json there. Give the file or its folder, or use tokenizer.kind="bpe".'
        )
    return found


def import_tokenizer(folder: Path, path: str, *, template: bool = False) -> Tokenizer:
    """Copy the tokenizer of `path` into `folder`.

    Args:
        folder: where it goes.
        path: a tokenizer.json, or a folder with one.
        template: whether its chat template comes along, where it has one.

    Raises:
        DataError: where there is none, it cannot be read, or it has no end token.
    """
    from tokenizers import Tokenizer as Library

    source = find_tokenizer_file(path)
    try:
        text = source.read_text("utf-8")
        names = Library.from_str(text).get_vocab(with_added_tokens=True)
    # The library raises bare Exception for every kind of bad file.
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
    return save_json_tokenizer(folder, "file", text, end, pad, _chat(source.parent, settings) if template else None)


def _chat(folder: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """The chat template of a folder, with the names of tokens that it may use; None where there is none."""
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


def _byte_level_alphabet() -> frozenset[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return frozenset(ByteLevel.alphabet())
