"""Shape fields of published models' config.json, keyed by the prefix of the recipe name in configs/tune."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3_4b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "gemma3_1b": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "max_position_embeddings": 32768, "sliding_window": 512, "tie_word_embeddings": True,
    },
    "mistral_7b": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False,
    },
    "phi4_mini": {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072, "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "olmo2_7b": {
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "deepseek_v3_16b": {
        "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
}  # fmt: skip


def _dense(
    kind: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, positions: int, *,
    tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "max_position_embeddings": positions, "tie_word_embeddings": tied, **more,
    }  # fmt: skip


MODELS |= {
    "llama2_7b": _dense("llama", 32000, 4096, 11008, 32, 32, 32, 4096),
    "llama2_13b": _dense("llama", 32000, 5120, 13824, 40, 40, 40, 4096),
    "llama32_1b": _dense("llama", 128256, 2048, 8192, 16, 32, 8, 131072, tied=True, head_dim=64),
    "llama32_3b": _dense("llama", 128256, 3072, 8192, 28, 24, 8, 131072, tied=True, head_dim=128),
    "llama33_70b": _dense("llama", 128256, 8192, 28672, 80, 64, 8, 131072),
    "tinyllama_1b": _dense("llama", 32000, 2048, 5632, 22, 32, 4, 2048),
    "smollm2_360m": _dense("llama", 49152, 960, 2560, 32, 15, 5, 8192, tied=True),
    "smollm2_1b7": _dense("llama", 49152, 2048, 8192, 24, 32, 32, 8192, tied=True),
    "falcon3_7b": _dense("llama", 131072, 3072, 23040, 28, 12, 4, 32768, head_dim=256),
    "qwen25_1b5": _dense("qwen2", 151936, 1536, 8960, 28, 12, 2, 32768, tied=True),
    "qwen25_7b": _dense("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768),
    "qwen25_72b": _dense("qwen2", 152064, 8192, 29568, 80, 64, 8, 32768),
    "r1_qwen_7b": _dense("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072),
    "qwen3_0b6": _dense("qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, tied=True, head_dim=128),
    "qwen3_1b7": _dense("qwen3", 151936, 2048, 6144, 28, 16, 8, 40960, tied=True, head_dim=128),
    "qwen3_8b": _dense("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128),
    "qwen3_14b": _dense("qwen3", 151936, 5120, 17408, 40, 40, 8, 40960, head_dim=128),
    "qwen3_32b": _dense("qwen3", 151936, 5120, 25600, 64, 64, 8, 40960, head_dim=128),
    "gemma2_2b": _dense("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, tied=True, head_dim=256, sliding_window=4096),
    "gemma2_9b": _dense("gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, tied=True, head_dim=256, sliding_window=4096),
    "mistral_nemo_12b": _dense("mistral", 131072, 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    "mistral_small_24b": _dense("mistral", 131072, 5120, 32768, 40, 32, 8, 32768, head_dim=128, sliding_window=None),
    "phi4_14b": _dense("phi3", 100352, 5120, 17920, 40, 40, 10, 16384),
    "granite31_8b": _dense("granite", 49155, 4096, 12800, 40, 32, 8, 131072, tied=True),
}
