"""Models whose weights are read from files during the forward: equal to models in memory, and within their memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.models import families
from tools.small_configs import small_config
from weft.checkpoint.pretrained import Joined, JoinedTensors, stored_weights
from weft.errors import CheckpointError, ModelError, WeftError
from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.generation.streamed import WeightStream, stream_weights
from weft.inference.open_streamed import open_streamed
from weft.units import parse_bytes

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
#: Stacked experts, state-space blocks, tied and untied heads, learned positions.
QUICK = ("llama", "gpt2", "mixtral", "mamba2")
MORE = (
    "qwen3_moe", "gemma3_text", "falcon_h1", "opt", "bloom", "gpt_oss", "zamba2", "jamba", "deepseek_v3", "phi3",
    "granitemoe", "falcon", "qwen3_next", "olmoe", "fuyu",
)  # fmt: skip


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, tied: bool | None = None) -> Path:
    """Write a small model of a family with four blocks, in several files."""
    config = small_config(kind, families()[kind][0])
    if kind in QUICK:
        config.num_hidden_layers = 4
    if tied is not None:
        config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def least_memory(folder: Path, dtype: str | None = None) -> int:
    """Return the least memory that the error for too little of it names."""
    with pytest.raises(ModelError, match="needs at least") as error:
        open_streamed(folder, 1, dtype)
    found = re.search(r"at least ([\d.]+ \w+):", str(error.value))
    assert found is not None
    return parse_bytes(found[1])


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def check_equal(folder: Path, dtype: str = "fp32", memory_bytes: int = 0) -> WeightStream:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[dtype]
    want = logits(theirs(folder, kind))
    model, stream = open_streamed(folder, memory_bytes or least_memory(folder, dtype), dtype)
    with stream:
        for _ in range(3):
            assert torch.equal(logits(model), want)
    return stream


@pytest.mark.parametrize("kind", QUICK)
def test_streamed_logits_equal_those_of_the_model_in_memory(kind, tmp_path):
    stream = check_equal(saved(kind, tmp_path))
    assert len(stream.residency.streamed) >= 4
    assert stream.report.num_forwards == 3
    assert stream.report.bytes_read >= 3 * sum(unit.num_bytes for unit in stream.residency.streamed) * 0.9


@pytest.mark.full
@pytest.mark.parametrize("kind", MORE)
def test_more_families(kind, tmp_path):
    check_equal(saved(kind, tmp_path))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
def test_weights_are_converted_to_the_dtype(tied, dtype, tmp_path):
    check_equal(saved("llama", tmp_path, torch.bfloat16 if dtype != "bf16" else torch.float32, tied), dtype)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.1])
@pytest.mark.parametrize("tied", [True, False])
def test_any_memory_gives_the_same_within_it(tied, share, tmp_path):
    folder = saved("llama", tmp_path, tied=tied)
    total = sum(one.numel() * 4 for file in folder.glob("*.safetensors") for one in load_file(file).values())
    stream = check_equal(folder, memory_bytes=max(int(total * share), least_memory(folder)))
    assert stream.residency.total_bytes <= max(int(total * share), least_memory(folder))
    assert bool(stream.residency.streamed) == (share < 1)


def test_generated_texts_equal_those_of_the_model_in_memory(tmp_path):
    folder = saved("llama", tmp_path)
    requests = [Request(key, tuple(range(1, 4 + key % 3))) for key in range(5)]
    sampling, limits = Sampling(max_tokens=6, seed=3), Limits(61, rows=3)
    want = generate_batch(theirs(folder), requests, sampling, limits)
    model, stream = open_streamed(folder, least_memory(folder))
    with stream:
        assert generate_batch(model, requests, sampling, limits) == want


def test_experts_in_float64(tmp_path):
    folder = saved("mixtral", tmp_path)
    plain = theirs(folder, torch.float64)
    plain.set_experts_implementation("eager")
    model, stream = open_streamed(folder, least_memory(folder, "fp64"), "fp64")
    with stream:
        assert torch.equal(logits(model), logits(plain))


def test_host_memory_as_the_source_keeps_everything_on_a_cpu(tmp_path):
    folder = saved("llama", tmp_path)
    model, stream = open_streamed(folder, 1, from_host=True)
    assert not stream.residency.streamed
    assert torch.equal(logits(model), logits(theirs(folder)))


#: For two of the chain's blocks, which have 320 bytes each with alignment.
MEMORY = 2 * 320 + 64


class _Chain(nn.Module):
    """Blocks that are called in an order that the test sets."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count))
        self.order: list[int] = []

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x_BD = self.layers[index](x_BD)
        return x_BD


def chain(folder: Path, count: int = 5) -> tuple[_Chain, _Chain, JoinedTensors]:
    """Return a model in memory, the same on the meta device, and its stored weights."""
    torch.manual_seed(0)
    want, shapes = _Chain(count), _Chain(count).to("meta")
    save_file(want.state_dict(), folder / "model.safetensors", {"format": "pt"})
    stored = stored_weights(folder)
    return want, shapes, JoinedTensors(stored, {name: Joined.of(name, one) for name, one in stored.entries.items()})


@torch.no_grad()
def test_blocks_in_another_order_skipped_or_repeated(tmp_path):
    want, model, source = chain(tmp_path)
    x_BD = torch.randn(2, 8)
    with stream_weights(model, source, MEMORY):
        for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1], [3, 3, 3], [0, 1, 2, 3, 4], [2, 4, 1, 4, 2], []):
            want.order = model.order = order
            assert torch.equal(model(x_BD), want(x_BD)), order


