"""Text generation with a trained model: the sample at the end of a run, and `weft generate`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location
from weft.comm.gpu_settings import pick_device
from weft.config.run_config import SampleSection
from weft.config.sections import TRAINS
from weft.config.shapes.hugging_face_config import number
from weft.data.store.data_prompt import FirstPrompt, first_prompt, is_chat
from weft.data.store.prepare import stop_ids
from weft.data.text.tokenizer import Tokenizer, import_tokenizer
from weft.data.text.turns import Turn
from weft.errors import CheckpointError, ConfigError, DataError, ModelError
from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.hub import local_folder
from weft.models.adapters import merge_adapter
from weft.models.decoder import Decoder
from weft.models.inspect import hugging_face
from weft.models.registry import build_decoder
from weft.train.folder import RunFolder
from weft.train.generating import complete
from weft.train.states.model_state import restore_model
from weft.train.tasks.description import Forwards
from weft.train.weights.decoder_files import base_of, data_of, decoder_of, tokenizer_of
from weft.train.weights.published_weights import ADDED_ROWS, load_pretrained
from weft.train.weights.run_adapter import with_adapter


class _Completes(Protocol):
    tokenizer: Tokenizer
    max_positions: int

    def complete(self, ids: Sequence[int], section: SampleSection, seed: int, stops: Collection[int]) -> list[int]:
        """Return the generated ids, without the prompt `ids`. An id of `stops` ends them."""
        ...


class _DecoderText:
    def __init__(self, model: Decoder, tokenizer: Tokenizer):
        self._model, self.tokenizer = model.eval(), tokenizer
        self.max_positions = model.spec.max_seq_len

    def complete(self, ids: Sequence[int], section: SampleSection, seed: int, stops: Collection[int]) -> list[int]:
        sampling = Sampling(
            section.max_tokens, section.temperature, section.top_k, seed=seed, stop_ids=frozenset(stops)
        )
        limits = Limits(self.tokenizer.vocab_size, self.max_positions, rows=1)
        (done,) = generate_batch(self._model, [Request(0, tuple(ids))], sampling, limits)
        if done.error:
            raise ConfigError(f"--prompt: {done.error}")
        return [token for token in done.ids if token not in stops]


@dataclass(frozen=True)
class TextModel:
    """A model that generates text.

    Attributes:
        path: the folder it was read from.
        model: object that continues token ids.
        run: the run folder, or None for a Hugging Face folder.
    """

    path: Path
    model: _Completes
    run: RunFolder | None = None

    @cached_property
    def is_chat(self) -> bool:
        """True if the model was trained on conversations. For a Hugging Face folder: if it has a chat template."""
        return answers_chats(self.run, self.model.tokenizer)

    def first_prompt(self) -> FirstPrompt:
        """Return the start of the run's first held-out document, or of the first training document.

        Raises:
            ConfigError: if the model is not from a run, or the run's tokenised data cannot be read.
        """
        if self.run is None:
            raise ConfigError(
                f"--prompt: {self.path} is no run, so it has no data to take a prompt from. Give a prompt."
            )
        return _first_prompt(self.run, self.model.tokenizer)

    def continue_text(self, prompt: str, section: SampleSection, seed: int = 0, stop: Sequence[str] = ()) -> str:
        """Return the text that follows a prompt.

        Args:
            prompt: used unchanged.
            section: number of tokens, temperature and top_k.
            seed: seed of sampling.
            stop: texts that end the result, and are not part of it.
        """
        tokenizer = self.model.tokenizer
        return self.continue_ids(tokenizer.encode(prompt) or [tokenizer.end_id], section, seed, stop)

    def reply(
        self, turns: Sequence[Turn], section: SampleSection, seed: int = 0, stop: Sequence[str] = (), tools: str = ""
    ) -> str:
        """Return the assistant's next turn.

        Args:
            turns: the conversation so far.
            section: number of tokens, temperature and top_k.
            seed: seed of sampling.
            stop: texts that end the result, and are not part of it.
            tools: JSON of the tools that the assistant may call, or "".

        Raises:
            ConfigError: if the tokenizer has no chat template.
            DataError: if the template rejects the conversation.
        """
        tokenizer = self.model.tokenizer
        if not tokenizer.has_chat:
            raise ConfigError(
                f"RUN={self.path}: its tokenizer has no chat template and no ChatML tokens, so it cannot format "
                "messages. Add a prompt and --raw."
            )
        return self.continue_ids(tokenizer.encode_prompt(turns, tools).tolist(), section, seed, stop)

    def continue_ids(self, ids: Sequence[int], section: SampleSection, seed: int = 0, stop: Sequence[str] = ()) -> str:
        """Return the text that follows token ids.

        Args:
            ids: token ids of the prompt.
            section: number of tokens, temperature and top_k.
            seed: seed of sampling.
            stop: texts that end the result, and are not part of it.

        Raises:
            ConfigError: if the prompt fills all positions of the model.
        """
        room = self.model.max_positions - len(ids)
        if room < 1:
            raise ConfigError(
                f"--prompt: it has {len(ids)} tokens, and the model reads at most {self.model.max_positions}. "
                "Give a shorter prompt."
            )
        section = section.model_copy(update={"max_tokens": min(section.max_tokens, room)})
        tokenizer = self.model.tokenizer
        text = tokenizer.decode(self.model.complete(ids, section, seed, frozenset(stop_ids(tokenizer))))
        ends = [place for one in stop if one and (place := text.find(one)) >= 0]
        return text[: min(ends)] if ends else text


def answers_chats(run: RunFolder | None, tokenizer: Tokenizer) -> bool:
    """Return True if a run was trained on conversations. Without a run: if the tokenizer has a chat template."""
    if run is None:
        return tokenizer.template is not None
    try:
        return is_chat(data_of(run), tokenizer)
    except DataError:  # the tokens of preferences are gone
        return tokenizer.template is not None


def open_text_model(run: RunFolder | Path | str, step: int | None = None) -> TextModel:
    """Load the model of a run, or of a Hugging Face folder.

    Args:
        run: a run, the path of its folder, or a folder with config.json, weights and tokenizer.
        step: step of the run's checkpoint; None for the newest valid one.

    Raises:
        CheckpointError: if there is no such checkpoint, or the folder's weights cannot be read.
        ConfigError: if the run's task is not a text decoder.
    """
    found = open_run(run, "generate")
    if found is None:
        path = Path(str(run))
        return TextModel(path, pretrained_of_folder(path))
    run = found
    if base_of(run).is_dir():
        return TextModel(run.path, pretrained_of_run(run, find_checkpoint(run, step)), run)
    # The checkpoint of an adapter does not contain the base.
    config = run.config()
    model = with_adapter(build_decoder(decoder_of(run), seed=config.seed), config)
    restore_model(model, load_checkpoint(find_checkpoint(run, step)))
    model.to(pick_device("auto", 0))
    return TextModel(run.path, _DecoderText(model, Tokenizer.load(tokenizer_of(run))), run)


def open_run(source: RunFolder | Path | str, verb: str) -> RunFolder | None:
    """Return the run whose text decoder a command uses, or None for a Hugging Face folder.

    Args:
        source: a run, or the path of its folder or of a Hugging Face folder.
        verb: what the command does, for the error.

    Raises:
        ConfigError: if the run's task is not a text decoder.
    """
    if not isinstance(source, RunFolder):
        path = Path(source)
        if (path / "config.json").is_file() and not (path / "config.toml").is_file():
            return None
        source = RunFolder(path)
    task = source.config().task.name
    if task is not None and TRAINS.get(task) != "decoder" and not (source.path / "model.json").exists():
        raise ConfigError(
            f"RUN={source.path}: task.name={task} does not train a text decoder, so it cannot {verb}. Give a run that "
            "trains one."
        )
    return source


def generate_text(
    run: RunFolder | Path | str,
    prompt: str,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Continue `prompt` with the model of a run, without a chat template; return prompt and continuation.

    Args:
        run: result of `prepare_run`, or the path of its folder.
        prompt: text.
        max_tokens: maximum number of added tokens.
        temperature: temperature of sampling; 0 always takes the likeliest token.
        top_k: sample from the `top_k` likeliest tokens.
        seed: seed of sampling.
        step: step of the checkpoint; None for the newest valid one.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: for a run whose task is not a text decoder.
    """
    section = SampleSection(max_tokens=max_tokens, temperature=temperature, top_k=top_k)
    return prompt + open_text_model(run, step).continue_text(prompt, section, seed)


