from __future__ import annotations

import hashlib
import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weft.checkpoint.load import load_checkpoint, verify_checkpoint
from weft.checkpoint.save import save_checkpoint
from weft.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(loaded: torch.Tensor, saved: torch.Tensor) -> None:
    assert (loaded.dtype, loaded.shape) == (saved.dtype, saved.shape)
    assert bits(loaded) == bits(saved.detach().resolve_conj())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 7)], ids=str)
def test_every_dtype_and_shape_round_trips_bitwise(tmp_path, dtype, shape):
    tensor = (
        torch.randint(0, 2, (math.prod(shape) * 8,), dtype=torch.uint8)[: math.prod(shape)].to(dtype).reshape(shape)
    )
    path = save_checkpoint(tmp_path, 1, {"model": {"x": tensor, "odd": torch.ones(3, dtype=torch.int8)}}, {})
    assert verify_checkpoint(path) == []
    assert_same(load_checkpoint(path).tensors("model")["x"], tensor)


def test_nonfinite_and_denormal_bits_are_preserved(tmp_path):
    tensor = torch.tensor([math.nan, -math.inf, -0.0, 1e-45, 3.4e38])
    path = save_checkpoint(tmp_path, 1, {"model": {"x": tensor}}, {})
    assert_same(load_checkpoint(path).tensors("model")["x"], tensor)


def test_strided_parameters_and_conjugates(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "every_other": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": nn.Parameter(base.clone()),
        "conjugate": torch.complex(base, base + 1).conj(),
        "reversed": base.flip(0),
    }
    path = save_checkpoint(tmp_path, 1, {"model": tensors}, {})
    loaded = load_checkpoint(path).tensors("model")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_tied_tensors_are_stored_once_and_loaded_tied(tmp_path):
    weight = torch.randn(40, 30)
    tensors = {"embed.weight": weight, "head.weight": weight, "copy": weight.clone(), "part": weight[:2]}
    path = save_checkpoint(tmp_path, 1, {"model": tensors}, {})
    on_disk = load_file(path / "model.safetensors")
    assert set(on_disk) == {"embed.weight", "copy", "part"}
    loaded = load_checkpoint(path).tensors("model")
    assert set(loaded) == set(tensors)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_temporary_tensors_are_not_treated_as_tied(tmp_path):
    class Gathering(dict):
        """Create each tensor on access, so that the next may get the address of the last."""

        def keys(self):
            return ["a", "b", "c"]

        def __getitem__(self, name):
            return torch.full((1000,), float(ord(name)))

        def __iter__(self):
            return iter(self.keys())

        def items(self):
            return ((name, self[name]) for name in self.keys())

    path = save_checkpoint(tmp_path, 1, {"model": Gathering()}, {})
    loaded = load_checkpoint(path).tensors("model")
    assert [loaded[name][0].item() for name in "abc"] == [97, 98, 99]


def test_empty_tensors_are_never_tied(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": {"a": torch.zeros(0, 2), "b": torch.zeros(0, 2)}}, {})
    assert "same_as" not in (path / "manifest.json").read_text()


def test_equal_views_of_different_shape_are_not_tied(tmp_path):
    base = torch.arange(6.0)
    path = save_checkpoint(tmp_path, 1, {"model": {"a": base, "b": base.view(2, 3), "c": base.view(torch.int32)}}, {})
    loaded = load_checkpoint(path).tensors("model")
    assert (loaded["b"].shape, loaded["c"].dtype) == ((2, 3), torch.int32)


def test_large_groups_are_split_into_several_files(tmp_path):
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(10)}
    tensors["tied"] = tensors["w0"]
    path = save_checkpoint(
        tmp_path, 1, {"model": tensors, "optimizer": {"one": torch.ones(1000)}}, {}, max_file_bytes=1000
    )
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)] + ["optimizer.safetensors"]
    assert verify_checkpoint(path) == []
    loaded = load_checkpoint(path).tensors("model")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_files_are_aligned_and_readable_by_safetensors(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.ones(3).double(),
    }
    path = save_checkpoint(tmp_path, 1, {"model": tensors}, {})
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: entry["data_offsets"][0] for name, entry in header.items()} == {"c": 0, "b": 24, "a": 30}
    for name, tensor in load_file(path / "model.safetensors").items():
        assert_same(tensor, tensors[name])


