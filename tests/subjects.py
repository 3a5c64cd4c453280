"""Tiny models of all kinds that `smyrf compare` takes, saved with what reads their inputs, and loaded as it does."""

import pytest

from smyrf.tools.compare.load_model import load_subject

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
transformers.utils.logging.disable_progress_bar()

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "of", "a", "in", "to", "is", "and", "that", "it", "as", "for", "be"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SMALL | {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# With weights as small as those of a new model attention is uniform, and every method is exact.
WIDE = {"initializer_range": 0.5}


def save_tokenizer(folder, special=True):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {}
    if special:
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **names).save_pretrained(folder)


def save_bert(folder):
    config = transformers.BertConfig(**TEXT, **WIDE, max_position_embeddings=150)
    transformers.BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_gpt2(folder):
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, **WIDE
    )
    transformers.GPT2Model(config).save_pretrained(folder)
    save_tokenizer(folder, special=False)


def save_mpnet(folder):
    transformers.MPNetModel(transformers.MPNetConfig(**TEXT)).save_pretrained(folder)
    save_tokenizer(folder)


def save_bart(folder):
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    config = transformers.BartConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
        init_std=0.5,
        **layers,
    )
    transformers.BartModel(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_siglip(folder):
    """Two towers, and beside its layers an attention of PyTorch's own."""
    config = transformers.SiglipConfig(
        text_config=TEXT | {"projection_size": 32, "max_position_embeddings": 40},
        vision_config=SMALL | {"image_size": 32, "patch_size": 4},
    )
    transformers.SiglipModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def save_vit(folder):
    transformers.ViTModel(
        transformers.ViTConfig(**SMALL, **WIDE, image_size=48, patch_size=4), add_pooling_layer=False
    ).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder)


def save_wav2vec2(folder):
    config = transformers.Wav2Vec2Config(**TEXT, conv_dim=(16,) * 7, num_conv_pos_embeddings=16, mask_time_prob=0.0)
    transformers.Wav2Vec2Model(config).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)


def save_whisper(folder):
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    config = transformers.WhisperConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **layers,
    )
    transformers.WhisperModel(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


MODELS = {
    "bert": save_bert,
    "gpt2": save_gpt2,
    "mpnet": save_mpnet,
    "bart": save_bart,
    "siglip": save_siglip,
    "vit": save_vit,
    "wav2vec2": save_wav2vec2,
    "whisper": save_whisper,
}


def loaded(folder, kind=None, source=None, n_documents=3, length=None, batch_size=2):
    subject = load_subject(str(folder), kind=kind, path=source, documents=n_documents, length=length, batch=batch_size)
    return subject.model, subject.inputs
