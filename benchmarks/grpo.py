"""Time of a step of task=grpo and of TRL's GRPOTrainer, which generates by transformers, with equal settings.

python benchmarks/grpo.py --python VENV/bin/python [--rounds 3] [--steps 12] [--width 128] [--layers 4] [--new 32]

VENV has Weft and TRL: pip install torch==2.13.0 trl==1.16.0 -e . A Llama with random weights in fp32 on one thread of
the CPU samples 8 completions of 8 prompts in each step, and a function of their token ids gives rewards. Both programs
run in turns, each in a process of its own. The first steps of a process are not counted. The processor time of a
process is less noisy than the clock on a busy machine; it does not include the process of the reward function.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, EACH, PROMPT_WORDS, VOCABULARY, NOT_COUNTED = 8, 8, 24, 2000, 3
REWARD = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def make_work(folder: Path, width: int, layers: int) -> None:
    """Write a model with a tokenizer of words, prompts and a reward function."""
    import random

    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, max_position_embeddings=512, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    lines = [" ".join(f"w{draw.randrange(VOCABULARY - 2)}" for _ in range(PROMPT_WORDS)) for _ in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)


def train_with_trl(work: Path, out: Path, steps: int, new: int) -> list[tuple[float, float]]:
    """Train, and return the clock and the processor time at the end of each step."""
    import datasets
    import transformers
    import trl

    clocks: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clocks.append((time.perf_counter(), time.process_time()))

    found: dict[str, Any] = {}
    exec(REWARD, found)
    settings = trl.GRPOConfig(
        output_dir=str(out), max_steps=steps, learning_rate=1e-5, lr_scheduler_type="constant", use_cpu=True,
        bf16=False, per_device_train_batch_size=PROMPTS * EACH,
        num_generations=EACH, max_completion_length=new, temperature=1.0,
        beta=0.0, loss_type="grpo", weight_decay=0.0, max_grad_norm=1.0, save_strategy="no", report_to=[],
        gradient_checkpointing=False, disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False,
    )  # fmt: skip
    trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype="float32"), args=settings,
        reward_funcs=found["even"], callbacks=[Clock()],
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model", padding_side="left"),
        train_dataset=datasets.load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train",
                                            cache_dir=str(out)),
    ).train()  # fmt: skip
    return clocks


def train_with_weft(work: Path, out: Path, steps: int, new: int) -> list[tuple[float, float]]:
    """Train, and return the clock and the processor time at the end of each step."""
    from weft.config.files import load_config
    from weft.rl.grpo import GrpoTask
    from weft.train.preparation import prepare_run
    from weft.train.rank_run import run_rank

    clocks: list[tuple[float, float]] = []
    after_step = GrpoTask.after_step

    def timed(self: GrpoTask, step: int) -> None:
        after_step(self, step)
        clocks.append((time.perf_counter(), time.process_time()))

    GrpoTask.after_step = timed
    words = [
        "task=grpo", f"model.path={work}/model", f"data.train={work}/prompts.jsonl",
        f"grpo.reward={work}/reward.py:even", f"grpo.completions={EACH}", f"train.global_batch={PROMPTS * EACH}",
        f"grpo.max_tokens={new}",
        f"train.seq_len={PROMPT_WORDS + new}", f"train.steps={steps}", "optimizer.lr=1e-5", "schedule.kind=constant",
        "optimizer.weight_decay=0.0", "optimizer.max_grad_norm=1.0", "launch.device=cpu", f"run.dir={out}",
        "run.name=run", f"data.cache_dir={out}/cache", "checkpoint.every=0",
    ]  # fmt: skip
    prepared = prepare_run(load_config(None, words).config, world_size=1)
    run_rank(prepared.path, None, sys.stderr)
    return clocks


def step_times(options: argparse.Namespace, program: str, work: Path) -> tuple[float, float]:
    """Run a program, and return the median time of a step and its processor time, in seconds."""
    with tempfile.TemporaryDirectory() as out:
        words = [options.python, __file__, "--play", program, str(work), out, str(options.steps), str(options.new)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        subprocess.run(words, env=variables, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        clocks: list[list[float]] = json.loads((Path(out) / "clocks.json").read_text())
    pairs = list(zip(clocks[NOT_COUNTED:], clocks[NOT_COUNTED + 1 :], strict=False))
    wall, processor = (statistics.median(after[at] - before[at] for before, after in pairs) for at in (0, 1))
    return wall, processor


def main() -> None:
    """Run both programs in turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of an environment with Weft and TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new", type=int, default=32, help="largest number of tokens of a completion")
    parser.add_argument("--play", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        program, work, out, steps, new = options.play
        train = train_with_trl if program == "trl" else train_with_weft
        clocks = train(Path(work), Path(out), int(steps), int(new))
        (Path(out) / "clocks.json").write_text(json.dumps(clocks))
        return
    if subprocess.run([options.python, "-c", "import trl"], capture_output=True, check=False).returncode:
        print(f"{options.python} has no TRL. Install it there with: pip install trl==1.16.0")
        return
    times: dict[str, list[tuple[float, float]]] = {"weft": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        make_work(Path(folder), options.width, options.layers)
        for number in range(options.rounds):
            for program in ("weft", "trl") if number % 2 else ("trl", "weft"):
                times[program].append(step_times(options, program, Path(folder)))
    for program, found in times.items():
        wall, processor = (statistics.median(one[at] for one in found) for at in (0, 1))
        print(f"{program:5} {1000 * wall:7.0f} ms a step, {1000 * processor:7.0f} ms of the processor")
    for at, name in enumerate(("time", "processor time")):
        ratios = [mine[at] / other[at] for mine, other in zip(times["weft"], times["trl"], strict=True)]
        print(f"{name} of weft / trl: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
