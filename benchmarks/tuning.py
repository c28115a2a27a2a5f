"""Fine-tuning with an adapter beside TRL, and beside peft in a loop of Accelerate: the same work, in turns.

python benchmarks/tuning.py --python VENV/bin/python [--rounds 3] [--steps 8] [--only sft|dpo] [--ranks 1|2]
python benchmarks/tuning.py --losses                  compares losses with TRL's, all weights trained, one and two ranks

VENV has Weft and the rivals: pip install torch==2.13.0 trl==1.16.0 peft accelerate -e . (what else is installed decides
what transformers imports, so all run in one environment). Ranks on the CPU, one thread each, train
LoRA of rank 16 on all linear layers of a Llama of 57 M random weights: `sft` on chats, `dpo` on pairs with the adapter
switched off as reference. All samples have one length, so no trainer packs or pads. Each is started as users start it,
with torchrun or `weft train`. A process beside them reads the clock when a step is logged, the processor time of
all processes that were started, and the fullest moment of each rank (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

VOCABULARY, WORDS = 16_000, 124
#: Samples of which --losses makes each step, so that the order of the data does not matter.
FEW = 8
RIVALS = {"sft": ("weft", "trl", "accelerate"), "dpo": ("weft", "trl")}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant> {% generation %}"
    "{{ message['content'] }} <end> {% endgeneration %}{% else %}<user> {{ message['content'] }} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_work(folder: Path, few: bool) -> None:
    """Write a model with a tokenizer of words, chats and pairs, by the rivals' own transformers.

    few: FEW samples of different lengths, for --losses; otherwise 256 of one length.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    words = [*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", extra_special_tokens=special[2:]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    draw = random.Random(0)

    def turn(role: str, number: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(f"w{draw.randrange(VOCABULARY - 4)}" for _ in range(number))}

    with (folder / "sft.jsonl").open("w") as chats, (folder / "dpo.jsonl").open("w") as pairs:
        for number in range(FEW if few else 256):
            half = WORDS // 2 - 5 * number if few else WORDS // 2
            chats.write(json.dumps({"messages": [turn("user", half), turn("assistant", half)]}) + "\n")
            pair = {"prompt": [turn("user", half)]}
            pair |= {one: [turn("assistant", half)] for one in ("chosen", "rejected")}
            pairs.write(json.dumps(pair) + "\n")


def play(kind: str, rival: str, precision: str, steps: int, rows: int, work: Path, out: Path) -> None:
    """Train as a rival does, on one rank of torchrun; a line a step goes to `out`."""
    import datasets
    import peft
    import transformers

    lora = None
    if rows == 1:
        lora = peft.LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    data = datasets.load_dataset("json", data_files=str(work / f"{kind}.jsonl"), split="train", cache_dir=str(out))
    if rival == "accelerate":
        _accelerate(lora, data, precision, steps, work, out)
        return
    import trl

    class Told(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and "loss" in logs:
                _tell(out, float(logs["loss"]))

    common = {
        "output_dir": str(out / "trl"), "max_steps": steps, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "bf16": precision == "bf16", "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "gradient_checkpointing": False, "max_length": WORDS + 4, "disable_tqdm": True, "weight_decay": 0.0,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "bfloat16" if precision == "bf16" else "float32"},
    }  # fmt: skip
    if kind == "sft":
        settings = trl.SFTConfig(**common, per_device_train_batch_size=rows, assistant_only_loss=True)
        make: Any = trl.SFTTrainer
    else:
        settings = trl.DPOConfig(**common, per_device_train_batch_size=rows, beta=0.1)
        make = trl.DPOTrainer
    make(
        model=str(work / "model"), args=settings, train_dataset=data, peft_config=lora, callbacks=[Told()],
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model"),
    ).train()  # fmt: skip


def _accelerate(lora: Any, data: Any, precision: str, steps: int, work: Path, out: Path) -> None:
    """The loop that Accelerate's pages show, with peft's model."""
    import peft
    import torch
    import transformers
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16" else "no")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")

    def rows(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        made = tokenizer.apply_chat_template(
            [one["messages"] for one in batch], tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            return_tensors="pt", padding=True,
        )  # fmt: skip
        mask = torch.as_tensor(made["assistant_masks"]).bool()
        return {"input_ids": made["input_ids"], "labels": made["input_ids"].masked_fill(~mask, -100)}

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model: Any = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=dtype), lora
    )
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True, collate_fn=rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        if step == steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            _tell(out, loss.item())
    accelerator.end_training()


def _tell(out: Path, loss: float) -> None:
    with (out / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"loss": loss}) + "\n")


