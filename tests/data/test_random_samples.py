"""Random transforms of a user's dataset: equal at any number of ranks and workers, and after a resume."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from weft.data.order.user_dataloader import ShardedLoader


class Augmented(Dataset):
    """Samples with random numbers of all three generators."""

    def __init__(self, num_samples: int = 24):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class InOneCall(Augmented):
    """Returns a batch in one call, as Hugging Face's datasets do."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Tagged(Augmented):
    """Has an attribute that workers set."""

    tag = 0.0

    def __getitem__(self, index):
        return torch.tensor([float(index), self.tag])


def masked(samples):
    """Collate with random numbers."""
    rows = torch.stack(samples)
    return torch.cat([rows, torch.rand(len(rows), 1, dtype=rows.dtype)], 1)


def batches(dataset, ranks=1, workers=0, *, first=0, epochs=1, collate=None, **options):
    """Return global batches, concatenated over ranks. first: number of batches that were read before."""
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers, collate_fn=collate)
    parts = []
    for rank in range(ranks):
        mine = ShardedLoader(loader, rank, ranks, seed=3, **options)
        mine.load_state_dict({"epoch": first // 3, "next_batch": first % 3})
        parts.append([batch for _ in range(epochs) for batch in mine])
    return [torch.cat(one) for one in zip(*parts, strict=True)]


def assert_same(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Augmented, InOneCall])
def test_samples_do_not_depend_on_ranks_or_a_resume(kind):
    want = batches(kind(), epochs=2)
    assert_same(batches(kind(), ranks=2, epochs=2), want)
    assert_same(batches(kind(), ranks=4, epochs=2), want)
    assert_same(batches(kind(), first=2, epochs=2), want[2:])
    drawn = torch.cat(want)[:, 1:]
    assert drawn.unique().numel() == drawn.numel()  # other numbers for each sample and epoch


def test_samples_do_not_depend_on_workers():
    assert_same(batches(Augmented(), ranks=2, workers=2), batches(Augmented()))


def test_collate_function_draws_the_same_after_a_resume():
    want = batches(Augmented(), epochs=2, collate=masked)
    assert_same(batches(Augmented(), first=1, epochs=2, collate=masked), want[1:])
    assert torch.cat(want)[:, 4].unique().numel() == 48


def test_generators_of_the_script_are_unaffected():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    loader = ShardedLoader(DataLoader(Augmented(), batch_size=8), 0, 1)
    iterator = iter(loader)
    next(iterator)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    next(iterator)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_seed_samples_false_uses_the_scripts_seeding():
    random.seed(5)
    first = batches(Augmented(), seed_samples=False)
    random.seed(5)
    assert torch.equal(torch.cat(batches(Augmented(), seed_samples=False))[:, 1], torch.cat(first)[:, 1])
    assert not torch.equal(torch.cat(batches(Augmented(), seed_samples=False))[:, 1], torch.cat(first)[:, 1])


def set_tag(worker):
    torch.utils.data.get_worker_info().dataset.tag = 7.0


def test_workers_see_the_attributes_of_the_dataset():
    loader = DataLoader(Tagged(), batch_size=8, num_workers=1, worker_init_fn=set_tag)
    (batch, *_) = ShardedLoader(loader, 0, 1)
    assert batch[:, 1].tolist() == [7.0] * 8


def test_subset_of_a_dataset():
    part = Subset(Augmented(), range(24))
    assert_same(batches(part, ranks=2), batches(part))
