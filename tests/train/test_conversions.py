"""Folders whose tensors transformers renames, stacks, joins, splits or transposes: reading and writing back."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.models import families, small_config
from weft.checkpoint.pretrained import Computed, Joined, JoinedTensors, stored_weights
from weft.checkpoint.read import Part
from weft.errors import CheckpointError
from weft.models.decoder import as_shapes
from weft.models.inspect import hugging_face
from weft.parallel.state.flat_slices import read_full
from weft.train.tasks.export import as_published
from weft.train.weights.published_weights import pretrained_source

transformers = pytest.importorskip("transformers")
#: One family per storage conversion, with tied tensors and scalars.
CHOSEN = ("mixtral", "qwen3_moe", "hrm_text", "apertus")


def opened(folder: Path):
    with as_shapes(vectors=True):
        model = hugging_face.causal_model(hugging_face.load_model_config(folder))
    return model, *pretrained_source(model, folder)


def saved(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a small model of a family in several files; return what transformers loads from it."""
    config = small_config(kind, families()[kind][0])
    config.tie_word_embeddings = kind == "qwen3_moe"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="30KB")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def check_family(kind: str, folder: Path) -> int:
    """Read and write back one family; return how many tensors transformers had to compute."""
    theirs = saved(kind, folder)
    model, source, unexpected = opened(folder)
    assert unexpected == []
    for name in source.entries:
        assert torch.equal(read_full(source, name), theirs[name]), name
    for name in theirs.keys() - source.entries.keys():
        assert any(theirs[name].data_ptr() == theirs[other].data_ptr() for other in source.entries), name
    files: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files |= load_file(file)
    written = dict(as_published(model, list(source.entries), lambda name: read_full(source, name)))
    assert written.keys() == files.keys()
    for name, block in written.items():
        assert torch.equal(torch.from_numpy(block.values().copy()).view(files[name].shape), files[name]), name
    return sum(isinstance(one, Computed) for one in source.entries.values())


@pytest.mark.parametrize("kind", CHOSEN)
def test_folder_is_read_and_written_as_transformers_does(kind, tmp_path):
    assert check_family(kind, tmp_path) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["gpt_oss",
             "deepseek_v2", "deepseek_v3", "olmoe", "phi3", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "granitemoe",
             "jetmoe", "falcon", "bloom", "gptj", "opt", "phimoe", "minimax", "hunyuan_v1_moe", "dots1", "flex_olmo"]
)  # fmt: skip
def test_more_families_are_read_and_written_as_transformers_does(kind, tmp_path):
    try:
        saved(kind, tmp_path / "try")
    except Exception as error:  # configs with other field names for sizes
        pytest.skip(f"transformers itself: {error}")
    check_family(kind, tmp_path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    tensors = {name: torch.arange(24.0).view(4, 6) + 100 * index for index, name in enumerate("abcd")}
    tensors["scalar"] = torch.tensor(7.0)
    save_file(tensors, folder / "model.safetensors")
    return stored_weights(folder), tensors


def full_tensor(stored, name: str) -> Joined:
    return Joined.of(name, stored.entries[name])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slice_descriptions_match_tensor_operations(stored, data):
    weights, tensors = stored
    joined = [full_tensor(weights, name) for name in "abcd"]
    made = [tensors[name] for name in "abcd"]
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, made[0].dim() - 1))
        kind = data.draw(st.sampled_from(["stack", "cat", "cut", "turn"]))
        if kind == "stack":
            joined, made = [Joined.stacked(joined, dim)], [torch.stack(made, dim)]
        elif kind == "cat":
            joined, made = [Joined.end_to_end(joined, dim)], [torch.cat(made, dim)]
        elif kind == "cut":
            size = made[0].shape[dim]
            low = data.draw(st.integers(0, size - 1))
            high = data.draw(st.integers(low + 1, size))
            joined = [one.row_range(dim, low, high) for one in joined]
            made = [one.narrow(dim, low, high - low) for one in made]
        else:
            other = data.draw(st.integers(0, made[0].dim() - 1))
            joined, made = [one.turned(dim, other) for one in joined], [one.transpose(dim, other) for one in made]
    source = JoinedTensors(weights, {str(index): one for index, one in enumerate(joined)})
    for index, wanted in enumerate(made):
        assert joined[index].shape == tuple(wanted.shape)
        assert torch.equal(read_full(source, str(index)), wanted)
    wanted, dim = made[0], data.draw(st.integers(0, made[0].dim() - 1))
    low = data.draw(st.integers(0, wanted.shape[dim] - 1))
    high = data.draw(st.integers(low + 1, wanted.shape[dim]))
    part = Part(tuple(wanted.shape), dim, ((low, high),))
    line = wanted.narrow(dim, low, high - low).reshape(-1)
    start = data.draw(st.integers(0, line.numel() - 1))
    out = torch.empty(line.numel() - start)
    source.read("0", part, start, out.view(torch.uint8).numpy().data)
    assert torch.equal(out, line[start:])


def test_scalar_is_read(stored):
    weights, _ = stored
    assert read_full(JoinedTensors(weights, {"scalar": full_tensor(weights, "scalar")}), "scalar").item() == 7.0


def test_conversions_without_slice_description_use_transformers(stored):
    weights, tensors = stored
    calls = []

    def make(tensor_of):
        calls.append(1)
        return {"even": tensor_of("a")[::2].contiguous(), "odd": tensor_of("a")[1::2].contiguous()}

    source = JoinedTensors(weights, {name: Computed((2, 6), "F32", name, make) for name in ("even", "odd")})
    assert torch.equal(read_full(source, "even"), tensors["a"][::2])
    for low, high, dim in itertools.product((0, 1), (2,), (0, 1)):
        out = torch.empty(2, 6).narrow(dim, low, high - low).contiguous()
        source.read("odd", Part((2, 6), dim, ((low, high),)), 0, out.view(-1).view(torch.uint8).numpy().data)
        assert torch.equal(out, tensors["a"][1::2].narrow(dim, low, high - low))
    assert len(calls) == 1  # tensors of one computation are consecutive


def test_interleaving_conversion_runs_the_transformers_operation(tmp_path, monkeypatch):
    """Slices cannot describe interleaved rows, so the conversion table's operation runs on full tensors."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("phi3", "Phi3ForCausalLM"))
    table = [WeightConverter("mlp.w13.weight", "mlp.gate_up_proj.weight", [Interleave(dim=0)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: table)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    files = {name.replace("gate_up_proj", "w13"): tensor for name, tensor in load_file(file).items()}
    save_file(files, file, {"format": "pt"})
    _, source, unexpected = opened(tmp_path)
    assert unexpected == []
    names = [name for name, one in source.entries.items() if isinstance(one, Computed)]
    assert names == [f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in range(2)]
    for name in names:
        rows = files[name.replace("gate_up_proj", "w13")]
        assert torch.equal(read_full(source, name), torch.cat([rows[::2], rows[1::2]]))
    save_file({**files, "model.layers.0.mlp.w13.weight": torch.ones(3, 16)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert str(caught.value).startswith(
        "model.path: tensor 'model.layers.0.mlp.gate_up_proj.weight' cannot be put together (Interleave: "
    )
    assert str(caught.value).endswith("Give the config.json that belongs to these weights.")