def write_sample(folder: RunFolder, section: SampleSection, step: int, forwards: Forwards) -> str:
    """Write samples/step_N.txt with a text of the current weights, and return the text on the first rank.

    The training ranks generate it (`complete`), and all of them call this function. Training continues with the same
    numbers. Return "" and write nothing if samples are disabled, no prompt can be made, or it fills the model's
    context. Return the reason if the model cannot generate.
    """
    if section.prompt == "":
        return ""
    first = forwards.on_first(lambda: _sample_request(folder, section))
    if first is None:
        return ""
    sampling = Sampling(section.max_tokens, section.temperature, section.top_k, stop_ids=frozenset(first["stops"]))
    limits = Limits(first["num_ids"], first["positions"], rows=1)
    try:
        (done,) = complete(forwards.model, forwards.mesh, [Request(0, tuple(first["ids"]))], sampling, limits)
    except ModelError as error:
        return f"none: {error}"
    if forwards.rank:
        return ""
    if done.error:
        return f"none: {done.error}"
    ids = done.ids[:-1] if done.ids[-1] in sampling.stop_ids else done.ids
    text = first["before"] + Tokenizer.load(tokenizer_of(folder)).decode(ids)
    samples = folder.path / "samples"
    samples.mkdir(exist_ok=True)
    (samples / f"step_{step:08d}.txt").write_text(text + "\n", "utf-8")
    return text


