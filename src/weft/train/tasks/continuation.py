"""Text out of a fine-tuned model, by transformers' own generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import load_checkpoint
from weft.checkpoint.targets import Location
from weft.data import Tokenizer
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


def pretrained_room(folder: RunFolder, prompt: str) -> int:
    """Return how many tokens fit behind a prompt."""
    config: Any = hugging_face.load_model_config(base_of(folder))
    longest = number(config.get_text_config(decoder=True), "positions") or 2**20
    return longest - len(Tokenizer.load(tokenizer_of(folder)).encode(prompt))


def pretrained_text(folder: RunFolder, path: Location, prompt: str, section: SampleSection, seed: int) -> str:
    """Continue a prompt with the model of a checkpoint; returns prompt and continuation.

    Args:
        folder: of the run.
        path: of the checkpoint.
        prompt: text.
        section: how many tokens, temperature and top_k.
        seed: of sampling.
    """
    tokenizer = Tokenizer.load(tokenizer_of(folder))
    model: Any = hugging_face.causal_model(hugging_face.load_model_config(Path(base_of(folder))))
    config = folder.config()
    if config.adapter.rank:  # its checkpoints have no base
        load_pretrained(model, Path(config.model.path).expanduser())
    restore_model(with_adapter(model, config), load_checkpoint(path))
    if config.adapter.base != "stored":  # else each token unpacks all weights; they were here whole before, too
        merge_adapter(model)
    device = pick_device("auto", 0)
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.end_id]], device=device)
    chance = {"temperature": section.temperature, "top_k": section.top_k} if section.temperature else {}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        found = (
            model.to(device)
            .eval()
            .generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=bool(section.temperature),
                max_new_tokens=section.max_tokens,
                eos_token_id=tokenizer.end_id,
                pad_token_id=tokenizer.pad_id,
                **chance,
            )
        )
    return prompt + tokenizer.decode(found[0, ids.shape[1] :].tolist())
