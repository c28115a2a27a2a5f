"""How level ranks share the work of an encoder, and what one call for all pictures saves.

python benchmarks/encoders.py level FOLDER     # pictures of a folder, e.g. Debian's tuxpaint-stamps-default, unpacked
python benchmarks/encoders.py calls            # Qwen2-VL's tower: operations, graphs and processor time

`level` counts costs and runs no model: a step draws pictures at random for four ranks, and each rank encodes its own
("as drawn"), or those that `spread:data` deals it. Level is the mean of the ranks' work over the largest.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

RANKS, STEPS = 4, 200
#: Pictures of a rank in a step.
COUNTS = (4, 8, 16)
#: Of Qwen2-VL-2B's tower: pixels of a side of two merged patches, most patches of a picture, parameters, width, blocks.
UNIT, MOST, PARAMS, WIDTH, DEPTH = 28, 4096, 665_000_000, 1280, 32


def patches_of(folder: Path, most: int) -> list[int]:
    """Patches of each picture: its sides in units, four patches each, made smaller where they are too many."""
    from PIL import Image

    found: list[int] = []
    for file in sorted(folder.rglob("*.png")) + sorted(folder.rglob("*.jpg")):
        with Image.open(file) as image:
            width, height = image.size
        share = min(1.0, (most * UNIT**2 / 4 / (width * height)) ** 0.5)
        found.append(4 * max(1, round(width * share / UNIT)) * max(1, round(height * share / UNIT)))
    return found


def level(folder: Path, most: int) -> None:
    """Print how level the ranks' work is."""
    from weft.parallel.layers.distributed_encoders import ItemCost, assign_items

    patches, cost = patches_of(folder, most), ItemCost(2.0 * PARAMS, 4.0 * WIDTH * DEPTH)
    print(f"{len(patches)} pictures of {min(patches)} to {max(patches)} patches, {RANKS} ranks, {STEPS} steps")
    draw = random.Random(0)
    for each in COUNTS:
        drawn, dealt = list[float](), list[float]()
        for _ in range(STEPS):
            costs = [cost(rows, rows) for rows in draw.choices(patches, k=RANKS * each)]
            homes = [item // each for item in range(len(costs))]
            own = [sum(costs[rank * each : (rank + 1) * each]) for rank in range(RANKS)]
            by_cost = [sum(costs[item] for item in items) for items in assign_items(costs, homes, RANKS, 1)]
            for sums, found in ((own, drawn), (by_cost, dealt)):
                found.append(sum(sums) / RANKS / max(sums))
        print(
            f"{each:3} pictures a rank: level {statistics.mean(drawn):.1%} as drawn, "
            f"{statistics.mean(dealt):.1%} by cost"
        )


def calls() -> None:
    """Print operations, graphs of torch.compile, and processor time of forward and backward, one thread."""
    import torch

    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import transformers

    from weft.parallel.layers.encoder_items import attend_by_borders

    def tower() -> torch.nn.Module:
        torch.manual_seed(0)
        vision = {
            "depth": 4, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "patch_size": 8,
            "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3,
        }  # fmt: skip
        text = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text)
        return transformers.Qwen2VLForConditionalGeneration(config).model.visual

    torch.set_num_threads(1)
    models = {"picture by picture": tower(), "by borders": tower()}
    attend_by_borders(models["by borders"])
    for count in (8, 32):
        times = {name: list[float]() for name in models}
        for _ in range(7):
            for name, model in models.items():
                start = time.process_time()
                run(model, count)
                times[name].append(time.process_time() - start)
        for name, model in models.items():
            median, number = statistics.median(times[name]), operations(model, count)
            print(f"{count} pictures, {name}: {number} operations, {median * 1e3:.0f} ms of processor time")
    for name, model in models.items():
        print(f"compiled, {name}: {graphs(model)} graphs for three batches of 4 blocks")


def run(model: Any, count: int) -> None:
    """Forward and backward of so many pictures of 16 to 144 patches."""
    import torch

    sides = 2 * torch.randint(2, 7, (count, 2), generator=torch.Generator().manual_seed(count))
    grids = torch.cat([torch.ones(count, 1, dtype=torch.long), sides], 1)
    model(torch.ones(int(grids.prod(-1).sum()), 192), grid_thw=grids).pooler_output.square().sum().backward()


def operations(model: Any, count: int) -> int:
    """How many operations torch dispatches for that."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    with Count() as counted:
        run(model, count)
    return counted.number


def graphs(model: Any) -> int:
    """How many graphs torch.compile makes of the blocks for batches of 3, 5 and 4 pictures."""
    import torch

    found = list[int]()

    def backend(module, examples):
        found.append(len(examples))
        return module.forward

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=backend)
    for count in (3, 5, 4):
        run(model, count)
    return len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["level", "calls"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--most", type=int, default=MOST, help="patches of the largest picture")
    chosen = parser.parse_args()
    if chosen.what == "calls":
        calls()
    elif chosen.folder is None:
        parser.error("level needs a folder of pictures")
    else:
        level(chosen.folder, chosen.most)