def _sample_request(folder: RunFolder, section: SampleSection) -> dict[str, Any] | None:
    """Return the prompt of a run's sample and bounds of its tokens, or None if there is no prompt that leaves room."""
    tokenizer = Tokenizer.load(tokenizer_of(folder))
    if base_of(folder).is_dir():
        positions = longest_text(hugging_face.load_model_config(base_of(folder)))
    else:
        positions = decoder_of(folder).max_seq_len
    try:
        is_chat = answers_chats(folder, tokenizer)
        ids, before = _prompt_of(tokenizer, section.prompt, is_chat, lambda: _first_prompt(folder, tokenizer))
    except (ConfigError, DataError):  # the stored tokens are gone, or the template refuses the question
        return None
    if not ids or len(ids) >= positions:
        return None
    stops = sorted(stop_ids(tokenizer))
    return {"ids": ids, "before": before, "positions": positions, "num_ids": tokenizer.vocab_size, "stops": stops}


def _first_prompt(run: RunFolder, tokenizer: Tokenizer) -> FirstPrompt:
    try:
        return first_prompt(data_of(run), tokenizer)
    except DataError as error:
        raise ConfigError(f"--prompt: {error} Give a prompt.") from error


def _prompt_of(
    tokenizer: Tokenizer, prompt: str | None, is_chat: bool, first: Callable[[], FirstPrompt]
) -> tuple[list[int], str]:
    """Return the token ids of a prompt, and the text to show before its continuation.

    Args:
        tokenizer: the model's tokenizer.
        prompt: a question or a text; None calls `first`.
        is_chat: True if the model answers questions.
        first: returns a prompt from the run's data.
    """
    if prompt is None:
        ids, words = first()
    elif is_chat:
        ids, words = tokenizer.encode_prompt([Turn("user", prompt)]).tolist(), prompt
    else:
        ids, words = tokenizer.encode(prompt) or [tokenizer.end_id], prompt
    return list(ids), f"> {words}\n" if is_chat and words else words


