"""Scores of a run's canaries: by how much training lowered the loss of each."""

from __future__ import annotations

import numpy as np
import torch

from weft.checkpoint.load import Checkpoint
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.data.batches import move_batch
from weft.errors import ConfigError
from weft.privacy.audit import Canaries, choose_canaries
from weft.privacy.gradients import sample_losses
from weft.privacy.keys import read_key
from weft.train.batches.microbatches import split_rows
from weft.train.folder import RunFolder
from weft.train.losses import CheckedLoss
from weft.train.privacy.records import private_records
from weft.train.states.model_state import load_model
from weft.train.tasks.registry import find_task
from weft.train.weights.built_model import built_model

#: Canaries of one forward.
_AT_ONCE = 64


def canary_scores(folder: RunFolder, checkpoint: Checkpoint, device: torch.device) -> tuple[np.ndarray, Canaries]:
    """Return the score of each canary of a run, float64, and the canaries.

    Raises:
        ConfigError: if the run has no canaries.
    """
    config = folder.config()
    if not config.privacy.canaries:
        raise ConfigError(
            "privacy.canaries=0: the run left no record out, so there is nothing to compare. Train it with "
            "privacy.canaries=200."
        )
    task = find_task(config)
    task.open(folder)
    records = private_records(config, task)
    samples = records.samples
    key = read_key(config.privacy.key or str(folder.path / "privacy.key"))
    canaries = choose_canaries(key, len(samples), config.privacy.canaries)
    mesh = build_mesh(Plan(precision=folder.plan().precision), device)
    model = built_model(task, config, mesh).eval()
    loss = CheckedLoss(task.loss, mesh, warns_of_means=False)

    @torch.no_grad()
    def losses() -> np.ndarray:
        found: list[torch.Tensor] = []
        for first in range(0, len(canaries.records), _AT_ONCE):
            some = canaries.records[first : first + _AT_ONCE].tolist()
            batch = move_batch(records.collate([samples[record] for record in some]), device)
            parts = split_rows(batch, [range(one, one + 1) for one in range(len(some))])
            found.append(sample_losses(loss, task.forward(model, batch), parts)[0].double().cpu())
        return torch.cat(found).numpy()

    before = losses()
    load_model(model, checkpoint)
    return before - losses(), canaries