def command(options: argparse.Namespace, kind: str, rival: str, precision: str, work: Path, out: Path) -> list[str]:
    """Return what a user types."""
    rows = FEW // options.ranks if options.losses else 1
    ranks = options.ranks
    if rival != "weft":
        torchrun = [options.python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        played = (kind, rival, precision, options.steps, rows, work, out)
        return [*torchrun, __file__, "--play", *map(str, played)]
    adapter = [] if options.losses else ["adapter.rank=16", "adapter.alpha=32"]
    settings = [
        f"model.path={work / 'model'}", f"data.train={work / f'{kind}.jsonl'}", f"run.dir={out}", "run.name=run",
        f"train.seq_len={WORDS + 4}", f"train.global_batch={ranks * rows}", "sample.prompt=",
        f"train.steps={options.steps}", "optimizer.lr=1e-4", "optimizer.betas=[0.9,0.999]",
        "optimizer.weight_decay=0", "schedule.kind=constant", "schedule.warmup_steps=0", "eval.every=0",
        "data.holdout=0", f"plan=dp_replicate={ranks} precision={precision}", f"launch.ranks={ranks}", *adapter,
    ]  # fmt: skip
    return [options.python, "-m", "weft", "train", *settings, "task=prefer" if kind == "dpo" else "data.packing=pad"]


def measure(words: list[str], out: Path, steps: int, threads: int) -> dict[str, float]:
    """Run a command; return seconds to its first step, seconds and processor seconds a step, and MiB of a rank."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with (out / "log.txt").open("w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
        seen: list[tuple[float, float]] = []
        peaks: dict[int, float] = {}
        try:
            while process.poll() is None:
                number = _num_steps(out)
                if number > len(seen):
                    now = time.perf_counter() - began, _processor(process.pid, peaks)
                    seen += [now] * (number - len(seen))
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or len(seen) < steps:
        said = (out / "log.txt").read_text()[-3000:]
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}, {len(seen)} steps\n{said}")
    first = 2  # the steps before warm up
    walls = [late[0] - early[0] for early, late in zip(seen[first - 1 :], seen[first:], strict=False)]
    return {
        "first_step_s": seen[0][0],
        "first_step_cpu_s": seen[0][1],
        "step_s": statistics.median(walls),
        "step_cpu_s": (seen[-1][1] - seen[first - 1][1]) / (len(seen) - first),
        "rank_mib": max(peaks.values()),
    }


def losses(out: Path) -> list[float]:
    """Return the loss of each step that a rival or Weft has logged."""
    own, events = out / "steps.jsonl", out / "run" / "events.jsonl"
    found = map(json.loads, (own if own.is_file() else events).read_text().splitlines())
    return [one["loss"] for one in found if "loss" in one and (own.is_file() or "step" in one)]


def compare_losses(options: argparse.Namespace, work: Path) -> None:
    """Print the losses of Weft and TRL, where each step takes all samples and trains all weights in fp32."""
    for kind in [options.only] if options.only else [*RIVALS]:
        for options.ranks in (1, 2):
            told = {}
            for rival in ("trl", "weft"):
                with tempfile.TemporaryDirectory() as out:
                    words = command(options, kind, rival, "fp32", work, Path(out))
                    measure(words, Path(out), options.steps, threads=1)
                    told[rival] = losses(Path(out))[: options.steps]
                print(f"{kind} {options.ranks} ranks {rival:5}", *(f"{loss:.6f}" for loss in told[rival]), flush=True)
            apart = max(abs(a - b) / abs(a) for a, b in zip(told["trl"], told["weft"], strict=True))
            print(f"{kind} {options.ranks} ranks, largest relative difference: {apart:.1e}", flush=True)


def _num_steps(out: Path) -> int:
    own, events = out / "steps.jsonl", out / "run" / "events.jsonl"
    if own.is_file():
        return own.read_text().count("\n")
    return (
        sum('"loss"' in line and '"step"' in line for line in events.read_text().splitlines())
        if events.is_file()
        else 0
    )


def _processor(pid: int, peaks: dict[int, float]) -> float:
    """Seconds of processor of a process and all below it; notes the fullest moment of each."""
    import psutil

    total = 0.0
    top = psutil.Process(pid)
    for one in [top, *top.children(recursive=True)]:
        try:
            clock = one.cpu_times()
            total += clock.user + clock.system
            status = Path(f"/proc/{one.pid}/status").read_text()
            peaks[one.pid] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        except (psutil.Error, OSError, IndexError):
            continue
    return total


def main() -> None:
    """Make the work, let everybody do it in turns, and print medians and ratios to the best rival."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of an environment with Weft and the rivals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=[*RIVALS])
    parser.add_argument("--precision", choices=["bf16", "fp32"])
    parser.add_argument("--work", type=Path, help="where model and data stay for another call")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=2)
    parser.add_argument("--losses", action="store_true", help="compare the losses of all-weights training with TRL's")
    parser.add_argument("--play", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        kind, rival, precision, steps, rows, work, out = options.play
        play(kind, rival, precision, int(steps), int(rows), Path(work), Path(out))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if not (work / "sft.jsonl").is_file():
            work.mkdir(parents=True, exist_ok=True)
            make_work(work, few=options.losses)
        if options.losses:
            compare_losses(options, work)
            return
        for kind in [options.only] if options.only else [*RIVALS]:
            for precision in [options.precision] if options.precision else ["fp32", "bf16"]:
                compare(options, kind, precision, work)


def compare(options: argparse.Namespace, kind: str, precision: str, work: Path) -> None:
    """Print what everybody took for one kind of work, and ratios to the best of the others."""
    found = defaultdict[str, list[dict[str, float]]](list)
    for number in range(options.rounds):
        turn = number % len(RIVALS[kind])
        for rival in RIVALS[kind][turn:] + RIVALS[kind][:turn]:
            with tempfile.TemporaryDirectory() as out:
                words = command(options, kind, rival, precision, work, Path(out))
                found[rival].append(measure(words, Path(out), options.steps, threads=1))
                print(f"  {kind} {precision} {rival}: {found[rival][-1]}", file=sys.stderr, flush=True)
    medians = {
        rival: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for rival, rounds in found.items()
    }
    for key in medians["weft"]:
        best = min((one[key], rival) for rival, one in medians.items() if rival != "weft")
        shown = "  ".join(f"{rival} {one[key]:8.2f}" for rival, one in medians.items())
        print(
            f"{kind} {precision} {key:16} {shown}   weft / {best[1]} {medians['weft'][key] / best[0]:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
