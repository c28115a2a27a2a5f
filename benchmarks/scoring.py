"""Speed of scoring texts with `weft eval`, compared with the class `HFLM` of lm-eval in the same run.

python benchmarks/scoring.py                                      1,000 texts, as for a perplexity
python benchmarks/scoring.py --kind loglikelihood                 1,000 completions of prompts
python benchmarks/scoring.py --texts 50 --repeats 1               a short try

Needs the extra `eval`. lm-eval's class is timed with several batch sizes, and the best one counts. Both compute in
float32, and their log-likelihoods are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from weft import env
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.models.inspect.hugging_face import load_tokenizer

BATCHES = (4, 8, 16)


def write_model(folder: Path, width: int, layers: int, vocab: int) -> None:
    """Write a Llama with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        intermediate_size=width * 8 // 3 // 64 * 64, vocab_size=vocab, max_position_embeddings=512, eos_token_id=256,
        bos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    entries = {one: place for place, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Tokenizer(models.BPE(vocab={**entries, "<|endoftext|>": 256}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>").save_pretrained(folder)


def requests_of(kind: str, number: int) -> list[Any]:
    """Return requests of lm-eval: texts of 4 to 60 words, most of them short, or prompts with a completion."""
    from lm_eval.api.instance import Instance

    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randrange(2, 8))) for _ in range(500)]
    texts = [" ".join(draw.choices(words, k=min(60, 4 + int(draw.expovariate(1 / 14))))) for _ in range(number)]
    arguments = [(text, " " + " ".join(draw.choices(words, k=3))) if kind == "loglikelihood" else (text,)
                 for text in texts]  # fmt: skip
    return [Instance(kind, {}, pair, index) for index, pair in enumerate(arguments)]  # pyright: ignore


def main() -> None:
    """Time both, and print texts per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("loglikelihood_rolling", "loglikelihood"), default="loglikelihood_rolling")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    env.default_for_libraries(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    from lm_eval.models.huggingface import HFLM

    from weft.inference.lm_eval_model import MeshLM
    from weft.inference.open_model import open_model

    requests = requests_of(options.kind, options.texts)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write_model(folder, options.width, options.layers, options.vocab)
        plan = Plan()
        ways: dict[str, Any] = {
            f"lm-eval, batches of {number}": HFLM(
                pretrained=str(folder), dtype="float32", device="cpu", batch_size=number
            )
            for number in BATCHES
        }
        ways["weft"] = MeshLM(open_model(folder, plan, build_mesh(plan)), load_tokenizer(folder))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, model in ways.items():
            began = time.perf_counter(), time.process_time()
            results = getattr(model, options.kind)(requests, disable_tqdm=True)
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            found[name] = [one[0] if isinstance(one, tuple) else one for one in results]
    medians = {name: [statistics.median(one) for one in zip(*each, strict=True)] for name, each in seconds.items()}
    for name, (wall, cpu) in medians.items():
        apart = max(abs(one - own) / abs(own) for one, own in zip(found[name], found["weft"], strict=True))
        print(
            f"{name:24} {wall:7.2f} s, {cpu:7.2f} s of CPU  {options.texts / wall:7.1f} texts/s   "
            f"differs from Weft's by {apart:.0e}"
        )
    # Other processes of the machine change the first more than the second.
    for place, what in enumerate(("time", "CPU time")):
        best = min(each[place] for name, each in medians.items() if name != "weft")
        print(f"{what}: best of lm-eval / weft {best / medians['weft'][place]:.2f}")


if __name__ == "__main__":
    main()
