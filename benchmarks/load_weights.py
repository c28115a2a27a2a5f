"""Bytes read and memory per rank where two ranks load a pretrained folder, beside `from_pretrained`.

    python benchmarks/load_weights.py FOLDER [PLAN ...] [--rounds N] [--bf16]

FOLDER: of a Hugging Face model; PLAN: such as tp=2. A rank's share are the weights that it trains: of bf16 the fp32
masters, and the bf16 weights where they stay (under zero=3 each use gathers them).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections import defaultdict
from pathlib import Path

from torch import Tensor

from weft.verify.rank_pool import RankPool


def load(plan_text: str, folder: str) -> tuple[float, ...]:
    """Return a rank's share, bytes read and growth of peak memory (MiB), and time and processor time (s)."""
    from weft.comm.mesh import build_mesh
    from weft.config.plan import Plan
    from weft.models.decoder import as_shapes
    from weft.models.inspect import hugging_face
    from weft.parallel.parallelize import parallelize
    from weft.parallel.state.gradients import data_parallel
    from weft.train.weights.published_weights import pretrained_source

    mesh = build_mesh(Plan.parse(plan_text))
    with as_shapes(vectors=True):
        model = hugging_face.causal_model(hugging_face.load_model_config(Path(folder)))
    before, clocks = _peak(), _clocks()
    source, _ = pretrained_source(model, Path(folder))
    parallelize(model, mesh, filled_later=True)
    data_parallel(model).load_weights(source)
    seconds = _since(clocks)
    flats = [one.flat for one in data_parallel(model).model_slices()]
    own = {flat.untyped_storage().data_ptr() for flat in flats}
    beside = [param for param in model.parameters() if type(param.data) is Tensor and _place(param) not in own]
    share = sum(one.nbytes for one in (*flats, *beside))
    return share / 2**20, source.num_bytes_read / 2**20, _peak() - before, *seconds


def _place(param: Tensor) -> int:
    return param.untyped_storage().data_ptr()


def load_whole(folder: str, dtype: str) -> tuple[float, ...]:
    """Return what `load` returns, of `from_pretrained`. Nothing counts the bytes that it reads."""
    import torch
    import transformers

    before, clocks = _peak(), _clocks()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():  # mapped pages count, and are read, once they are touched
        touched = float(sum(param.sum() for param in model.parameters()))
    assert touched == touched
    seconds = _since(clocks)
    held = sum(param.numel() * param.element_size() for param in model.parameters())
    return held / 2**20, float("nan"), _peak() - before, *seconds


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(clocks: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - clocks[0], time.process_time() - clocks[1]


def main() -> None:
    """Print a line for each plan and rank: medians over rounds; each load has processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a Hugging Face model")
    parser.add_argument("plans", nargs="*", default=["tp=2", "pp=2 microbatches=2", "dp_shard=2 zero=3"])
    parser.add_argument("--rounds", type=int, default=1, help="loads of each kind, one after the other")
    parser.add_argument("--bf16", action="store_true", help="in bf16, in place of fp32")
    asked = parser.parse_args()
    dtype, words = ("bfloat16", " precision=bf16") if asked.bf16 else ("float32", "")
    found = defaultdict[tuple[str, int], list[tuple[float, ...]]](list)
    for _ in range(asked.rounds):
        with RankPool(1) as pool:
            found["from_pretrained", 0] += pool.run(load_whole, asked.folder, dtype)
        for plan in asked.plans:
            with RankPool(2) as pool:
                for rank, figures in enumerate(pool.run(load, plan + words, asked.folder)):
                    found[plan, rank].append(figures)
    for (plan, rank), rounds in found.items():
        share, num_read, peak, seconds, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{plan:20} rank {rank}: share {share:7.1f} MiB, {num_read:7.1f} MiB read, peak +{peak:7.1f} MiB "
            f"({peak / share:.3f}), {seconds:.2f} s, {processor:.2f} s of a processor"
        )


if __name__ == "__main__":
    main()
