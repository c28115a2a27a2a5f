"""Splitting batches of a DataLoader into microbatches and moving them to the run's device."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import weft
from weft.comm.mesh import build_mesh
from weft.comm.rank_positions import Reader
from weft.config.partitioning import microbatch_samples
from weft.config.plan import Plan
from weft.data.batches import map_tensors, move_batch, tensors_in
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.random.streams import SampleNumbers
from weft.train.batches.microbatches import from_loader, microbatches_of, samples_of, split_batch
from weft.train.step.train_step import TrainStep


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Images:
    pixels: torch.Tensor
    name: str


class Encoding(UserDict):
    """Mapping like transformers' BatchEncoding: not a dict, with its entries as attributes."""

    def __getattr__(self, name):
        return self.data[name]


def x() -> torch.Tensor:
    return torch.arange(8)


BATCHES = {
    "list": lambda: [x(), x() + 1],
    "tuple": lambda: (x(), x() + 1),
    "nested": lambda: {"a": [x(), (x(), {"b": x()})], "n": 3},
    "named": lambda: Pair(x(), x() + 1),
    "dataclass": lambda: Images(x(), "cats"),
    "encoding": lambda: Encoding(input_ids=x(), labels=x()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_containers_keep_their_types_when_split_and_moved(name):
    whole = BATCHES[name]()
    parts = split_batch(whole, 4)
    assert [[tensor.tolist() for tensor in tensors_in(part)] for part in parts] == [
        [tensor[start : start + 2].tolist() for tensor in tensors_in(whole)] for start in (0, 2, 4, 6)
    ]
    moved = move_batch(whole, torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert {tensor.device.type for tensor in tensors_in(whole)} == {"cpu"}
    for changed in (*parts, moved, map_tensors(torch.neg, whole)):
        assert type(changed) is type(whole)
        assert len(list(tensors_in(changed))) == len(list(tensors_in(whole)))


def test_hugging_face_encoding_keeps_its_type():
    from transformers import BatchEncoding

    whole = BatchEncoding({"input_ids": torch.arange(6).view(2, 3)})
    first = split_batch(move_batch(whole, torch.device("meta")), 2)[0]
    assert isinstance(first, BatchEncoding)
    assert first.input_ids.shape == (1, 3)
    assert first.input_ids.is_meta


def test_objects_with_a_to_method_are_moved_by_it():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert move_batch({"x": packed}, torch.device("meta"))["x"].data.is_meta


def test_text_per_sample_is_split_and_settings_are_not():
    batch = {"x": x(), "name": list("abcdefgh"), "size": (3, 4), "scale": torch.tensor(2.0), "mode": "train"}
    last = split_batch(batch, 4)[3]
    assert last["name"] == ["g", "h"]
    assert (last["size"], last["scale"].item(), last["mode"]) == ((3, 4), 2.0, "train")


def test_unsplittable_batch_is_rejected():
    with pytest.raises(ModelError, match=r"accumulation=2: the batch holds a set, .*step\(weft.Microbatches"):
        split_batch([x(), {1, 2}], 2)


@pytest.mark.parametrize(
    ("plan", "field"), [("accumulation=2", "accumulation"), ("pp=2 microbatches=2", "microbatches")]
)
def test_number_of_microbatches_must_match_the_plan(plan, field):
    plan = Plan.parse(plan)
    assert microbatches_of(weft.Microbatches([x(), x()]), plan)[1].tolist() == list(range(8))
    with pytest.raises(ModelError) as caught:
        microbatches_of(weft.Microbatches([x()]), plan)
    assert str(caught.value) == f"{field}=2: a step has that many microbatches, and got 1. Give 2."


def make_step(plan: str, model: nn.Module, loss_fn, **options) -> TrainStep:
    mesh = build_mesh(Plan.parse(plan))
    return TrainStep(parallelize(model, mesh), torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, mesh, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_list_from_torch_loader_is_one_batch(accumulation):
    samples = [(torch.full((3,), float(index)), torch.ones(3)) for index in range(4)]
    [batch] = DataLoader(samples, batch_size=4)
    assert isinstance(batch, list)
    found = []
    for given in (batch, tuple(batch)):
        torch.manual_seed(0)
        step = make_step(
            f"accumulation={accumulation}", nn.Linear(3, 3), lambda out, b: ((out - b[1]).square().sum(), len(b[1]))
        )
        found.append(step(given))
    assert found[0] == found[1]
    assert found[0].num_tokens == 4


class ReachedForward(Exception):
    """Raised by forward to end the step."""


def test_all_tensors_of_a_batch_are_on_the_device_before_forward():
    seen = []

    def forward(model, batch):
        seen.extend(tensors_in(batch))
        raise ReachedForward

    step = make_step("accumulation=2", nn.Linear(3, 3), lambda out, b: (out.sum(), len(out)), forward=forward)
    step.mesh.device = torch.device("meta")
    pixels = torch.zeros(8, 3)
    cut = weft.Microbatches([Images(pixels, "cats")] * 2)
    for batch, num_tensors in (([pixels, (pixels, {"y": x()})], 3), (cut, 1)):
        seen.clear()
        with pytest.raises(ReachedForward):
            step(batch)
        assert [tensor.is_meta for tensor in seen] == [True] * num_tensors


def test_batch_whose_rows_are_not_samples_is_not_split():
    batch = {"input_ids": torch.zeros(4, 3), "pixel_values": torch.zeros(10, 6)}
    with pytest.raises(ModelError) as caught:
        split_batch(batch, 2)
    assert str(caught.value) == (
        "accumulation=2: batch['pixel_values'] has shape (10, 6) in a batch of 4 samples, so its rows are not "
        "samples and cannot be divided into microbatches. Pass the DataLoader through run.shard, which divides "
        "samples before they are collated, or pass weft.Microbatches([...]) to the step."
    )
    assert split_batch(batch, 1) == [batch]


def test_sample_numbers_belong_to_each_microbatch():
    with pytest.raises(ModelError, match="samples: sample numbers of 1 microbatches were passed for 2"):
        weft.Microbatches([x(), x()], samples=[[0]])
    data = Reader(1, 2)
    plain = samples_of([x()], 2, data)
    assert [list(one.numbers) for one in plain] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    marked = from_loader([[x()]], [range(3, 11)], [()], is_plain=True, total=16)
    assert samples_of(marked, 1, data)[0].numbers == range(3, 11)
    assert samples_of(marked, 1, data)[0].total == 16
    whole = from_loader([[x()]], [[0, 1, 2, 3, 8, 9, 10, 11]], [()], is_plain=True, total=16)
    assert [list(one.numbers) for one in samples_of(whole, 2, data)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    alike = samples_of(weft.Microbatches([[x()], [x()]]), 2, data)
    assert [list(one.numbers) for one in alike] == [[*range(8, 16)], [*range(24, 32)]]


def test_sample_numbers_are_found_in_any_container():
    def sample(number):
        return {"y": torch.tensor(number), "patches": torch.full((number, 2), float(number))}

    def collate(samples):
        patches, y = (torch.cat if name == "patches" else torch.stack for name in ("patches", "y"))
        return {"y": y([one["y"] for one in samples]), "patches": patches([one["patches"] for one in samples])}

    cut = weft.Microbatches.of_samples(sample, microbatch_samples(5, 2, 3, 1), collate)
    assert [batch["y"].tolist() for batch, _ in cut.counted()] == [[1], [3], [1]]
    assert [(list(one.numbers), one.rows) for one in cut.samples] == [([1], ()), ([3], ((3,),)), ([], ())]
    marked = weft.Microbatches(cut.marked())
    assert samples_of(marked, 3, Reader(1, 2)) == list(cut.samples)


def test_rows_of_a_global_batch_are_split_unevenly():
    batch = {"x": x(), "name": list("abcdefgh"), "scale": 2.0}
    cut = weft.Microbatches.of_rows(batch, Plan.parse("dp_shard=3 accumulation=3"), 2)
    parts = [(one["x"].tolist(), one["name"], counted) for one, counted in cut.counted()]
    assert parts == [([2], ["c"], True), ([5], ["f"], True), ([2], ["c"], False)]
    with pytest.raises(ModelError, match=r"plan=dp_shard=2: batch\['p'\] has shape \(5, 2\) in a batch of 8 samples"):
        weft.Microbatches.of_rows({"x": x(), "p": torch.zeros(5, 2)}, Plan.parse("dp_shard=2"), 0)


def test_custom_loop_is_warned_of_padding_microbatches():
    batch = weft.Microbatches([x(), x()], samples=[[0], []])
    with pytest.raises(ModelError, match=r"this rank has no sample for one microbatch.*use drop_last=True"):
        list(batch)
    with pytest.raises(ModelError, match=r"batch\['x'\]: .*for microbatch in batch"):
        batch["x"]


def test_rows_stay_with_their_samples_for_any_split():
    device = torch.device("cpu")
    whole = SampleNumbers(range(3), rows=((2, 0, 4),))
    rest = SampleNumbers(range(2, 3), rows=((4,),))
    assert whole.row_numbers(6, device).tolist() == [0, 2**32, *rest.row_numbers(4, device).tolist()]
    assert whole.row_numbers(3, device).tolist() == [0, 1, 2]
    # Several rows per sample, such as tokens, and patches that a layer merged in pairs.
    assert whole.row_numbers(12, device).tolist() == [n + 2**32 * row for n in range(3) for row in range(4)]
    joined = SampleNumbers((5, 7), rows=((4, 8),))
    assert joined.row_numbers(6, device).tolist() == [5 + 2**32 * row for row in range(2)] + [
        7 + 2**32 * row for row in range(4)
    ]
    none = SampleNumbers(()).row_numbers(0, device)  # a placeholder's tensor without rows
    assert (none.dtype, none.shape) == (torch.int64, (0,))
