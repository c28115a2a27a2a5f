"""Small random vision-language and audio-language folders with processors, and chats with images and audio for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.train import more_chat_folders as more

#: Special tokens of all families. Each is one entry of the vocabulary.
SPECIALS = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_pad|>", "<|video_pad|>",
    "<|vision_start|>", "<|vision_end|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<start_of_image>",
    "<end_of_image>", "<image_soft_token>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
    "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
]  # fmt: skip
_BODY = (
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}IMAGE"
    "{%- elif part['type'] == 'audio' -%}Audio: AUDIO\n{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}"
)
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' }}" + _BODY + "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
#: The placeholder that the chat template of a family writes for an image.
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGES = {
    "qwen2_vl": _QWEN, "qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN, "llava": "<image>", "internvl": "<IMG_CONTEXT>\n",
    "gemma3": "<start_of_image>", "idefics3": "<image>", "smolvlm": "<image>", "qwen2_audio": "",
    **more.IMAGES,
}  # fmt: skip
#: Families that read images and audio clips, and families that read one image in a conversation.
BOTH, SINGLE = ("gemma4", "qwen2_5_omni_thinker"), ("llava_onevision", "paligemma")
AUDIO = {"gemma4": "<|AUDIO|>"}
_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"


def save_tokenizer(folder: Path) -> Any:
    """Save a tokenizer of bytes that joins line breaks, and return it."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIALS, *letters, "ĊĊ", "ĊĊĊ"]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    library = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    marks = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    kept = {"gemma3": ("boi_token", "eoi_token", "image_token"),
            "internvl": ("start_image_token", "end_image_token", "context_image_token", "video_token")}  # fmt: skip
    own = {name: marks[name] for name in kept.get(folder.name, ())}
    begin = {"bos_token": "<s>"} if folder.name == "paligemma" else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token="<pad>", eos_token="<|im_end|>", **begin,
        extra_special_tokens=own or more.TOKENS.get(folder.name, {}),
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def _processor(family: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the class of a family's processor, its image processor or feature extractor, and its other fields."""
    import transformers as hf
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    square = {"height": 8, "width": 8}
    match family:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
            names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
            pixels = {"shortest_edge": 64, "longest_edge": 256}
            own = Qwen2VLImageProcessorPil(size=pixels, patch_size=4, temporal_patch_size=1, merge_size=2)
            return f"{names[family]}Processor", own, {}
        case "llava":
            own = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=square)
            return "LlavaProcessor", own, {"patch_size": 4, "vision_feature_select_strategy": "default",
                                           "num_additional_image_tokens": 1}  # fmt: skip
        case "internvl":
            own = GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, min_patches=1, max_patches=4)
            return "InternVLProcessor", own, {"image_seq_length": 1}
        case "gemma3":
            return "Gemma3Processor", Gemma3ImageProcessorPil(size=square), {"image_seq_length": 4}
        case "idefics3" | "smolvlm":
            kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
            own = kind(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
            return {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}[family], own, {"image_seq_len": 1}
        case _:
            return "Qwen2AudioProcessor", hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1), {}


def _text(ids: dict[str, int], size: int) -> dict[str, Any]:
    return {"vocab_size": size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "pad_token_id": ids["<pad>"]}  # fmt: skip


