"""Images together with text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.batches import IMAGE_SIZE, IMAGE_TOKEN, PATCH_SIZE, Batch
from tests.zoo.entries.sizes import BERT, LLAMA, OPT, POSITIONS, SMALL_VIT, SPECIAL, UNTIED, VIT, WINDOW, WORDS

N_PATCHES = 9
SIGLIP = {"model_type": "siglip_vision_model", **SMALL_VIT, "vision_use_head": False}
GEMMA = {**LLAMA, **UNTIED, "head_dim": 8}
QWEN_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
QWEN_TEXT = {
    **LLAMA,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": PATCH_SIZE,
}


def _model(name: str, model: str, batch: Callable[[], Batch], **options: Any) -> Architecture:
    return Architecture(name, "multimodal", model, options, batch)


MULTIMODAL = (
    _model(
        "CLIP",
        "CLIPModel",
        batches.images_and_text,
        projection_dim=16,
        text_config={**BERT, **SPECIAL, "projection_dim": 16},
        vision_config=VIT,
    ),
    _model(
        "Chinese-CLIP",
        "ChineseCLIPModel",
        partial(batches.images_and_text, "right"),
        projection_dim=16,
        text_config=BERT,
        vision_config=VIT,
    ),
    _model(
        "SigLIP",
        "SiglipModel",
        partial(batches.images_and_text, "right"),
        text_config={**BERT, **SPECIAL},
        vision_config=VIT,
    ),
    _model(
        "OWLv2",
        "Owlv2Model",
        batches.images_and_text,
        projection_dim=16,
        text_config={**BERT, **SPECIAL},
        vision_config=VIT,
    ),
    _model(
        "LLaVA",
        "LlavaForConditionalGeneration",
        partial(batches.images_in_prompts, N_PATCHES),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=N_PATCHES,
        vision_feature_layer=-1,
        text_config={"model_type": "llama", **LLAMA},
        vision_config={"model_type": "clip_vision_model", **SMALL_VIT},
    ),
    _model(
        "BLIP-2",
        "Blip2ForConditionalGeneration",
        partial(batches.images_in_prompts, N_PATCHES),
        num_query_tokens=N_PATCHES,
        image_token_index=IMAGE_TOKEN,
        vision_config=SMALL_VIT,
        qformer_config={**BERT, "encoder_hidden_size": 32, "cross_attention_frequency": 1},
        text_config={"model_type": "opt", **OPT},
    ),
    _model(
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        partial(batches.images_in_prompts, N_PATCHES, kinds="token_type_ids", image_kind=0),
        image_token_index=IMAGE_TOKEN,
        projection_dim=32,
        text_config={"model_type": "gemma", **GEMMA},
        vision_config=SIGLIP,
    ),
    _model(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        partial(batches.images_in_prompts, N_PATCHES, kinds="token_type_ids"),
        image_token_index=IMAGE_TOKEN,
        mm_tokens_per_image=N_PATCHES,
        text_config={**GEMMA, **WINDOW, "query_pre_attn_scalar": 8},
        vision_config=SIGLIP,
    ),
    _model(
        "InternVL",
        "InternVLForConditionalGeneration",
        partial(batches.images_in_prompts, N_PATCHES, size=IMAGE_SIZE),
        image_token_id=IMAGE_TOKEN,
        image_seq_length=N_PATCHES,
        text_config={"model_type": "qwen2", **LLAMA},
        vision_config={
            **VIT,
            "image_size": (IMAGE_SIZE, IMAGE_SIZE),
            "patch_size": (PATCH_SIZE, PATCH_SIZE),
            "layer_scale_init_value": 1.0,
        },
    ),
    _model(
        "SmolVLM, Idefics3",
        "SmolVLMForConditionalGeneration",
        batches.image_tiles,
        image_token_id=IMAGE_TOKEN,
        text_config={"model_type": "llama", **LLAMA},
        vision_config=VIT,
    ),
    _model(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        batches.image_grids,
        **QWEN_TOKENS,
        text_config=QWEN_TEXT,
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "mlp_ratio": 2,
        },
    ),
    _model(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        batches.image_grids,
        **QWEN_TOKENS,
        text_config=QWEN_TEXT,
        vision_config={**QWEN_VISION, "window_size": 2 * PATCH_SIZE, "fullatt_block_indexes": (1,)},
    ),
    _model(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        batches.image_grids,
        **QWEN_TOKENS,
        text_config={**QWEN_TEXT, "head_dim": 8},
        vision_config={**QWEN_VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": (0,)},
    ),
    _model(
        "TrOCR",
        "VisionEncoderDecoderModel",
        batches.images_to_text,
        **SPECIAL,
        decoder_start_token_id=1,
        encoder={"model_type": "vit", **VIT},
        decoder={
            "model_type": "trocr",
            **WORDS,
            **POSITIONS,
            **SPECIAL,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "is_decoder": True,
            "add_cross_attention": True,
            "cross_attention_hidden_size": 32,
        },
    ),
    _model(
        "BLIP",
        "BlipForConditionalGeneration",
        batches.captions,
        projection_dim=16,
        text_config={**BERT, **SPECIAL, "sep_token_id": 2, "encoder_hidden_size": 32},
        vision_config=SMALL_VIT,
    ),
    _model(
        "ViLT",
        "ViltModel",
        batches.images_with_text,
        **{**VIT, **BERT},
    ),
)
