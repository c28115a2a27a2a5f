"""`weft ckpt convert`: a folder of a model with its weights in safetensors in place of pickles."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.cli.ckpt.whole_weights import refuse_existing, write_files
from weft.errors import CheckpointError
from weft.files import copy_companions


def convert_pickles(source: Path, out: Path, *, dtype: str | None, limit_s: float) -> tuple[list[Path], list[str]]:
    """Write a new folder, which appears when it is complete; its files, and the names of what was left out.

    source: folder of a Hugging Face model. dtype: a key of DTYPES for floating tensors; None: as they are. limit_s: how
    long reading may take. Raises ConfigError or CheckpointError.
    """
    from weft.train.foreign import pickled_weights

    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".weft-convert-") as work:
            read, draft = Path(work) / "read", Path(work) / "out"
            read.mkdir()
            draft.mkdir()
            tensors, left_out = pickled_weights(source, read, limit_s)
            write_files(tensors, "model", draft, dtype)
            copy_companions(source, draft)
            if out.exists():
                out.rmdir()
            os.rename(draft, out)
    except OSError as error:
        raise CheckpointError(f"OUT={out}: it cannot be written ({error.strerror}). Give another folder.") from error
    return sorted(out.iterdir()), left_out
