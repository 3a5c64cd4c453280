"""Options that many configurations share: two layers of width 32 with four heads."""

from tests.zoo.batches import IMAGE_SIZE, PATCH_SIZE, VOCABULARY

WORDS = {"vocab_size": VOCABULARY}
POSITIONS = {"max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
WIDTH = {"hidden_size": 32, "intermediate_size": 48}
BERT = {**WORDS, **POSITIONS, **WIDTH, **LAYERS}
LLAMA = {**BERT, **SPECIAL, "num_key_value_heads": 2}
# Untied, a model says something else than the word that it has just read.
UNTIED = {"tie_word_embeddings": False}
OPT = {**WORDS, **POSITIONS, **SPECIAL, **LAYERS, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {
    **WORDS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
}
BART_LAYERS = {
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}
BART = {**WORDS, **SPECIAL, **BART_LAYERS, "d_model": 32, "decoder_start_token_id": 2}
# The window is shorter than the batches' texts, so that it matters.
WINDOW = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
IMAGE = {"image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE}
VIT = {**WIDTH, **LAYERS, **IMAGE}
SMALL_VIT = {**VIT, "image_size": IMAGE_SIZE // 2}  # 9 patches
