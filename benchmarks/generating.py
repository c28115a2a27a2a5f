"""Speed of `generate_batch`, compared with `generate` of transformers in the same run.

python benchmarks/generating.py                   32 prompts of 16 to 256 tokens, 64 new ones each
python benchmarks/generating.py --layers 4 --width 256 --prompts 8
python benchmarks/generating.py --training        on two ranks at zero=3, beside gathering by hand and generate

Transformers pads the prompts of a batch on the left. It is timed with several batch sizes, and the best one counts.
Both generate the same greedy tokens, which is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import weft
from weft.comm.collectives import barrier
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.generation.batch import Limits, generate_batch
from weft.generation.requests import Request, Sampling
from weft.verify.rank_pool import RankPool


def model_of(width: int, layers: int) -> Any:
    """Return a Llama with random weights in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 128,
        intermediate_size=width * 8 // 3 // 64 * 64, vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def by_transformers(model: Any, prompts: list[list[int]], new: int, batch: int) -> list[list[int]]:
    """Continue prompts in batches of `batch`, sorted by length, padded on the left."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        width = max(len(prompts[index]) for index in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(part):
            ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, width - len(prompts[index]) :] = 1
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        for row, index in enumerate(part):
            found[index] = out[row, width:].tolist()
    return found


def by_weft(model: Any, prompts: list[list[int]], new: int, rows: int) -> list[list[int]]:
    """Continue prompts with `rows` rows."""
    requests = [Request(index, tuple(prompt)) for index, prompt in enumerate(prompts)]
    limits = Limits(model.config.vocab_size, model.config.max_position_embeddings, rows)
    done = generate_batch(model, requests, Sampling(max_tokens=new, temperature=0), limits)
    return [list(each.ids) for each in done]


def in_training(width: int, layers: int, prompts: list[list[int]], new: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of both ways on a rank of a model under zero=3. By hand, each rank continues its half."""
    plan = Plan.parse("dp_shard=2 zero=3")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model, rank = run.parallelize(model_of(width, layers)), run.mesh.rank
    plain = model_of(width, layers)
    found: dict[str, list[float]] = {"weft": [], "by hand": []}
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run.generate(model, prompts, max_tokens=new, temperature=0, rows=len(prompts))
        middle = time.perf_counter()
        whole = run.full_state_dict(model, everywhere=True)
        plain.load_state_dict(whole)
        by_transformers(plain, prompts[rank::2], new, len(prompts))
        barrier(run.mesh.world)
        found["weft"].append(middle - began)
        found["by hand"].append(time.perf_counter() - middle)
    return {name: seconds[1:] for name, seconds in found.items()}  # the first includes a check of the model


def main() -> None:
    """Time both, and print tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--training", action="store_true")
    options = parser.parse_args()
    if options.training:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(16, 129, (16,), generator=draw).tolist()
        prompts = [torch.randint(0, 32000, (length,), generator=draw).tolist() for length in lengths]
        with RankPool(2, timeout_s=600) as pool:
            found = pool.run(in_training, options.width, options.layers, prompts, options.new, options.repeats)[0]
        for name, each in found.items():
            print(f"{name:10} {statistics.median(each):6.2f} s")
        print(f"weft / by hand: {statistics.median(found['weft']) / statistics.median(found['by hand']):.2f}")
        return
    model = model_of(options.width, options.layers)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 257, (options.prompts,), generator=draw).tolist()
    prompts = [torch.randint(0, 32000, (length,), generator=draw).tolist() for length in lengths]
    ways: dict[str, Callable[[], list[list[int]]]] = {
        f"transformers, batches of {batch}": lambda batch=batch: by_transformers(model, prompts, options.new, batch)
        for batch in (8, 16, 32)
        if batch <= options.prompts
    }
    ways["weft"] = lambda: by_weft(model, prompts, options.new, options.prompts)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {}
    for _ in range(options.repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            texts[name] = way()
            seconds[name].append(time.perf_counter() - began)
    count = options.prompts * options.new
    speeds = {name: count / statistics.median(each) for name, each in seconds.items()}
    for name, speed in speeds.items():
        same = sum(mine == other for mine, other in zip(texts[name], texts["weft"], strict=True))
        print(f"{name:30} {speed:8.1f} tokens/s   {same} of {options.prompts} texts equal Weft's")
    best = max(speed for name, speed in speeds.items() if name != "weft")
    print(f"weft / best of transformers: {speeds['weft'] / best:.2f}")


if __name__ == "__main__":
    main()
