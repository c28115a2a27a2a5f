"""Planted faults of private steps: the comparison with single samples must find each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft.privacy.update as update
import weft.train.privacy.batches as batches
from tests.privacy.private_cases import LIMIT, PrivateCase, difference, plain, train
from weft.privacy.gradients import SampleGradients
from weft.privacy.recorder import GradientRecord, Owner
from weft.train.step.update import WeightUpdate

NET, REPLICAS, SHARDS = (
    PrivateCase("net"),
    PrivateCase("net", "dp_replicate=2"),
    PrivateCase("net", "dp_shard=2 zero=1"),
)


def noise_on_one_rank(patch):
    add = update.add_noise
    is_first = torch.distributed.get_rank() == 0
    patch.setattr(update, "add_noise", lambda held, key, step, scale: add(held, key, step, scale * is_first))


def noise_of_each_rank_summed(patch):
    add = update.add_noise
    patch.setattr(update, "add_noise", lambda held, key, step, scale: add(held, key, step, scale * 2))


def equal_noise_on_two_shards(patch):
    add = update.add_noise
    patch.setattr(
        update, "add_noise", lambda held, *rest: add([(one, replace(place, start=0)) for one, place in held], *rest)
    )


def equal_noise_in_two_steps(patch):
    add = update.add_noise
    patch.setattr(update, "add_noise", lambda held, key, step, scale: add(held, key, 0, scale))


def clipping_after_the_sum(patch):
    def weights(self, records):
        norms = self.norms(records)
        total = torch.cat(norms).sum().sqrt()
        return [torch.full_like(one, min(1.0, float(self.clip / total))) for one in norms]

    patch.setattr(SampleGradients, "weights", weights)


def no_clipping(patch):
    patch.setattr(SampleGradients, "weights", lambda self, records: [torch.ones_like(n) for n in self.norms(records)])


def divisor_of_the_draw(patch):
    apply = WeightUpdate.apply

    def by_draw(self, numbers, measures):
        self._divisor = numbers[1] / 5
        return apply(self, numbers, measures)

    patch.setattr(WeightUpdate, "apply", by_draw)


def a_sample_twice(patch):
    make = batches.drawn_batch
    patch.setattr(batches, "drawn_batch", lambda data, drawn, *rest: make(data, [*drawn, drawn[0]], *rest))


def a_layer_left_out(patch):
    finish = GradientRecord._finish

    def without_mid(self, entry):
        if entry.owner.name == "mid.weight":
            entry.owner = Owner(entry.owner.name, counts=False)
        finish(self, entry)

    patch.setattr(GradientRecord, "_finish", without_mid)


FAULTS = {
    fault.__name__: (fault, case)
    for fault, case in [
        (noise_on_one_rank, REPLICAS), (noise_of_each_rank_summed, NET), (equal_noise_on_two_shards, SHARDS),
        (equal_noise_in_two_steps, NET), (clipping_after_the_sum, NET), (no_clipping, NET), (divisor_of_the_draw, NET),
        (a_sample_twice, NET), (a_layer_left_out, NET),
    ]
}  # fmt: skip


def train_with(name: str, case: PrivateCase):
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        return train(case)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name, ranks2):
    case = FAULTS[name][1]
    found = ranks2.run(train_with, name, case) if "2" in case.plan else [train_with(name, case)]
    want = plain(case)
    assert max(difference(one, want) for one in found) > 1000 * LIMIT


def test_without_faults_they_are_equal(ranks2):
    for case in (REPLICAS, SHARDS):
        assert max(difference(one, plain(case)) for one in ranks2.run(train, case)) <= LIMIT
