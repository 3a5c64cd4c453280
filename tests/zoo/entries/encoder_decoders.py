"""From text to text."""

from __future__ import annotations

from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.entries.sizes import BART, BERT, POSITIONS, SPECIAL, T5, WORDS


def _model(name: str, model: str, **options: Any) -> Architecture:
    return Architecture(name, "encoder–decoder", model, options, batches.text_to_text)


ENCODER_DECODERS = (
    _model("BART", "BartForConditionalGeneration", **BART, **POSITIONS),
    _model("mBART", "MBartForConditionalGeneration", **BART, **POSITIONS),
    _model("Pegasus", "PegasusForConditionalGeneration", **BART, **POSITIONS),
    _model("Marian", "MarianMTModel", **BART, **POSITIONS),
    _model("M2M100, NLLB", "M2M100ForConditionalGeneration", **BART, **POSITIONS),
    _model("Blenderbot", "BlenderbotForConditionalGeneration", **BART, **POSITIONS),
    _model("PLBART", "PLBartForConditionalGeneration", **BART, **POSITIONS),
    _model(
        "BERT to BERT",
        "EncoderDecoderModel",
        **SPECIAL,
        decoder_start_token_id=1,
        encoder={"model_type": "bert", **BERT},
        decoder={"model_type": "bert", **BERT, "is_decoder": True, "add_cross_attention": True},
    ),
    _model("T5", "T5ForConditionalGeneration", **T5),
    _model("mT5", "MT5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu"),
    _model("UMT5", "UMT5ForConditionalGeneration", **T5),
    _model("LongT5", "LongT5ForConditionalGeneration", **T5, local_radius=8),
    _model(
        "Switch Transformers",
        "SwitchTransformersForConditionalGeneration",
        **T5,
        num_decoder_layers=2,
        num_experts=2,
    ),
    _model(
        "BigBird-Pegasus",
        "BigBirdPegasusForConditionalGeneration",
        **BART,
        **POSITIONS,
        block_size=2,
        num_random_blocks=1,
    ),
    _model(
        "LED",
        "LEDForConditionalGeneration",
        **BART,
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _model(
        "ProphetNet",
        "ProphetNetForConditionalGeneration",
        **WORDS,
        **POSITIONS,
        **SPECIAL,
        decoder_start_token_id=1,
        hidden_size=32,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        encoder_ffn_dim=48,
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        decoder_ffn_dim=48,
    ),
)
