"""Speed of generating with streamed weights, compared with offload by accelerate and with weights in memory.

    python benchmarks/streaming.py [FOLDER] [--share 0.25] [--dtype fp32] [--new 8] [--rounds 3] [--threads 1]

FOLDER: of a Hugging Face model; without it, a Llama of 322 million parameters with random weights. Each way continues
the same 16 prompts of 32 tokens. Rounds take turns, and the table has each way's best round. The last lines compare
forwards of 16 rows with the bound: the longer one of reading the same bytes alone and computing in memory.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.generation.streamed import WeightStream
from weft.generation.weight_reader import WeightReader
from weft.inference.open_streamed import open_streamed

ROWS, PROMPT = 16, 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write_llama(folder: Path, dtype: torch.dtype) -> Path:
    """Save a Llama of 322 million parameters with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=20, intermediate_size=2816, vocab_size=32000, num_attention_heads=16,
        num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def in_memory(folder: Path, dtype: torch.dtype) -> Any:
    """Return the folder's model as transformers loads it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def seconds(call: Callable[[], object]) -> float:
    """Return the time of a call."""
    gc.collect()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ways(
    folder: Path, memory: int, asked: argparse.Namespace, work: Path
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each way's name, and a function that generates."""
    import accelerate

    dtype, host = DTYPES[asked.dtype], torch.device("cpu")
    model: Any = open_streamed(folder, memory, asked.dtype)[0]
    size = model.config.vocab_size
    ids = torch.randint(3, size, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    requests = [Request(key, tuple(row)) for key, row in enumerate(ids.tolist())]
    sampling, limits = Sampling(max_tokens=asked.new, temperature=0), Limits(size, rows=ROWS)
    yield "streamed", lambda: generate_batch(model, requests, sampling, limits)
    options: dict[str, Any] = {"max_new_tokens": asked.new, "min_new_tokens": asked.new, "do_sample": False}
    plain = in_memory(folder, dtype)
    yield "in memory", lambda: plain.generate(ids, **options, pad_token_id=0)
    disk = accelerate.disk_offload(in_memory(folder, dtype), str(work / "offload"), execution_device=host)
    yield "disk_offload", lambda: disk.generate(ids, **options, pad_token_id=0)
    cpu = accelerate.cpu_offload(in_memory(folder, dtype), execution_device=host)
    yield "cpu_offload", lambda: cpu.generate(ids, **options, pad_token_id=0)


def read_alone(stream: WeightStream, reader: WeightReader) -> None:
    """Read the weights of all streamed units into memory that is used again, and compute nothing."""
    units = stream.residency.streamed
    memory = torch.empty(max(unit.num_bytes for unit in units), dtype=torch.uint8)
    for unit in units:
        start = 0
        for weight in unit.weights:
            num_bytes = weight.dtype.itemsize * torch.Size(weight.shape).numel()
            reader.fill(weight.name, memory[start : start + num_bytes].view(weight.dtype))
            start += weight.num_bytes


@torch.no_grad()
def print_bound(folder: Path, memory: int, asked: argparse.Namespace) -> None:
    """Print the time of forwards over the longer one of reading alone and computing in memory."""
    from weft.models.inspect import hugging_face
    from weft.train.weights.published_weights import pretrained_source

    model, stream = open_streamed(folder, memory, asked.dtype)
    plain = in_memory(folder, DTYPES[asked.dtype])
    with torch.device("meta"):
        shapes = hugging_face.causal_model(hugging_face.load_model_config(folder))
    reader = WeightReader(pretrained_source(shapes, folder)[0], torch.device("cpu"))
    size = sum(unit.num_bytes for unit in stream.residency.streamed)
    for num_tokens in (1, 8, 32):
        ids = torch.randint(3, 1000, (ROWS, num_tokens))
        found = defaultdict[str, list[float]](list)
        for _ in range(asked.rounds + 1):
            found["streamed"].append(seconds(lambda ids=ids: model(input_ids=ids)))
            found["read"].append(seconds(lambda: read_alone(stream, reader)))
            found["compute"].append(seconds(lambda ids=ids: plain(input_ids=ids)))
        best = {name: min(times[1:]) for name, times in found.items()}
        bound = max(best["read"], best["compute"])
        print(
            f"forward of {ROWS} x {num_tokens:2}: {best['streamed']:.3f} s; read alone {best['read']:.3f} s "
            f"({size / best['read'] / 1e9:.2f} GB/s), computed alone {best['compute']:.3f} s: "
            f"{best['streamed'] / bound:.2f} times the bound"
        )


def main() -> None:
    """Print tokens/s of each way and forwards over the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of a Hugging Face model")
    parser.add_argument("--share", type=float, default=0.25, help="memory over the size of the weights")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--new", type=int, default=8, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--bound-only", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        folder = asked.folder or write_llama(work / "model", DTYPES[asked.dtype])
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        memory = int(size * asked.share)
        print(f"weights {size / 2**20:.0f} MiB, memory {memory / 2**20:.0f} MiB, {asked.threads} threads")
        print_bound(folder, memory, asked)
        if asked.bound_only:
            return
        all_ways = dict(ways(folder, memory, asked, work))
        times = defaultdict[str, list[float]](list)
        for _ in range(asked.rounds + 1):  # the first round is not counted
            for name, generate in all_ways.items():
                times[name].append(seconds(generate))
        best = {name: min(each[1:]) for name, each in times.items()}
        for name, each in times.items():
            rate, ratio = ROWS * asked.new / best[name], best[name] / best["streamed"]
            rounds = ", ".join(f"{one:.2f}" for one in each[1:])
            print(f"{name:12} {rate:7.1f} tokens/s (rounds {rounds} s): streamed is {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