def _config(family: str, ids: dict[str, int], size: int) -> Any:
    import transformers as hf

    text = _text(ids, size)
    clip = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 8, "patch_size": 4}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    qwen = {"depth": 2, "hidden_size": 16, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 1,
            "spatial_merge_size": 2, "in_channels": 3}  # fmt: skip
    marks = {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip
    match family:
        case "qwen2_vl":
            vision = {**qwen, "embed_dim": 16, "mlp_ratio": 2}
            return hf.Qwen2VLConfig(vision_config=vision, text_config={**text, "rope_parameters": rope}, **marks)
        case "qwen2_5_vl":
            vision = {
                **qwen,
                "intermediate_size": 24,
                "out_hidden_size": 16,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
            return hf.Qwen2_5_VLConfig(vision_config=vision, text_config={**text, "rope_parameters": rope}, **marks)
        case "qwen3_vl":
            vision = {**qwen, "intermediate_size": 24, "out_hidden_size": 16, "num_position_embeddings": 16,
                      "deepstack_visual_indexes": [0]}  # fmt: skip
            own = {**text, "head_dim": 4, "rope_parameters": rope}
            return hf.Qwen3VLConfig(vision_config=vision, text_config=own, **marks)
        case "llava":
            return hf.LlavaConfig(
                vision_config={"model_type": "clip_vision_model", **clip, "projection_dim": 8},
                text_config={"model_type": "llama", **text}, image_token_id=ids["<image>"], vision_feature_layer=-1,
            )  # fmt: skip
        case "internvl":
            vision = {"model_type": "internvl_vision", **clip, "image_size": [8, 8], "patch_size": [4, 4]}
            return hf.InternVLConfig(
                vision_config=vision, text_config={"model_type": "qwen2", **text}, image_token_id=ids["<IMG_CONTEXT>"],
                downsample_ratio=0.5,
            )  # fmt: skip
        case "gemma3":
            return hf.Gemma3Config(
                vision_config={"model_type": "siglip_vision_model", **clip},
                text_config={"model_type": "gemma3_text", **text, "head_dim": 4, "sliding_window": 64},
                image_token_id=ids["<image_soft_token>"], boi_token_id=ids["<start_of_image>"],
                eoi_token_id=ids["<end_of_image>"], mm_tokens_per_image=4,
            )  # fmt: skip
        case "idefics3" | "smolvlm":
            kind = hf.Idefics3Config if family == "idefics3" else hf.SmolVLMConfig
            return kind(
                vision_config=clip, text_config={"model_type": "llama", **text}, image_token_id=ids["<image>"],
                scale_factor=2, pad_token_id=ids["<pad>"],
            )  # fmt: skip
        case _:
            # Wide layers: under zero=3 a table of positions that is a large share of the model would be sharded alone.
            text |= {"intermediate_size": 320}
            heard = {"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 320,
                     "encoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 50}  # fmt: skip
            return hf.Qwen2AudioConfig(
                audio_config=heard, text_config={"model_type": "qwen2", **text}, audio_token_index=ids["<|AUDIO|>"]
            )


def save_folder(root: Path, family: str, *, weights: bool = True) -> Path:
    """Save a family's processor, and a random model if `weights` is True, as if pretrained."""
    import transformers as hf

    folder = root / family
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder)
    if family in more.IMAGES:
        kind, parts, fields = more.processor(family)
    else:
        kind, *parts, fields = _processor(family)
    for part in parts:
        part.save_pretrained(folder)
    if len(parts) > 1:  # both would be written to preprocessor_config.json
        names = ("image_processor", "feature_extractor")
        fields |= {name: json.loads(part.to_json_string()) for name, part in zip(names, parts, strict=True)}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **fields}))
    template = TEMPLATE.replace("IMAGE", IMAGES[family]).replace("AUDIO", AUDIO.get(family, _AUDIO))
    if family != "paligemma":
        (folder / "chat_template.jinja").write_text(template)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    size = len(tokenizer) + (1200 if family == "paligemma" else 3)  # its processor adds tokens
    config = more.config(family, ids, size, _text(ids, size)) if family in more.IMAGES else _config(family, ids, size)
    if not weights:
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(3)
    model = hf.AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name:
                param.normal_(std=0.1)
            elif param.ndim > 1:
                param.mul_(3.0)  # differences become visible
    model.save_pretrained(folder)
    return folder


def write_pictures(root: Path, count: int = 3) -> list[str]:
    """Write images of different sizes, and return their names."""
    from PIL import Image

    rng = np.random.default_rng(1)
    names = [f"{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        shape = (9 + 5 * number, 20 - 3 * number, 3)
        Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(root / name)
    return names


def write_sounds(root: Path, count: int = 3) -> list[str]:
    """Write audio clips of different lengths, one at another rate, and return their names."""
    import soundfile

    rng = np.random.default_rng(1)
    names = [f"{number}.wav" for number in range(count)]
    for number, name in enumerate(names):
        rate = 8000 if number == 1 else 16_000
        soundfile.write(root / name, rng.normal(size=4000 + 2000 * number).astype(np.float32) * 0.1, rate)
    return names


def chats(names: list[str], kind: str = "image", count: int = 16) -> list[dict[str, Any]]:
    """Return chats in the formats of LLaMA-Factory, TRL and axolotl in turn, every fourth without media."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        name, answer = names[number % len(names)], "ab" * (1 + number % 5)
        other = names[(number + 1) % len(names)]
        match number % 4:
            case 0:
                asked = f"<{kind}>What is it? {number}"
                found.append({"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}],
                              f"{kind}s": [name]})  # fmt: skip
            case 1:
                parts = [{"type": kind}, {"type": "text", "text": "and"}, {"type": kind}]
                found.append({"messages": [
                    {"role": "system", "content": "Be short."}, {"role": "user", "content": parts},
                    {"role": "assistant", "content": answer}], f"{kind}s": [name, other]})  # fmt: skip
            case 2:
                parts = [{"type": "text", "text": "Look: "}, {"type": kind, "path": name}]
                found.append({"messages": [
                    {"role": "user", "content": parts},
                    {"role": "assistant", "content": [{"type": "text", "text": answer}]},
                    {"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]})  # fmt: skip
            case _:
                found.append({"messages": [{"role": "user", "content": f"{number}?"},
                                           {"role": "assistant", "content": answer}]})  # fmt: skip
    return found


def write_chats(root: Path, records: list[dict[str, Any]], name: str = "chats.jsonl") -> Path:
    file = root / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def write_all(root: Path, count: int = 16) -> None:
    """Write chats with images, with audio clips, and with both."""
    images, sounds = write_pictures(root), write_sounds(root)
    write_chats(root, chats(images, count=count))
    write_chats(root, chats(sounds, "audio", count), "sounds.jsonl")
    both = {"messages": [
        {"role": "user", "content": "<audio>Who speaks in <image>?"}, {"role": "assistant", "content": "aba"}],
        "images": images[:1], "audios": sounds[:1]}  # fmt: skip
    pairs = enumerate(zip(chats(images, count=count), chats(sounds, "audio", count), strict=True))
    write_chats(root, [*(pair[number // 4 % 2] for number, pair in pairs), *[both] * 4], "both.jsonl")


def data_of(family: str) -> str:
    """Return the name of a family's data."""
    return "both.jsonl" if family in BOTH else "sounds.jsonl" if family == "qwen2_audio" else "chats.jsonl"


def use_without_videos() -> None:
    """Let SmolVLM's processor load without a package that only videos use."""
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = str
