"""An adapter's run as a whole model: the base's weights one by one, with the adapter added where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint import Checkpoint
from weft.errors import ConfigError
from weft.models.adapters import Adapted, merge_adapter, merged_weight
from weft.parallel.local_tensors import read_whole
from weft.train.folder import RunFolder
from weft.train.state import expect_same_base, model_tensors, restore_model
from weft.train.task import with_adapter
from weft.train.tasks.decoder_files import base_of, decoder_of
from weft.train.tasks.published_weights import pretrained_source


def merged_base(
    model: nn.Module, base: Path, checkpoint: Checkpoint, said: Mapping[str, Any], *, widened: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's model with an adapter merged, one at a time in memory.

    Args:
        model: of the folder, as shapes, without the adapter.
        base: the folder that the adapter was trained on.
        checkpoint: of the adapter.
        said: what the checkpoint says of its adapter.
        widened: whether merged weights keep the adapter's format; else they are rounded to the base's.

    Raises:
        CheckpointError: for another base, and as `pretrained_source` raises it.
    """
    record, source = Adapted.read(said), pretrained_source(model, base)[0]
    own: dict[str, dict[str, str]] = {}
    for path, name in record.params():
        own.setdefault(f"{path}.weight", {})[name] = f"{path}.{name}"
    trained = checkpoint.tensors("model")
    for name in source.entries:
        if name in trained:  # a norm, say, that was trained beside the adapter
            yield name, trained[name]
            continue
        stored = read_whole(source, name)
        expect_same_base(name, stored, said["base"], checkpoint.path)
        if name in own:
            parts = {kind: trained[full] for kind, full in own[name].items()}
            wide = stored.to(torch.promote_types(stored.dtype, parts["lora_A"].dtype)) if widened else stored
            stored = merged_weight(record, name.removesuffix(".weight"), wide, parts)
        yield name, stored


def merged_decoder(folder: RunFolder, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of one of Weft's decoders with its adapter merged; its base follows from the run's seed."""
    from weft.models import build_decoder

    config = folder.config()
    model = with_adapter(build_decoder(decoder_of(folder), seed=config.seed), config)
    restore_model(model, checkpoint)
    return model_tensors(merge_adapter(model))


def base_folder(folder: RunFolder) -> Path:
    """Return the folder that a run's adapter stands on.

    Raises:
        ConfigError: where it is not there any more.
    """
    path = Path(folder.config().model.path).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"--merge: the adapter's base, model.path={path}, is not there. Put the folder back there, or give its "
            "new place with --like in place of --merge."
        )
    return path


def base_name(folder: RunFolder) -> str | None:
    """Return what files of an adapter call its base: its folder; None for Weft's own decoders."""
    if not base_of(folder).is_dir():
        return None
    path = Path(folder.config().model.path).expanduser()
    return str(path.resolve() if path.is_dir() else path)
