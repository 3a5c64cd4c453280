"""Speech and sounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.batches import MELS, Batch
from tests.zoo.entries.sizes import BART, BART_LAYERS, LAYERS, POSITIONS, SPECIAL, UNTIED, WIDTH, WORDS

KERNELS, STRIDES = (10, 3, 2), (5, 2, 2)
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": KERNELS,
    "conv_stride": STRIDES,
    "num_conv_pos_embeddings": 15,
    "num_conv_pos_embedding_groups": 2,
}
LAYER_NORM = {"feat_extract_norm": "layer"}
WAV2VEC2 = {**WIDTH, **LAYERS, **CONVOLUTIONS, **LAYER_NORM}

_sounds = partial(batches.sounds, KERNELS, STRIDES)


def _model(name: str, model: str, batch: Callable[[], Batch] = _sounds, **options: Any) -> Architecture:
    return Architecture(name, "audio", model, options, batch)


AUDIO = (
    _model(
        "Whisper",
        "WhisperForConditionalGeneration",
        partial(batches.spectrograms_to_text, 80),
        **BART,
        **UNTIED,
        num_mel_bins=MELS,
        max_source_positions=40,
        max_target_positions=64,
        begin_suppress_tokens=None,
    ),
    _model("wav2vec 2.0", "Wav2Vec2Model", **WAV2VEC2),
    _model("HuBERT", "HubertModel", **WAV2VEC2),
    _model("data2vec, audio", "Data2VecAudioModel", **WIDTH, **LAYERS, **CONVOLUTIONS),
    _model("UniSpeech-SAT", "UniSpeechSatModel", **WAV2VEC2),
    _model(
        "AST",
        "ASTModel",
        partial(batches.spectrograms, 24),
        **WIDTH,
        **LAYERS,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=24,
        num_mel_bins=MELS,
    ),
    _model(
        "Moonshine",
        "MoonshineForConditionalGeneration",
        lambda: batches.sounds_to_text(batches.sounds((127, 7, 3), (64, 3, 2))),
        **WORDS,
        **SPECIAL,
        **WIDTH,
        **POSITIONS,
        decoder_start_token_id=1,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    ),
    _model(
        "Parakeet",
        "ParakeetEncoder",
        partial(batches.padded_spectrograms, 8),
        **WIDTH,
        **LAYERS,
        num_mel_bins=MELS,
        subsampling_conv_channels=8,
    ),
    _model(
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        lambda: batches.sounds_to_text(batches.padded_spectrograms(4)),
        **BART,
        max_source_positions=160,
        max_target_positions=64,
        conv_channels=16,
        input_feat_per_channel=MELS,
    ),
    _model(
        "wav2vec 2.0 BERT",
        "Wav2Vec2BertModel",
        batches.padded_spectrograms,
        **WIDTH,
        **LAYERS,
        feature_projection_input_dim=MELS,
    ),
    _model("wav2vec 2.0 conformer", "Wav2Vec2ConformerModel", **WAV2VEC2),
    _model("WavLM", "WavLMModel", **WAV2VEC2),
    _model(
        "SpeechT5",
        "SpeechT5ForSpeechToText",
        lambda: batches.sounds_to_text(_sounds()),
        **WORDS,
        **SPECIAL,
        **BART_LAYERS,
        **CONVOLUTIONS,
        **LAYER_NORM,
        hidden_size=32,
        decoder_start_token_id=2,
    ),
)
