"""Export of a model as a program of torch.export: a graph with weights that runs without the model's code."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError, ConfigError, ModelError
from weft.inference.open_model import open_model
from weft.models.decoder import Decoder

#: Batch and length of the traced example, and of the ids with which the program is compared.
_EXAMPLE, _CHECKED = (2, 12), ((2, 12), (3, 19), (1, 150))
#: Largest difference of logits relative to the largest logit.
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.005}
#: Dimensions that vary, in the order of attempts.
_ATTEMPTS = (("batch", "length"), ("length",), ("batch",), ())


class TokenLogits(nn.Module):
    """A causal language model as a function of token ids.

    Args:
        model: a Decoder or a causal language model of transformers.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of all tokens, (batch, length, vocabulary). input_ids: (batch, length)."""
        if isinstance(self.model, Decoder):
            return self.model(input_ids)
        return self.model(input_ids=input_ids, use_cache=False).logits


def export_program(source: Path, file: Path, *, step: int | None = None, dtype: str = "fp32") -> str:
    """Write the model of a run or of a Hugging Face folder as a program, and compare the file with the model.

    The program takes token ids, (batch, length), and returns the logits of all tokens. An adapter is merged.

    Args:
        source: folder of the run or the model.
        file: output file, ending in .pt2.
        step: step of the run's checkpoint; None for the newest valid one.
        dtype: fp32, bf16 or fp16.

    Returns:
        a line on what varies and on the difference.

    Raises:
        ConfigError: if the file exists or has another ending.
        ModelError: if torch.export cannot trace the model.
        CheckpointError: if the program computes something else, or cannot be written. There is no file then.
    """
    if file.suffix != ".pt2":
        raise ConfigError(f"OUT={file}: programs are .pt2 files. Use {file.with_suffix('.pt2')}.")
    if file.exists():
        raise ConfigError(f"OUT={file}: the file exists, and Weft does not overwrite it. Give another name.")
    plan = Plan(precision=dtype)
    opened = open_model(source, plan, build_mesh(plan, torch.device("cpu")), step)
    model = TokenLogits(opened.model.requires_grad_(False)).eval()
    longest = min(opened.max_positions, 2**20)
    if longest < _EXAMPLE[1]:
        rule = f"the model reads {longest} tokens, and the traced example has {_EXAMPLE[1]}"
        raise ModelError(f"--to program: {rule}. Export a folder instead: weft export RUN FOLDER.")
    program, varies = _traced(model, opened.num_ids, longest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".weft-export-") as work:
            draft = Path(work) / file.name
            torch.export.save(program, draft)
            worst = _difference(model, torch.export.load(draft).module(), opened.num_ids, varies, longest)
            os.rename(draft, file)
    except OSError as error:
        raise CheckpointError(f"OUT={file}: it cannot be written ({error.strerror}). Give another name.") from error
    shapes = f"{' and '.join(varies)} may vary" if varies else "batch and length are fixed"
    return f"{dtype}; {shapes}; its logits differ from the model's by at most {worst:.2g}"


def _traced(model: TokenLogits, num_ids: int, longest: int) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """Return the program, and the dimensions that may vary in it: as many as torch.export allows."""
    example = _ids(_EXAMPLE, num_ids)
    errors: list[Exception] = []
    for varies in _ATTEMPTS:
        limits = {"batch": 2**20, "length": longest}
        dims = {
            place: torch.export.Dim(name, min=1, max=limits[name])
            for place, name in enumerate(("batch", "length"))
            if name in varies
        }
        try:
            with torch.no_grad(), warnings.catch_warnings(), _without_logs():
                warnings.simplefilter("ignore")
                return torch.export.export(model, (example,), dynamic_shapes=(dims,), strict=False), varies
        except Exception as error:  # tracing runs the model's own code, which may raise anything
            errors.append(error)
    why = (str(errors[-1]).strip() or type(errors[-1]).__name__).partition("\n")[0].rstrip(".")
    name = type(model.model).__name__
    raise ModelError(
        f"--to program: torch.export cannot trace {name} ({why}). Export a folder instead: weft export RUN FOLDER. "
        "Experts need --dtype bf16."
    ) from errors[-1]


@contextlib.contextmanager
def _without_logs() -> Generator[None]:
    """Silence loggers: torch logs tracebacks of errors that it also raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _ids(shape: tuple[int, int], num_ids: int) -> Tensor:
    draws = torch.Generator().manual_seed(shape[1])
    return torch.randint(min(num_ids, 2**31), shape, generator=draws)


@torch.no_grad()
def _difference(model: TokenLogits, program: Any, num_ids: int, varies: tuple[str, ...], longest: int) -> float:
    """Return the largest difference between the logits of a program and of the model, for several shapes.

    Raises:
        CheckpointError: if it is larger than rounding, or the program fails.
    """
    worst = 0.0
    for shape in _CHECKED:
        batch, length = (
            min(size, longest) if name in varies else usual
            for name, size, usual in zip(("batch", "length"), shape, _EXAMPLE, strict=True)
        )
        ids = _ids((batch, length), num_ids)
        wanted = model(ids)
        try:
            found = program(ids)
        except Exception as error:  # guards of the program raise errors of several kinds
            why = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"--to program: the program fails for {batch} x {length} ids ({why}).") from error
        difference, limit = (found - wanted).abs().max().item(), _LIMITS[wanted.dtype] * wanted.abs().max().item()
        if not difference <= limit:
            raise CheckpointError(
                f"--to program: for {batch} x {length} ids the logits differ by {difference:.2g} from the model's, "
                f"more than {limit:.2g}. No file was written. Please report this."
            )
        worst = max(worst, difference)
    return worst