def sample_text(model: TextModel, section: SampleSection, seed: int = 0, stop: Sequence[str] = ()) -> str:
    """Return a prompt and the model's continuation, or "" if the prompt fills the model's context.

    Args:
        model: a run's model.
        section: prompt (None takes one from the data), number of tokens, temperature and top_k.
        seed: seed of sampling.
        stop: texts that end the result.
    """
    ids, before = _prompt_of(model.model.tokenizer, section.prompt, model.is_chat, model.first_prompt)
    if len(ids) >= model.model.max_positions:
        return ""
    return before + model.continue_ids(ids, section, seed, stop)


def find_checkpoint(folder: RunFolder, step: int | None) -> Location:
    """Return the path of a run's checkpoint, or of the newest valid one if `step` is None.

    Raises:
        CheckpointError: if there is no such checkpoint.
    """
    if step is None:
        found = newest_checkpoint(folder.checkpoints)
        if found is None:
            raise CheckpointError(
                f"run folder {str(folder.path)!r}: it has no checkpoint yet. Train until the first one is saved."
            )
        return found.path
    return folder.checkpoint(step)


# Text generation of a Hugging Face model, with transformers.


class PretrainedText:
    """A transformers model that continues token ids.

    Args:
        model: the model with its weights.
        tokenizer: the model's tokenizer.
        config: the model's config, which sets the maximum length.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, config: Any):
        self.tokenizer = tokenizer
        self.max_positions = longest_text(config)
        self._device = pick_device("auto", 0)
        self._model = model.to(self._device).eval()

    def complete(self, ids: Sequence[int], section: SampleSection, seed: int, stops: Collection[int]) -> list[int]:
        """Return the generated ids, without the prompt.

        Args:
            ids: token ids of the prompt.
            section: number of tokens, temperature and top_k.
            seed: seed of sampling.
            stops: ids that end the text, and are not part of it.
        """
        given = torch.tensor([list(ids)], device=self._device)
        chance = {"temperature": section.temperature, "top_k": section.top_k} if section.temperature else {}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            found = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=bool(section.temperature),
                max_new_tokens=section.max_tokens,
                eos_token_id=sorted(stops),
                pad_token_id=self.tokenizer.pad_id,
                **chance,
            )
        new_ids = found[0, given.shape[1] :].tolist()
        return next((new_ids[:place] for place, token in enumerate(new_ids) if token in stops), new_ids)


def longest_text(config: Any) -> int:
    """Return the maximum number of tokens that a model with this config reads, or 2**20 if it sets none."""
    return number(config.get_text_config(decoder=True), "positions") or 2**20


def pretrained_of_run(folder: RunFolder, path: Location) -> PretrainedText:
    """Load a run's transformers model from a checkpoint. An adapter on a quantized base is merged."""
    model_config: Any = hugging_face.load_model_config(Path(base_of(folder)))
    model: Any = hugging_face.causal_model(model_config)
    config = folder.config()
    if config.adapter.rank:  # its checkpoints have no base
        load_pretrained(model, local_folder(config.model.path), base_of(folder) / ADDED_ROWS)
    restore_model(with_adapter(model, config, base_of(folder)), load_checkpoint(path))
    if config.adapter.base != "stored":  # otherwise each token unpacks all weights
        merge_adapter(model)
    return PretrainedText(model, Tokenizer.load(tokenizer_of(folder)), model_config)


def pretrained_of_folder(folder: Path) -> PretrainedText:
    """Load the model and the tokenizer of a Hugging Face folder.

    Raises:
        ConfigError: for a folder with only an adapter.
        CheckpointError, DataError, ModelError: if a part of the folder is missing or damaged.
    """
    refuse_lone_adapter(folder)
    config: Any = hugging_face.load_model_config(folder)
    model: Any = hugging_face.causal_model(config)
    load_pretrained(model, folder)
    with tempfile.TemporaryDirectory() as draft:
        tokenizer = import_tokenizer(Path(draft) / "tokenizer", str(folder), template=True)
    return PretrainedText(model, tokenizer, config)


def refuse_lone_adapter(folder: Path) -> None:
    """Raise ConfigError for a folder with an adapter and without its base."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"RUN={folder}: this folder has an adapter without its base. Use the run's folder, or write the merged "
            "model with weft export RUN FOLDER --merge."
        )
