"""Encoders of text, and of proteins and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.batches import Batch
from tests.zoo.entries.sizes import BERT, POSITIONS, SPECIAL, T5, WIDTH, WORDS

LENGTH = max(batches.LENGTHS)
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def _encoder(name: str, model: str, batch: Callable[[], Batch] = batches.text, **options: Any) -> Architecture:
    return Architecture(name, "text encoder", model, options, batch)


TEXT_ENCODERS = (
    _encoder("BERT", "BertModel", **BERT),
    _encoder("RoBERTa", "RobertaModel", **BERT),
    _encoder("XLM-RoBERTa", "XLMRobertaModel", **BERT),
    _encoder("CamemBERT", "CamembertModel", **BERT),
    _encoder("ALBERT", "AlbertModel", **BERT, embedding_size=16),
    _encoder("DistilBERT", "DistilBertModel", **WORDS, **POSITIONS, dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    _encoder("ELECTRA", "ElectraModel", **BERT, embedding_size=16),
    _encoder("ERNIE", "ErnieModel", **BERT),
    _encoder("DPR", "DPRQuestionEncoder", batches.pooled_text, **BERT),
    _encoder(
        "ModernBERT",
        "ModernBertModel",
        **BERT,
        **SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=12,
        layer_types=["full_attention", "sliding_attention"],
    ),
    _encoder("NomicBERT", "NomicBertModel", **BERT),
    _encoder("EuroBERT", "EuroBertModel", **BERT, **SPECIAL, mask_token_id=3),
    _encoder("GTE", "GteModel", **BERT),
    _encoder("Jina Embeddings v3", "JinaEmbeddingsV3Model", **BERT),
    _encoder("data2vec, text", "Data2VecTextModel", **BERT),
    _encoder("MobileBERT", "MobileBertModel", **BERT, embedding_size=16, intra_bottleneck_size=16),
    _encoder("X-MOD", "XmodModel", **BERT, default_language="en_XX"),
    _encoder("ESM-2", "EsmModel", **BERT, pad_token_id=1, mask_token_id=4, position_embedding_type="rotary"),
    _encoder("LayoutLM", "LayoutLMModel", batches.boxed_text, **BERT),
    _encoder("Splinter", "SplinterModel", **BERT, question_token_id=3),
    _encoder("T5, encoder alone", "T5EncoderModel", **T5),
    _encoder("MPNet", "MPNetModel", **BERT),
    _encoder("DeBERTa", "DebertaModel", **BERT, **DISENTANGLED),
    _encoder("DeBERTa-v2, v3", "DebertaV2Model", **BERT, **DISENTANGLED),
    _encoder("Longformer", "LongformerModel", **BERT, attention_window=8),
    _encoder("BigBird", "BigBirdModel", **BERT, block_size=2, num_random_blocks=1),
    _encoder("Nyströmformer", "NystromformerModel", **BERT, segment_means_seq_len=LENGTH, num_landmarks=LENGTH),
    _encoder("RoFormer", "RoFormerModel", **BERT),
    _encoder("RemBERT", "RemBertModel", **BERT, **SPECIAL, input_embedding_size=16, output_embedding_size=16),
    _encoder("Megatron-BERT", "MegatronBertModel", **BERT),
    _encoder("ConvBERT", "ConvBertModel", **BERT, embedding_size=16),
    _encoder("SqueezeBERT", "SqueezeBertModel", **BERT, embedding_size=32),
    _encoder("LUKE", "LukeModel", **BERT, entity_vocab_size=5, entity_emb_size=8),
    _encoder("LayoutLMv3", "LayoutLMv3Model", batches.boxed_text, **BERT, coordinate_size=6, shape_size=4),
    _encoder("XLNet", "XLNetModel", **WORDS, d_model=32, n_layer=2, n_head=4, d_inner=48),
    _encoder("Funnel", "FunnelModel", **WORDS, d_model=32, block_sizes=(1, 1), n_head=4, d_head=8, d_inner=48),
    _encoder("FNet", "FNetModel", batches.unmasked_text, **WORDS, **POSITIONS, **WIDTH, num_hidden_layers=2),
    _encoder(
        "Reformer",
        "ReformerModel",
        **WORDS,
        hidden_size=32,
        num_attention_heads=4,
        attention_head_size=8,
        feed_forward_size=48,
        attn_layers=["lsh", "local"],
        axial_pos_shape=(4, 16),
        axial_pos_embds_dim=(16, 16),
        max_position_embeddings=64,
        lsh_attn_chunk_length=8,
        local_attn_chunk_length=8,
        num_buckets=4,
    ),
)
