"""Peak memory of a rank that generates under a plan, over that of one process: resident memory above the start.

python benchmarks/generating_memory.py                   a Llama of 300 M parameters in fp32, tp=2; needs 6 GB
python benchmarks/generating_memory.py --plan "pp=2" --layers 4
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Request, Sampling
from weft.inference.open_model import open_model
from weft.inference.ranks import inference_plan
from weft.train.states.state_io import gather
from weft.verify.rank_pool import RankPool


def write_model(folder: Path, layers: int) -> int:
    """Write a Llama of width 1024 with random weights and a tokenizer of bytes. Return the number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.inference.models import library_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=2816, vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=library_tokenizer(), eos_token="<|endoftext|>").save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def peak_of(plan: str, folder: str, rows: int) -> list[int]:
    """Generate on this rank, and return the peak bytes above the start of all ranks."""
    mesh = build_mesh(Plan.parse(plan))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    before = psutil.Process().memory_info().rss
    opened = open_model(folder, mesh.plan, mesh)
    requests = [Request(key, tuple(range(1, 33))) for key in range(rows)]
    generate_batch(
        opened.model, requests, Sampling(16, temperature=0), Limits(32000, 2048, rows), together=MeshRanks(opened.mesh)
    )
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return [json.loads(one) for one in gather(mesh, json.dumps(peak - before).encode())]


def main() -> None:
    """Measure both, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="tp=2")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        number = write_model(Path(folder), options.layers)
        peaks = {}
        for plan in ("", options.plan):
            settled = inference_plan(Plan.parse(plan))[0]
            with RankPool(settled.world_size, timeout_s=600) as pool:  # one process is fresh too
                peaks[plan] = max(pool.run(peak_of, settled.format(), folder, options.rows)[0])
            size = f"{number / 1e6:.0f} M parameters"
            print(f"{plan or 'one process':24} {peaks[plan] / 2**20:8.0f} MiB of a rank, {size}")
        print(f"{options.plan} / one process: {peaks[options.plan] / peaks['']:.2f}")


if __name__ == "__main__":
    main()
