"""Bytes read and memory per rank where two ranks load a pretrained folder, beside `from_pretrained`.

python benchmarks/load_weights.py FOLDER [PLAN ...]    FOLDER: of a Hugging Face model; PLAN: such as tp=2
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from weft.testing import RankPool


def load(plan_text: str, folder: str) -> tuple[int, float, float]:
    """Return bytes read, the growth of the process's peak memory (MiB) and the time (s) of one load."""
    from weft.mesh import build_mesh
    from weft.models import as_shapes
    from weft.parallel import data_parallel, parallelize
    from weft.spec.plan import Plan
    from weft.structure import hugging_face
    from weft.train.tasks import pretrained_source

    mesh = build_mesh(Plan.parse(plan_text))
    with as_shapes(vectors=True):
        model = hugging_face.causal_model(hugging_face.load_model_config(Path(folder)))
    before, began = _peak(), time.perf_counter()
    source, _ = pretrained_source(model, Path(folder))
    parallelize(model, mesh, filled_later=True)
    data_parallel(model).load_weights(source)
    return source.num_bytes_read, _peak() - before, time.perf_counter() - began


def load_whole(folder: str) -> tuple[float, float]:
    """Return the growth of peak memory (MiB) and the time (s) of `from_pretrained`, in float32."""
    import torch
    import transformers

    before, began = _peak(), time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = float(sum(param.sum() for param in model.parameters()))  # mapped pages count once they are touched
    assert total == total
    return _peak() - before, time.perf_counter() - began


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print a line for each plan; each has processes of its own, whose peak is theirs alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a Hugging Face model")
    parser.add_argument("plans", nargs="*", default=["tp=2", "pp=2 microbatches=2", "dp_shard=2 zero=3"])
    asked = parser.parse_args()
    folder, plans = asked.folder, asked.plans
    for plan in plans:
        with RankPool(2) as pool:
            for rank, (num_bytes, peak, seconds) in enumerate(pool.run(load, plan, folder)):
                print(
                    f"{plan:22} rank {rank}: {num_bytes / 2**20:7.1f} MiB read, peak +{peak:7.1f} MiB, {seconds:.2f} s"
                )
    with RankPool(1) as pool:
        ((peak, seconds),) = pool.run(load_whole, folder)
    print(f"{'from_pretrained':22} peak +{peak:7.1f} MiB, {seconds:.2f} s")


if __name__ == "__main__":
    main()
