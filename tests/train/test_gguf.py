"""`weft export --gguf`: files that llama.cpp reads, compared with transformers on the exported weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.train.conftest import SMALL
from tests.train.test_export import train
from weft.cli.app import run as weft_run
from weft.errors import CheckpointError, ModelError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from weft.train.weights import gguf_file  # noqa: E402

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "warp weft loom", " I'll say 12345 times!\n\n  Don't\tstop", "héllo wörld 你好", "a<think>b  c", "x<|end|>y z", "",
]  # fmt: skip
QWEN = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
SHAPE = {
    "vocab_size": 448, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
FAMILIES = {
    "llama": ("LlamaConfig", {**SHAPE, "attention_bias": True}, "gpt2"),
    "llama3": ("LlamaConfig", {**SHAPE, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}, "llama3"),
    "mistral": ("MistralConfig", {**SHAPE, "head_dim": 32, "sliding_window": 64}, "sentencepiece"),
    "qwen2": ("Qwen2Config", {**SHAPE, "tie_word_embeddings": True}, "qwen"),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 32}, "qwen"),
    "gemma2": ("Gemma2Config", {**SHAPE, **GEMMA}, "sentencepiece"),
    "gemma3": ("Gemma3TextConfig", {**SHAPE, **GEMMA, "num_hidden_layers": 7}, "sentencepiece"),
    "gpt2": ("GPT2Config", {"vocab_size": 448, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, "gpt2"),
}


IN_GATE = ("llama3", "gemma2", "gpt2")


def sentencepiece() -> Tokenizer:
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    saved = json.loads(library.to_str()) | {"pre_tokenizer": None}
    saved["added_tokens"] = saved["added_tokens"][:3]
    library = Tokenizer.from_str(json.dumps(saved))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def byte_level(kind: str) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    split = pre_tokenizers.Split(Regex(QWEN if kind == "qwen" else LLAMA3), "isolated")
    library.pre_tokenizer = last if kind == "gpt2" else pre_tokenizers.Sequence([split, last])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>", "<s>"], initial_alphabet=BYTES)
    library.train_from_iterator(TEXTS * 3, trainer)
    library.add_tokens(["<think>"])
    if kind == "llama3":
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def built(here: Path, family: str, **changes) -> Path:
    """Write a folder of random weights and return it."""
    name, options, kind = FAMILIES[family]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**options, **changes}))
    with torch.no_grad():
        for name, param in model.named_parameters():
            near = 0.3 * torch.randn_like(param) + ("norm" in name and "gemma" not in family)
            param.copy_(near if param.dim() == 1 else torch.randn_like(param) / param.shape[-1] ** 0.5)
    model.save_pretrained(here)
    library = sentencepiece() if kind == "sentencepiece" else byte_level(kind)
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>" if kind == "sentencepiece" else None}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    tokenizer.save_pretrained(here)
    return here


@pytest.mark.parametrize(
    "family", [one if one in IN_GATE else pytest.param(one, marks=pytest.mark.full) for one in FAMILIES]
)
def test_files_compute_what_the_folder_computes(tmp_path, family):
    folder = built(tmp_path / "folder", family)
    for dtype, most in (("bf16", 3), ("q8_0", 6)):
        file = tmp_path / f"{dtype}.gguf"
        gguf_file.write_gguf(folder, file, dtype, family)
        equal, total = gguf_file.compare_greedy(folder, file, dtype)
        assert total == 24
        assert equal >= total - most
    fields = gguf.GGUFReader(tmp_path / "q8_0.gguf").fields
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.1.attn_norm.weight"] == "F32"
    assert fields["tokenizer.chat_template"].contents().startswith("{% for one in messages")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if FAMILIES[family][2] != "sentencepiece":  # there transformers makes other merges than the file's scores
        read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="q8_0.gguf")
        for text in TEXTS:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert read(text, add_special_tokens=False)["input_ids"] == ids, text
    assert fields["tokenizer.ggml.add_bos_token"].contents() == (tokenizer("a")["input_ids"][0] == 1)


def test_ids_by_scores_equal_ids_by_merges(tmp_path):
    """Merge the pair with the best score first, as llama.cpp does with SentencePiece's tokenizers."""
    folder = built(tmp_path / "folder", "mistral")
    gguf_file.write_gguf(folder, tmp_path / "one.gguf", "fp16", "one")
    fields = gguf.GGUFReader(tmp_path / "one.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
    assert fields["tokenizer.ggml.token_type"].contents()[:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("warp weft loom", " I'll say times!  Don't", "weftloom"):
        pieces = list("▁" + text.replace(" ", "▁"))
        while pairs := [
            (scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores
        ]:
            at = -max(pairs)[1]
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        assert pieces == tokenizer.tokenize(text)


@pytest.mark.parametrize("fault", ["rotary", "norm", "tensor"])
def test_the_check_finds_a_wrong_file(tmp_path, monkeypatch, fault):
    folder, file = built(tmp_path / "folder", "gemma2" if fault == "norm" else "llama"), tmp_path / "one.gguf"
    right = gguf_file._in_gguf

    def wrong(tensor, target, config, arch, turned):
        if fault == "rotary" or (fault == "norm" and "norm" in target):
            return np.ascontiguousarray(tensor.float().numpy())
        return right(tensor, target, config, arch, turned) * (0.9 if "blk.2.ffn_up" in target else 1)

    monkeypatch.setattr(gguf_file, "_in_gguf", wrong)
    gguf_file.write_gguf(folder, file, "fp32", "one")
    with pytest.raises(CheckpointError, match="after export the logits differ"):
        gguf_file.compare_greedy(folder, file, "fp32")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu: llama.cpp's llama computes only silu"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=yarn"),
        ("qwen2", {"rope_parameters": {**LLAMA3_ROPE}}, "rope_type=llama3"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16"),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping=.*None.*computes only both"),
        ("qwen3", {"attention_bias": True}, "llama.cpp's qwen3 has no tensor for .*_proj.bias"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_refuses_what_llama_cpp_does_not_compute(tmp_path, family, change, message):
    folder = built(tmp_path / "folder", family, **change)
    with pytest.raises(ModelError, match=message):
        gguf_file.write_gguf(folder, tmp_path / "one.gguf", "fp16", "one")


def test_refuses_other_families_tokenizers_and_ties(tmp_path):
    with pytest.raises(ModelError, match="model_type='mixtral' is not one of llama, mistral"):
        gguf_file.expect_family("mixtral")
    folder, file = built(tmp_path / "folder", "llama"), tmp_path / "one.gguf"
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"tie_word_embeddings": True}, "ties the embeddings, and model.safetensors has lm_head.weight"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=message):
            gguf_file.write_gguf(folder, file, "fp16", "one")
    (folder / "config.json").write_text(json.dumps(config))
    saved = json.loads((folder / "tokenizer.json").read_text())
    digits = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": False}, saved["pre_tokenizer"]],
    }
    for change, message in (
        ({"pre_tokenizer": digits}, "its pre-tokenizer is not that of GPT-2"),
        ({"normalizer": {"type": "Lowercase"}}, "it changes text"),
        ({"model": {**saved["model"], "merges": []}}, "it has no merges"),
        ({"pre_tokenizer": None}, "neither byte-level nor SentencePiece's"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps({**saved, **change}))
        with pytest.raises(ModelError, match=message):
            gguf_file.write_gguf(folder, file, "fp16", "one")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train a decoder of Weft with its own tokenizer, and an adapter on its export."""
    here = tmp_path_factory.mktemp("gguf")
    words = ["warp", "weft", "loom", "thread", "cloth"]
    lines = [" ".join(words[(i * k) % 5] for k in range(1, 40)) for i in range(1, 41)]
    (here / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = [
        *SMALL, f"run.dir={here}", f"data.cache_dir={here / 'cache'}", f"data.train={here / 'text.jsonl'}",
        "train.steps=6", "tokenizer.kind=bpe", "tokenizer.vocab_size=300", "eval.every=0", "sample.prompt=",
    ]  # fmt: skip
    train(*settings, "run.name=base")
    assert weft_run(["export", str(here / "base"), str(here / "exported")]) == 0
    model = [f"model.path={here / 'exported'}", *(one for one in settings if not one.startswith(("model.", "token")))]
    train(*model, "run.name=adapter", "adapter.rank=3", "optimizer.lr=1e-2")
    return here


def test_runs_export_from_the_command_line(runs, capsys):
    assert weft_run(["export", str(runs / "base"), "--gguf", str(runs / "base.gguf"), "--dtype", "q8_0"]) == 0
    said = capsys.readouterr().err
    assert "q8_0; greedy check: " in said
    assert " of 24 tokens equal those of the exported weights" in said
    merged = str(runs / "merged.gguf")
    assert weft_run(["export", str(runs / "adapter"), "--gguf", merged, "--merge"]) == 0
    assert "fp32; greedy check: 24 of 24" in capsys.readouterr().err
    # Without a config from Weft, transformers reads shape and constants from the file.
    read = transformers.AutoModelForCausalLM.from_pretrained(runs, gguf_file="merged.gguf").eval()
    assert weft_run(["export", str(runs / "adapter"), str(runs / "merged"), "--merge", "--dtype", "fp32"]) == 0
    folder = transformers.AutoModelForCausalLM.from_pretrained(runs / "merged").eval()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, folder(ids).logits, atol=1e-5)


def test_wrong_words_of_export(runs, capsys):
    for words, message in (
        (["adapter", "--gguf", "{}/a.gguf"], "an adapter alone. Add --merge"),
        (["base"], "give a FOLDER, or --gguf FILE"),
        (["base", "{}/out", "--gguf", "{}/a.gguf"], "give a FOLDER, or --gguf FILE"),
        (["base", "{}/out", "--no-check"], "--no-check: only a GGUF file is read back"),
        (["base", "--gguf", "{}/text.jsonl"], "the file exists"),
        (["base", "--gguf", "{}/a.gguf", "--dtype", "q4_0"], "Use fp32, bf16, fp16, q8_0"),
        (["base", "{}/out", "--dtype", "q8_0"], "With --gguf FILE, also q8_0"),
        (["base", "--gguf", "{}/a.gguf", "--own-names"], "--own-names sets something else"),
    ):
        name, *rest = words
        assert weft_run(["export", str(runs / name), *(one.format(runs) for one in rest)]) == 2
        assert message in capsys.readouterr().err
        assert not (runs / "a.gguf").exists()
