"""Which Hugging Face families train under which technique: `weft verify` of each, on two ranks, as a table.

python benchmarks/models.py                       writes docs/reference/models.md; some 10 minutes on two quiet cores
python benchmarks/models.py --only llama,t5       prints the rows of these alone; --techniques cp,pp: of these columns

Models are two layers of width 16 with random weights, made from transformers' own configs, in float64. A cell is
"equal" where loss, norm, gradients and weights of two steps equal those of PyTorch alone, "refused" where Weft says in
a sentence that it cannot, and anything else is a defect.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from weft.config.plan import Plan
from weft.models.inspect.hugging_face import model_of_config
from weft.verify.rank_pool import RankPool
from weft.verify.subject import Settings, find_subject
from weft.verify.verifier import Verifier

PLANS = {
    "zero=2": "dp_shard=2 zero=2",
    "zero=3": "dp_shard=2 zero=3",
    "tp": "tp=2",
    "sp": "tp=2 sp=on",
    "cp": "cp=2",
    "pp": "pp=2 microbatches=2",
    "ep": "dp_shard=2 ep=2 zero=1",
}
#: Auto classes whose families are tried, with what they are trained for.
TASKS = {
    "AutoModelForSeq2SeqLM": "sequence to sequence",
    "AutoModelForSpeechSeq2Seq": "speech to text",
    "AutoModelForCausalLM": "next token",
    "AutoModelForMaskedLM": "masked token",
    "AutoModelForImageClassification": "images",
}
#: Small values for what configs call their sizes.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_kv", "ffn_hidden_size"), 8),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "moe_k"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    "max_source_positions": 20,
    "num_mel_bins": 8,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
    "vocab_size": 61,
    "first_k_dense_replace": 1,
    "type_vocab_size": 2,
    "sliding_window": 8,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3}
#: More parameters than this: the config has sizes by other names.
MOST_PARAMETERS = 300_000


def families() -> dict[str, tuple[str, str]]:
    """Model type -> its class and its task, each type once."""
    import transformers

    found: dict[str, tuple[str, str]] = {}
    for auto, task in TASKS.items():
        for kind, name in getattr(transformers, auto)._model_mapping._model_mapping.items():
            name = name[0] if isinstance(name, tuple) else name
            found.setdefault(kind, (name, task))
    return found


def small_config(kind: str, class_name: str) -> Any:
    """A config of that type with small sizes."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    for name, value in {**SIZES, **TOKENS}.items():
        try:
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        except (AttributeError, NotImplementedError, TypeError):
            continue
    if getattr(config, "kv_lora_rank", None):  # latent attention makes keys for every head from one latent
        config.num_key_value_heads, config.qk_head_dim = config.num_attention_heads, 2 * SIZES["qk_rope_head_dim"]
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    if "sparse" in (kinds := getattr(config, "mlp_layer_types", None) or ()) or "dense" in kinds:
        config.mlp_layer_types = ["dense", "sparse"]
    for name in ("no_rope_layers", "attention_layers"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    config.architectures = [class_name]
    return config


def row_of(kind: str, class_name: str, folder: Path, pool: RankPool) -> dict[str, str]:
    """What became of each technique: "equal", "refused: why", or a defect in words. Raises where there is no model."""
    config = small_config(kind, class_name)
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "model_type": kind, "architectures": [class_name]})
    )
    with torch.device("meta"):
        model = model_of_config(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    has_experts = any("expert" in name for name, _ in model.named_modules())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters: its sizes have other names")
    subject = find_subject(str(folder), Settings(num_steps=2, seq_len=16, global_batch=4))
    cells: dict[str, str] = {}
    with Verifier(subject, 2, pool) as verifier:
        for technique, plan in PLANS.items():
            if technique == "ep" and not has_experts:
                cells[technique] = ""
                continue
            verdict = verifier.verify(Plan.parse(plan), explain=False)
            if verdict.refused:
                cells[technique] = f"refused: {verdict.refused.splitlines()[0]}"
            elif verdict.error:
                cells[technique] = f"FAILED: {verdict.error.strip().splitlines()[-1]}"
            else:
                cells[technique] = "equal" if verdict.passed else f"DIFFERS by {verdict.max_rel_diff:.1e}"
    return cells


def measure(only: set[str], pool: RankPool) -> tuple[dict[str, tuple[str, dict[str, str]]], dict[str, str]]:
    """Rows of all families by name, and those that could not be tried, with the reason."""
    rows, left_out = {}, {}
    chosen = {kind: found for kind, found in sorted(families().items()) if not only or kind in only}
    for kind, (class_name, task) in chosen.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rows[kind] = (task, row_of(kind, class_name, Path(folder), pool))
                told = " ".join(f"{name}:{cell.split(':')[0]}" for name, cell in rows[kind][1].items())
            except Exception as error:  # other people's configs may raise anything
                told = left_out[kind] = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        print(f"{kind:<24} {time.perf_counter() - start:5.1f} s  {told}", file=sys.stderr, flush=True)
    return rows, left_out


def page(rows: dict[str, tuple[str, dict[str, str]]], left_out: dict[str, str]) -> str:
    """The table and the reasons, as Markdown."""
    tried = [cell for _, row in rows.values() for cell in row.values() if cell]
    cells = Counter(cell.split(":")[0].split(" by")[0] for cell in tried)
    total = sum(cells.values())
    lines = [
        "<!-- Written by benchmarks/models.py; run it again instead of editing this page. -->",
        "# Hugging Face families by technique",
        f"`python benchmarks/models.py` trained {len(rows)} families of transformers for two steps on two ranks under",
        "each technique and compared loss, gradient norm, gradients and weights with PyTorch alone in float64 (1e-10):",
        f"{cells['equal']} of {total} cells are equal, {cells['refused']} are refused with a sentence, "
        f"{cells['DIFFERS']} give",
        f"other numbers and {cells['FAILED']} end in an error that is not Weft's own. "
        "The models are two layers of width",
        "16 with random weights: the table shows correctness, not speed.",
        "",
        "● equal · – refused (the footnote has Weft's sentence) · ✗ an error or other numbers · empty: no experts",
        "",
        "| family | trained for | " + " | ".join(PLANS) + " |",
        "|---|---|" + "---|" * len(PLANS),
    ]
    notes: dict[str, int] = {}
    for kind, (task, row) in rows.items():
        marks = []
        for cell in row.values():
            if cell in ("", "equal"):
                marks.append("●" if cell else "")
                continue
            number = notes.setdefault(_general(cell), len(notes) + 1)
            marks.append(f"{'–' if cell.startswith('refused') else '✗'} {number}")
        lines.append(f"| {kind} | {task} | " + " | ".join(marks) + " |")
    lines += ["", "## Reasons", *(f"{number}. {note}" for note, number in notes.items()), ""]
    if left_out:
        lines += [
            "## Not tried",
            "Their configs have sizes by other names, need code outside transformers, or PyTorch alone cannot train",
            "them on plain tokens or images:",
            ", ".join(sorted(left_out)) + ".",
            "",
        ]
    return "\n".join(lines)


def _general(cell: str) -> str:
    """The reason without the names of single modules and classes, so that families share footnotes."""
    text = cell.partition(": ")[2] or cell
    text = re.sub(r"`?\b[\w*{},]+(?:\.[\w*{},]+)+`?(?:\(.*?\))?", "…", text)
    text = re.sub(r"\b[A-Z][a-z]*\w*(?:For|Model|Attention|Layer|With|Head|LM)\w*", "…", text)
    text = re.sub(r"…(?:,? …)*", "…", text)
    # What a module failed on names its sizes: the kind of error is enough here.
    return re.sub(r"(?:…|\b[a-z]+) \(\S+\) fails on (.*?) \((\w+): .*\)\. If", r"… fails on \1 (\2). If", text)[:240]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas")
    parser.add_argument("--out", default="docs/reference/models.md")
    parser.add_argument("--techniques", default="", help="with --only: these alone, with commas")
    options = parser.parse_args()
    for name in set(PLANS) - set(options.techniques.split(",")) if options.only and options.techniques else ():
        del PLANS[name]
    only = set(filter(None, options.only.split(",")))
    with RankPool(2, timeout_s=120) as pool:
        rows, left_out = measure(only, pool)
    if only:
        print(page(rows, left_out))
    else:
        Path(options.out).write_text(page(rows, left_out))


if __name__ == "__main__":
    main()
