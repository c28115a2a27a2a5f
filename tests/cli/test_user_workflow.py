"""A new user's workflow: train a base, export it, fine-tune it on two ranks, continue on one, merge, and generate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from weft import env
from weft.monitor.events import read_events

pytestmark = pytest.mark.full

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

WORDS = ["warp", "weft", "loom", "thread", "cloth"]
SMALL = ["launch.device=cpu", "eval.every=0", "eval.batches=1", "sample.prompt=", "train.global_batch=4",
         "data.holdout=0.1", "schedule.warmup_steps=1", "schedule.kind=constant"]  # fmt: skip
PROMPTS = ("warp 3?", "weft loom", "What is thread 12?")
NUM_TOKENS = 24


def weft(*words: object) -> str:
    """Return the output of a command in a separate process, which must succeed."""
    line = [sys.executable, "-m", "weft", *map(str, words)]
    ended = subprocess.run(line, env=env.child_env(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def generated(folder: Path, prompt: str) -> str:
    """Return what transformers generates after a prompt at temperature 0."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    read = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    found = model.generate(**read, max_new_tokens=NUM_TOKENS, do_sample=False)
    return prompt + tokenizer.decode(found[0, read["input_ids"].shape[1] :], skip_special_tokens=True)


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(run / "events.jsonl") if event["event"] == "step"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """Create a folder with the exported base and its adapter: three steps on two ranks, three more on one."""
    here = tmp_path_factory.mktemp("story")
    texts = [" ".join(WORDS[(i * k) % 5] for k in range(1, 40)) for i in range(1, 61)]
    (here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with (here / "chats.jsonl").open("w") as file:
        for one in range(40):
            turns = [("system", "Count."), ("user", f"{WORDS[one % 5]} {one}?"), ("assistant", f"weft {one * one}")]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    places = [f"run.dir={here}", f"data.cache_dir={here / 'cache'}", *SMALL]
    model = ["model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=64",
             "model.max_seq_len=96", "tokenizer.kind=bpe", "tokenizer.vocab_size=300"]  # fmt: skip
    weft("train", *places, *model, f"data.train={here / 'texts.jsonl'}", "run.name=base", "train.steps=20",
         "train.seq_len=32", "optimizer.lr=1e-2", "launch.ranks=1")  # fmt: skip
    weft("export", here / "base", here / "exported")
    words = [*places, f"model.path={here / 'exported'}", f"data.train={here / 'chats.jsonl'}", "train.seq_len=64",
             "optimizer.lr=2e-2", "adapter.rank=4", "adapter.kind=lora", "checkpoint.keep=9"]  # fmt: skip
    weft("train", *words, "run.name=tuned", "train.steps=3", "launch.ranks=2", "plan=dp_shard=2 zero=3")
    shown = weft("train", *words, "run.name=tuned", "train.steps=6", "launch.ranks=1", "plan=dp_replicate=1")
    assert "resumed from step 3 (dp_shard=2 zero=3)" in shown
    weft("train", *words, "run.name=whole", "train.steps=6", "launch.ranks=1", "plan=dp_replicate=1")
    return here


def test_resume_with_another_number_of_ranks_matches_one_run(tuned):
    parts, full = losses(tuned / "tuned"), losses(tuned / "whole")
    assert parts.keys() == full.keys() == set(range(1, 7))
    for step, loss in full.items():
        assert parts[step] == pytest.approx(loss, rel=1e-4), step
    assert full[6] < full[1]


def test_merged_folder_generates_the_same_in_transformers(tuned):
    weft("export", tuned / "tuned", tuned / "merged", "--merge")
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(tuned / "merged", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base, merged = (load_file(tuned / name / "model.safetensors") for name in ("exported", "merged"))
    changed = {name for name, tensor in merged.items() if not tensor.equal(base[name])}
    assert changed
    assert all("_proj" in name for name in changed)  # norms, embedding and head are unchanged
    options = ["--raw", "--temperature", "0", "--max-tokens", NUM_TOKENS]
    for prompt in PROMPTS:
        theirs = generated(tuned / "merged", prompt)
        assert weft("generate", tuned / "tuned", "--prompt", prompt, *options).strip() == theirs.strip(), prompt


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_quantized_base_resumes_under_another_plan_and_generates(tuned, base):
    words = [f"run.dir={tuned}", f"data.cache_dir={tuned / 'cache'}", *SMALL, f"model.path={tuned / 'exported'}",
             f"data.train={tuned / 'chats.jsonl'}", "train.seq_len=64", "optimizer.lr=2e-2", "adapter.rank=4",
             f"adapter.base={base}", "checkpoint.keep=9"]  # fmt: skip
    name = f"run.name={base}"
    weft("train", *words, name, "train.steps=2", "launch.ranks=2", "plan=dp_shard=2 zero=3")
    shown = weft("train", *words, name, "train.steps=4", "launch.ranks=1", "plan=dp_replicate=1")
    assert "resumed from step 2 (dp_shard=2 zero=3)" in shown
    weft("train", *words, f"run.name={base}_whole", "train.steps=4", "launch.ranks=1", "plan=dp_replicate=1")
    parts, full = losses(tuned / base), losses(tuned / f"{base}_whole")
    assert parts == pytest.approx(full, rel=1e-4)
    weft("export", tuned / base, tuned / f"{base}_merged", "--merge")
    options = ["--raw", "--temperature", "0", "--max-tokens", NUM_TOKENS]
    theirs = generated(tuned / f"{base}_merged", PROMPTS[0])
    assert weft("generate", tuned / base, "--prompt", PROMPTS[0], *options).strip() == theirs.strip()