@torch.no_grad()
def test_an_error_in_a_block_leaves_the_model_usable(tmp_path):
    want, model, source = chain(tmp_path)
    want.order = model.order = [0, 1, 2, 3, 4]
    x_BD = torch.randn(2, 8)
    with stream_weights(model, source, MEMORY):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 7))
            assert torch.equal(model(x_BD), want(x_BD))
    with pytest.raises(ModelError, match=r"weights are closed\. Open the model again"):
        model(x_BD)


@torch.no_grad()
def test_part_of_a_block_outside_its_forward_is_refused(tmp_path):
    _, model, source = chain(tmp_path)
    with stream_weights(model, source, MEMORY), pytest.raises(ModelError, match=r"'layers\.2' outside that block"):
        model.layers[2][0](torch.randn(2, 8))


@torch.no_grad()
def test_files_that_shrink_or_change_are_an_error_each_time(tmp_path):
    _, model, source = chain(tmp_path)
    model.order = [0, 1, 2, 3, 4]
    with stream_weights(model, source, MEMORY):
        model(torch.randn(2, 8))
        os.truncate(tmp_path / "model.safetensors", 600)
        errors = []
        for _ in range(5):
            try:
                model(torch.randn(2, 8))
            except CheckpointError as error:
                errors.append(str(error))
        assert len(errors) >= 4  # the first forward may use blocks that were read before
        assert all(re.search(r"truncated\. Download the folder again\.$", error) for error in errors)


@torch.no_grad()
def test_weights_that_are_not_finite_are_named_when_they_are_read(tmp_path):
    folder = saved("llama", tmp_path)
    name = "model.layers.2.mlp.up_proj.weight"
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    weights = load_file(file)
    weights[name][1, 1] = float("nan")
    save_file(weights, file, {"format": "pt"})
    model, stream = open_streamed(folder, least_memory(folder))
    with stream, pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' .* not finite"):
        model(input_ids=IDS)


def test_invalid_ids_are_an_error_as_in_torch(tmp_path):
    folder = saved("llama", tmp_path)
    model, stream = open_streamed(folder, least_memory(folder))
    with stream:
        for wrong in (61, -1):
            with pytest.raises(IndexError, match="out of range"):
                model(input_ids=torch.tensor([[wrong]]))


def _shorten(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 5)


def _lie(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "wanted"),
    [
        (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "is missing. Download the folder again"),
        (_shorten, r"Download model-.* again"),
        (_lie, r"its header has no length.*Download model-.* again"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "cannot be read"),
    ],
)
def test_damaged_folders_are_one_sentence(harm, wanted, tmp_path):
    folder = saved("llama", tmp_path)
    harm(folder)
    with pytest.raises(WeftError, match=wanted) as error:
        open_streamed(folder, 2**30)
    assert "\n" not in str(error.value)


def test_unknown_dtype_and_folder_of_another_kind(tmp_path):
    folder = saved("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"dtype=int3: .* Use fp32, bf16"):
        open_streamed(folder, 2**30, "int3")
    with pytest.raises(ModelError, match="there is no such folder"):
        open_streamed(tmp_path / "none", 2**30)
    transformers.ViTConfig(num_hidden_layers=1).save_pretrained(tmp_path / "vit")
    with pytest.raises(ModelError, match="no causal language model"):
        open_streamed(tmp_path / "vit", 2**30)


#: Opens a folder within a memory limit, and prints the growth of peak memory over the first forwards.
_MEASURE = """
import json, sys, torch
from pathlib import Path
from weft.inference.open_streamed import open_streamed
from weft.checkpoint.safetensors_files import RangedTensors
def read(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024
folder, memory = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
ids = torch.arange(8).view(2, 4)
with torch.no_grad():  # the libraries' own memory
    _, small = open_streamed(Path(sys.argv[3]), 2**30)
    _(input_ids=ids)
    # The buffers of the matrix library depend on the sizes, too.
    sizes, dtype = json.loads((folder / "config.json").read_text()), _.lm_head.weight.dtype
    for width in (sizes["hidden_size"], sizes["intermediate_size"]):
        rows = torch.ones(8, width, dtype=dtype)
        torch.nn.functional.linear(rows, torch.ones(sizes["hidden_size"], width, dtype=dtype))
small.close()
before = read("VmRSS")
model, stream = open_streamed(folder, memory)
with torch.no_grad():
    for _ in range(2):
        model(input_ids=ids)
print(read("VmHWM") - before, stream.residency.total_bytes, len(stream.residency.streamed), stream.report.line())
"""


def check_peak(folder: Path, width: int, layers: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Stream a model with memory for a quarter of its weights, and compare the process's peak with the limit."""
    heads = width // 64
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=2816 * width // 1024, vocab_size=vocabulary,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.01)
    size = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(folder / "model", max_shard_size="200MB")
    del model
    small = saved("llama", folder / "small", dtype)
    words = [sys.executable, "-c", _MEASURE, str(folder / "model"), str(size // 4), str(small)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    peak, planned, streamed = (int(word) for word in done.stdout.split()[:3])
    print(f"weights {size >> 20} MiB, limit {size >> 22} MiB, peak {peak >> 20} MiB, planned {planned >> 20} MiB")
    assert 0.7 * planned < peak <= size // 4, done.stdout
    assert planned <= size // 4
    assert streamed > layers * 0.6


def test_peak_memory_is_within_the_limit(tmp_path):
    check_peak(tmp_path, 512, 20, 4000, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_of_300_million_parameters_is_within_the_limit(tmp_path, dtype):
    check_peak(tmp_path, 1024, 20, 32000, dtype)
