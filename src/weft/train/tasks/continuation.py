"""Text out of a Hugging Face model, by transformers' own generation."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import load_checkpoint
from weft.checkpoint.targets import Location
from weft.data import Tokenizer
from weft.data.tokens import import_tokenizer
from weft.errors import ConfigError
from weft.mesh import pick_device
from weft.models.adapters import merge_adapter
from weft.spec.config import SampleSection
from weft.spec.model import number
from weft.structure import hugging_face
from weft.train.folder import RunFolder
from weft.train.state import restore_model
from weft.train.task import with_adapter
from weft.train.tasks.decoder_files import base_of, tokenizer_of
from weft.train.tasks.published_weights import load_pretrained


class PretrainedText:
    """A model of transformers that continues token ids.

    Args:
        model: with its weights.
        tokenizer: of the model.
        config: of the model, which gives the longest text.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, config: Any):
        self.tokenizer = tokenizer
        self.max_positions = longest_text(config)
        self._device = pick_device("auto", 0)
        self._model = model.to(self._device).eval()

    def complete(self, ids: Sequence[int], section: SampleSection, seed: int, stops: Collection[int]) -> list[int]:
        """Return the ids that follow.

        Args:
            ids: of the prompt.
            section: how many tokens, temperature and top_k.
            seed: of sampling.
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
    """Return how many positions a model of this config has."""
    return number(config.get_text_config(decoder=True), "positions") or 2**20


def run_positions(folder: RunFolder) -> int:
    """Return how many positions the model of a run has."""
    config: Any = hugging_face.load_model_config(base_of(folder))
    return longest_text(config)


def pretrained_of_run(folder: RunFolder, path: Location) -> PretrainedText:
    """Load the model of a checkpoint.

    Args:
        folder: of the run.
        path: of the checkpoint.
    """
    model_config: Any = hugging_face.load_model_config(Path(base_of(folder)))
    model: Any = hugging_face.causal_model(model_config)
    config = folder.config()
    if config.adapter.rank:  # its checkpoints have no base
        load_pretrained(model, Path(config.model.path).expanduser())
    restore_model(with_adapter(model, config), load_checkpoint(path))
    if config.adapter.base != "stored":  # else each token unpacks all weights; they were here whole before, too
        merge_adapter(model)
    return PretrainedText(model, Tokenizer.load(tokenizer_of(folder)), model_config)


def pretrained_of_folder(folder: Path) -> PretrainedText:
    """Load the model and the tokenizer of a Hugging Face folder.

    Raises:
        ConfigError: for a folder that holds an adapter alone.
        CheckpointError, DataError, ModelError: if a part of the folder is missing or damaged.
    """
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"RUN={folder}: this folder holds an adapter without its base. Give the run's folder, or write the merged "
            "model with weft export RUN FOLDER --merge."
        )
    config: Any = hugging_face.load_model_config(folder)
    model: Any = hugging_face.causal_model(config)
    load_pretrained(model, folder)
    with tempfile.TemporaryDirectory() as draft:
        tokenizer = import_tokenizer(Path(draft) / "tokenizer", str(folder), template=True)
    return PretrainedText(model, tokenizer, config)
