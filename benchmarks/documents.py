"""Packed documents in a Llama of transformers: a step with borders beside one with transformers' mask, in turns.

    python benchmarks/documents.py [--tokens 2048] [--documents 8] [--rounds 7]

One process of one thread, fp32, 4 layers of width 256, forward and backward of one sequence. Prints processor seconds
(medians) and the median ratio. `documents=1` is a sequence without a border, which transformers looks for all the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.layers.documents import borders_of
from weft.parallel.parallelize import parallelize


def main() -> None:
    """Time both in turns; the first round warms up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=options.tokens,
    )  # fmt: skip
    model = parallelize(transformers.AutoModelForCausalLM.from_config(config), build_mesh(Plan()))
    length, place_1T = options.tokens // options.documents, torch.arange(options.tokens)[None]
    batch = {"input_ids": torch.randint(4096, place_1T.shape), "positions": place_1T % length}
    if options.documents > 1:
        batch["document_starts"] = torch.arange(0, options.tokens, length)[None]

    def step(given: dict[str, torch.Tensor]) -> float:
        begun = time.process_time()
        found = model(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=False, **given)
        found.logits.logsumexp(-1).sum().backward()
        model.zero_grad()
        return time.process_time() - begun

    rounds = [(step({}), step(borders_of(model, batch))) for _ in range(options.rounds + 1)][1:]
    mask, borders = (statistics.median(one) for one in zip(*rounds, strict=True))
    ratio = statistics.median(ours / theirs for theirs, ours in rounds)
    print(json.dumps({"mask_s": round(mask, 3), "borders_s": round(borders, 3), "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