def test_folder_contains_only_safetensors_json_and_commit(tmp_path):
    path = save_checkpoint(tmp_path, 120, {"model": {"w": torch.ones(2)}, "optimizer": {}}, {"lr": 0.1})
    assert path == tmp_path / "step_00000120"
    assert sorted(file.name for file in path.iterdir()) == [
        "COMMIT",
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]
    manifest = (path / "manifest.json").read_bytes()
    assert (path / "COMMIT").read_text() == hashlib.sha256(manifest).hexdigest() + "\n"
    entry = json.loads(manifest)["files"]["model.safetensors"]
    assert entry["sha256"] == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert load_checkpoint(path).tensors("optimizer") == {}


def test_equal_content_gives_equal_bytes(tmp_path):
    paths = []
    for run in ("a", "b"):
        tensors = {"model": {"w": torch.arange(9.0)}, "optimizer": {"m": torch.zeros(2)}}
        paths.append(save_checkpoint(tmp_path / run, 7, tensors, {"x": 1}))
    assert (paths[0] / "COMMIT").read_bytes() == (paths[1] / "COMMIT").read_bytes()


def test_saving_a_step_again_replaces_it(tmp_path):
    first = save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(2)}}, {"tag": 1})
    second = save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(3)}}, {"tag": 2})
    assert first == second
    loaded = load_checkpoint(second, verify=True)
    assert (loaded.state, loaded.tensors("model")["w"].tolist()) == ({"tag": 2}, [1, 1, 1])


def test_loaded_checkpoint_outlives_its_folder(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(20_000)}}, {"tag": 1})
    weight = load_checkpoint(path).tensors("model")["w"]
    save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(20_000)}}, {"tag": 2})
    assert weight.sum() == 0
    weight += 5  # private to this process: the file is unchanged
    assert load_checkpoint(path, verify=True).tensors("model")["w"].sum() == 20_000


def test_saving_does_not_change_or_detach_the_training_state(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path, 1, {"model": dict(model.named_parameters())}, {})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"Model": {}}, "tensors: 'Model' cannot name a group. Use lower-case letters, digits and '_'."),
        ({"../x": {}}, "tensors: '../x' cannot name a group. Use lower-case letters, digits and '_'."),
        ({"model": {"__metadata__": torch.ones(1)}}, "tensors.model: '__metadata__' cannot name a tensor. Rename it."),
        ({"model": {"a\ud800": torch.ones(1)}}, "tensors.model: 'a\\ud800' cannot name a tensor. Rename it."),
        ({"model": {"a": 3.0}}, "model.a: a float is not a tensor. Put plain values in `state`."),
        (
            {"model": {"a": torch.ones(1, dtype=torch.complex128)}},
            "model.a: dtype torch.complex128 cannot be stored. Convert it, for example to float32.",
        ),
        (
            {"model": {"a": torch.ones(1, device="meta")}},
            "model.a: a torch.strided on meta has no storage. Gather it to a plain tensor first.",
        ),
        (
            {"model": {"a": torch.ones(2).to_sparse()}},
            "model.a: a torch.sparse_coo on cpu has no storage. Gather it to a plain tensor first.",
        ),
    ],
)
def test_unsupported_values_are_rejected_and_nothing_is_written(tmp_path, tensors, message):
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "run", 1, tensors, {})
    assert str(caught.value) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", 10**15])
def test_step_must_be_a_nonnegative_integer(tmp_path, step):
    with pytest.raises(CheckpointError, match="a checkpoint's step is a whole number, 0 or more"):
        save_checkpoint(tmp_path, step, {}, {})


def test_root_that_is_a_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "runs", 1, {}, {})


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are read from /proc")
def test_each_write_is_synced_before_the_next_depends_on_it(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        done.append(f"sync {os.path.basename(path) if path != str(tmp_path) else 'root'}".split("-")[0])
        fsync(handle)

    def watched_rename(source, target, **options) -> None:
        done.append(f"rename {os.path.basename(target)}")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(1)}}, {})
    saved = [
        "sync model.safetensors", "sync state.json", "sync manifest.json", "sync .tmp",
        "rename step_00000001", "sync root", "sync .COMMIT", "rename COMMIT", "sync step_00000001",
    ]  # fmt: skip
    assert done == saved
    done.clear()
    save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(1)}}, {})
    assert done[:9] == [one.replace("step_00000001", "step_00000001.again") for one in saved]
    assert done[9].startswith("rename step_00000001-")  # The first copy is deleted only after the second is committed.
    assert done[10:] == ["sync root", "rename step_00000001", "sync root"]


def test_dangling_link_instead_of_a_step_is_replaced(tmp_path):
    (tmp_path / "step_00000003").symlink_to(tmp_path / "gone")
    path = save_checkpoint(tmp_path, 3, {"model": {"w": torch.ones(2)}}, {})
    assert not path.is_symlink()
    assert verify_checkpoint(path) == []
