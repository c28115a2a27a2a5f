"""Processors and configs of more small vision-language and audio-language families, for chat_folders.py."""

from __future__ import annotations

from typing import Any

_SQUARE = {"height": 8, "width": 8}
_GRIDS = [[8, 16], [16, 8], [16, 16]]
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
_CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
         "patch_size": 4}  # fmt: skip
_QWEN = {"depth": 2, "hidden_size": 16, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 1,
         "spatial_merge_size": 2, "in_channels": 3, "intermediate_size": 24, "out_hidden_size": 16}  # fmt: skip
#: The placeholder that the chat template of a family writes for an image.
IMAGES = {
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>", "llava_next": "<image>",
    "llava_onevision": "<image>",
    "mistral3": "<image>", "paligemma": "", "gemma4": "<image>", "glm4v": "<image>", "aya_vision": "<image>",
    "qwen2_5_omni_thinker": "<img><image></img>", "glm46v": "<image>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
}  # fmt: skip
#: Names of tokens that a family's tokenizer has.
TOKENS = {
    "gemma4": {"image_token": "<image>", "boi_token": "<img>", "eoi_token": "</img>", "audio_token": "<|AUDIO|>",
               "boa_token": "<|audio_bos|>", "eoa_token": "<|audio_eos|>"},
    "glm4v": {"image_token": "<image>", "video_token": "<video>"},
    "glm46v": {"image_token": "<image>", "video_token": "<video>"},
    "qwen2_5_omni_thinker": {
        "image_token": "<image>", "audio_token": "<|AUDIO|>", "video_token": "<video>", "vision_bos_token": "<img>",
        "vision_eos_token": "</img>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
}  # fmt: skip


def processor(family: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the class of a family's processor, its image processor and feature extractor, and its other fields."""
    import transformers as hf
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    pixels = {"size": {"shortest_edge": 64, "longest_edge": 256}, "patch_size": 4, "temporal_patch_size": 1,
              "merge_size": 2}  # fmt: skip
    match family:
        case "qwen3_vl_moe" | "qwen3_5":
            return "Qwen3VLProcessor", [Qwen2VLImageProcessorPil(**pixels)], {}
        case "qwen2_5_omni_thinker":
            hearing = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
            return "Qwen2_5OmniProcessor", [Qwen2VLImageProcessorPil(**pixels), hearing], {}
        case "glm4v":
            return "Glm4vProcessor", [Glm4vImageProcessorPil(**pixels)], {}
        case "glm46v":
            return "Glm46VProcessor", [Glm46VImageProcessorPil(**pixels)], {}
        case "llava_next":
            own = LlavaNextImageProcessorPil(size=_SQUARE, crop_size=_SQUARE, image_grid_pinpoints=_GRIDS)
            return "LlavaNextProcessor", [own], {"patch_size": 4, "vision_feature_select_strategy": "default",
                                                 "num_additional_image_tokens": 1}  # fmt: skip
        case "llava_onevision":
            own = LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=_GRIDS)
            return "LlavaOnevisionProcessor", [own], {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
        case "mistral3":
            own = PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size={"height": 8, "width": 8})
            return "PixtralProcessor", [own], {
                "patch_size": 4, "spatial_merge_size": 2, "image_token": "<image>", "image_break_token": "<img>",
                "image_end_token": "</img>"}  # fmt: skip
        case "paligemma":
            own = SiglipImageProcessorPil(size=_SQUARE)
            own.image_seq_length = 4
            return "PaliGemmaProcessor", [own], {}
        case "gemma4":
            own = Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70, pooling_kernel_size=2)
            return "Gemma4Processor", [own, Gemma4AudioFeatureExtractor(feature_size=16)], {}
        case "aya_vision":
            own = GotOcr2ImageProcessorPil(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
            return "AyaVisionProcessor", [own], {"patch_size": 4, "img_size": 8, "image_token": "<image>",
                                                 "downsample_factor": 1, "start_of_img_token": "<img>",
                                                 "end_of_img_token": "</img>", "img_patch_token": "<IMG_CONTEXT>",
                                                 "img_line_break_token": "<video>", "tile_token": "TILE",
                                                 "tile_global_token": "TILE_GLOBAL"}  # fmt: skip
    raise ValueError(family)


def config(family: str, ids: dict[str, int], size: int, text: dict[str, Any]) -> Any:
    """Return a family's small config.

    Args:
        family: its model_type.
        ids: ids of special tokens.
        size: size of the vocabulary.
        text: usual fields of the text model's config.
    """
    import transformers as hf

    clip = {"model_type": "clip_vision_model", **_CLIP, "projection_dim": 8}
    siglip = {"model_type": "siglip_vision_model", **_CLIP, "vision_use_head": False}
    llama, image = {"model_type": "llama", **text}, ids["<image>"]
    match family:
        case "qwen3_vl_moe":
            vision = {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            own = {**text, "head_dim": 4, "rope_parameters": _ROPE, "moe_intermediate_size": 8, "num_experts": 4,
                   "num_experts_per_tok": 2}  # fmt: skip
            return hf.Qwen3VLMoeConfig(
                vision_config=vision, text_config=own, image_token_id=ids["<|image_pad|>"],
                video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
                vision_end_token_id=ids["<|vision_end|>"],
            )  # fmt: skip
        case "qwen2_5_omni_thinker":
            from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

            heard = {"d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 24, "encoder_attention_heads": 4,
                     "num_mel_bins": 8, "max_source_positions": 50, "n_window": 10, "output_dim": 16}  # fmt: skip
            return Qwen2_5OmniThinkerConfig(
                vision_config={**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}, audio_config=heard,
                text_config={**text, "rope_parameters": _ROPE}, image_token_index=image,
                audio_token_index=ids["<|AUDIO|>"], video_token_index=ids["<video>"],
                vision_start_token_id=ids["<img>"], vision_end_token_id=ids["</img>"],
                audio_start_token_id=ids["<|audio_bos|>"], audio_end_token_id=ids["<|audio_eos|>"],
            )  # fmt: skip
        case "qwen3_5":
            own = {**text, "head_dim": 4, "layer_types": ["linear_attention", "full_attention"],
                   "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
                   "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3}  # fmt: skip
            return hf.Qwen3_5Config(
                vision_config={**_QWEN, "num_position_embeddings": 16}, text_config=own,
                image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
                vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
            )  # fmt: skip
        case "glm4v" | "glm46v":
            kind = hf.Glm4vConfig if family == "glm4v" else hf.Glm46VConfig
            return kind(
                vision_config={"model_type": "glm4v_vision", **_QWEN, "image_size": 16},
                text_config={"model_type": "glm4v_text", **text,
                             "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
                image_token_id=image, video_token_id=ids["<video>"], image_start_token_id=ids["<img>"],
                image_end_token_id=ids["</img>"], video_start_token_id=ids["<global-img>"],
                video_end_token_id=ids["<end_of_utterance>"],
            )  # fmt: skip
        case "llava_next":
            return hf.LlavaNextConfig(vision_config=clip, text_config=llama, image_token_index=image,
                                      image_grid_pinpoints=_GRIDS, vision_feature_layer=-1)  # fmt: skip
        case "llava_onevision":
            return hf.LlavaOnevisionConfig(
                vision_config=siglip, text_config={"model_type": "qwen2", **text}, image_token_index=image,
                video_token_index=ids["<video>"], image_grid_pinpoints=_GRIDS,
            )  # fmt: skip
        case "mistral3":
            return hf.Mistral3Config(
                vision_config={"model_type": "pixtral", **_CLIP, "image_size": 24},
                text_config={"model_type": "mistral", **text, "sliding_window": None, "head_dim": 4},
                image_token_index=image, tie_word_embeddings=False,
            )  # fmt: skip
        case "paligemma":
            return hf.PaliGemmaConfig(
                vision_config=siglip, text_config={"model_type": "gemma", **text, "vocab_size": size, "head_dim": 4},
                image_token_index=image, projection_dim=16, hidden_size=16, vocab_size=size,
            )  # fmt: skip
        case "gemma4":
            return hf.Gemma4Config(
                vision_config={**_CLIP, "num_key_value_heads": 4, "head_dim": 4, "patch_size": 2,
                               "pooling_kernel_size": 2, "position_embedding_size": 512},
                audio_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "subsampling_conv_channels": [16, 4], "output_proj_dims": 16,
                              "use_clipped_linears": False},
                text_config={**text, "head_dim": 4, "global_head_dim": 4, "hidden_size_per_layer_input": 4,
                             "vocab_size_per_layer_input": size, "sliding_window": 64,
                             "use_bidirectional_attention": "vision"},
                image_token_id=image, audio_token_id=ids["<|AUDIO|>"], video_token_id=size - 1,
                boi_token_id=ids["<img>"], eoi_token_id=ids["</img>"], boa_token_id=ids["<|audio_bos|>"],
            )  # fmt: skip
        case "aya_vision":
            return hf.AyaVisionConfig(
                vision_config=siglip, text_config={"model_type": "cohere", **text}, downsample_factor=1,
                image_token_index=ids["<IMG_CONTEXT>"],
            )  # fmt: skip
    raise ValueError(family)
