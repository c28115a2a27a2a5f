"""An adapter's run as a whole model: the base's weights one by one, with the adapter added where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint import Checkpoint
from weft.checkpoint.pretrained import JoinedTensors
from weft.errors import ConfigError
from weft.models.adapters import BASE_FORMATS, Adapted, merge_adapter, merged_weight
from weft.parallel.local_tensors import read_whole
from weft.train.folder import RunFolder
from weft.train.state import model_tensors, restore_model
from weft.train.state.base import expect_same_base
from weft.train.task import with_adapter
from weft.train.tasks.decoder_files import base_of, decoder_of
from weft.train.tasks.published_weights import pretrained_source


class MergedBase:
    """The tensors of a folder's model with an adapter merged, read one by one.

    Args:
        source: the folder's weights by the model's names.
        checkpoint: of the adapter.
        widened: whether merged weights keep the adapter's format; else they are rounded to the base's.
    """

    def __init__(self, source: JoinedTensors, checkpoint: Checkpoint, *, widened: bool):
        said: Mapping[str, Any] = checkpoint.state["adapter"]
        self.names = list(source.entries)
        self._source, self._widened, self._path = source, widened, checkpoint.path
        self._trained, self._digests = checkpoint.tensors("model"), said["base"]
        self._record = Adapted.read(said)
        self._own: dict[str, dict[str, str]] = {}
        for path, name in self._record.params():
            self._own.setdefault(f"{path}.weight", {})[name] = f"{path}.{name}"

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            CheckpointError: where the base is not the one that the adapter was trained on.
        """
        if name in self._trained:  # a norm, say, that was trained beside the adapter
            return self._trained[name]
        stored, path = read_whole(self._source, name), name.removesuffix(".weight")
        if path in self._record.packed:
            # What the adapter was trained beside: the numbers that the bytes stand for, and not the folder's.
            kept = BASE_FORMATS[self._record.base]
            packed = kept.pack(stored)
            expect_same_base(name, packed, self._digests, self._path)
            stored = kept.unpack(packed, stored.shape[1], stored.dtype)
        else:
            expect_same_base(name, stored, self._digests, self._path)
        if name not in self._own:
            return stored
        parts = {kind: self._trained[full] for kind, full in self._own[name].items()}
        if self._widened:
            stored = stored.to(torch.promote_types(stored.dtype, parts["lora_A"].dtype))
        return merged_weight(self._record, name.removesuffix(".weight"), stored, parts)


def merged_base(model: nn.Module, base: Path, checkpoint: Checkpoint, *, widened: bool) -> MergedBase:
    """Return a folder's model with an adapter merged.

    Args:
        model: of the folder, as shapes, without the adapter.
        base: the folder that the adapter was trained on.
        checkpoint: of the adapter.
        widened: as `MergedBase` takes it.

    Raises:
        CheckpointError: as `pretrained_source` raises it.
    """
    return MergedBase(pretrained_source(model, base)[0], checkpoint, widened=widened)


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
