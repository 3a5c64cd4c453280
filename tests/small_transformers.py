"""Small models of transformers with random weights, and padded inputs for them."""

import pytest
import torch

import smyrf

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

transformers.utils.logging.set_verbosity_error()

EXACT = smyrf.Smyrf(n_hashes=2, cluster_size=4096)
# A named backend serves exact calls too; otherwise they would stay dense, and show nothing about masks.
KERNEL = "torch"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "initializer_range": 0.3,  # attention is far from uniform: a wrong mask shows
}


def bert(kind=BertModel, **options):
    return kind(BertConfig(**SIZES, **TOKENS, max_position_embeddings=1024, **options)).eval()


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, **options)).eval()


def gpt2():
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS)).eval()


def bart():
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 37))}  # fmt: skip
    config = BartConfig(
        vocab_size=101, d_model=32, init_std=0.3, decoder_start_token_id=2, forced_eos_token_id=None, **sizes, **TOKENS
    )
    return BartForConditionalGeneration(config).eval()


def t5(kind=T5ForConditionalGeneration):
    config = T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return kind(config).eval()


def whisper():
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 37))}  # fmt: skip
    config = WhisperConfig(
        vocab_size=101,
        d_model=32,
        init_std=0.3,
        max_source_positions=150,
        max_target_positions=64,
        num_mel_bins=8,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
        **sizes,
        **TOKENS,
    )
    return WhisperForConditionalGeneration(config).eval()


def vit():
    sizes = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    return ViTModel(ViTConfig(**sizes, image_size=64, patch_size=4)).eval()


def text(length=300, batch=3, left=False):
    """Ids and a mask: one row full, the others padded."""
    ids = torch.randint(5, 100, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        hidden = length * row // (batch + 1)
        mask[row, slice(0, hidden) if left else slice(length - hidden, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(size=64):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def both(length=90):
    found = text(length)
    return {
        **found,
        "decoder_input_ids": found["input_ids"][:, :40],
        "decoder_attention_mask": text(40)["attention_mask"],
    }


def sounds():
    return {"input_features": torch.randn(2, 8, 300), "decoder_input_ids": torch.randint(5, 100, (2, 23))}


MODELS = {
    "bert": (bert, text, False),
    "llama, padded left": (llama, lambda: text(left=True), True),
    "llama, padded right": (llama, text, True),
    "gpt2": (gpt2, lambda: text(left=True), True),
    "bart": (bart, both, True),
    "t5": (t5, both, True),
    "vit": (vit, images, False),
    "whisper": (whisper, sounds, False),
}


@torch.no_grad()
def run(model, inputs):
    out = model(**inputs)[0]
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return out if mask is None else out[mask.bool()]
