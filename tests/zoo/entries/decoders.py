"""Language models that continue a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.batches import Batch
from tests.zoo.entries.sizes import BERT, LAYERS, LLAMA, OPT, POSITIONS, SPECIAL, UNTIED, WINDOW, WORDS

GPT2 = {**WORDS, **SPECIAL, **UNTIED, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _decoder(
    name: str, model: str, batch: Callable[[], Batch] = batches.numbered_prompts, **options: Any
) -> Architecture:
    return Architecture(name, "decoder", model, options, batch)


def _llama(name: str, model: str, **options: Any) -> Architecture:
    return _decoder(name, model, **{**LLAMA, **UNTIED, **options})


DECODERS = (
    _decoder("GPT-2", "GPT2LMHeadModel", **GPT2),
    _decoder("GPT-BigCode, StarCoder", "GPTBigCodeForCausalLM", **GPT2),
    _decoder("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", **BERT, **SPECIAL),
    _decoder("OPT", "OPTForCausalLM", **OPT, **UNTIED),
    _decoder("BioGPT", "BioGptForCausalLM", **BERT, **SPECIAL, **UNTIED),
    _llama("Llama 2, 3", "LlamaForCausalLM"),
    _llama(
        "Llama 4, text",
        "Llama4ForCausalLM",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        attention_chunk_size=12,
        layer_types=["chunked_attention", "full_attention"],
    ),
    _llama("Mistral", "MistralForCausalLM", sliding_window=None),
    _llama("Mistral with a sliding window", "MistralForCausalLM", sliding_window=12),
    _llama("Ministral", "MinistralForCausalLM", head_dim=8, **WINDOW),
    _llama("Mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    _llama("Qwen2", "Qwen2ForCausalLM"),
    _llama("Qwen2-MoE", "Qwen2MoeForCausalLM", num_experts=4, shared_expert_intermediate_size=24, **EXPERTS),
    _llama("Qwen3", "Qwen3ForCausalLM", head_dim=8),
    _llama("Qwen3-MoE", "Qwen3MoeForCausalLM", num_experts=4, **EXPERTS),
    _llama(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=24,
        **EXPERTS,
        **LINEAR,
    ),
    _llama("Qwen3.5, text", "Qwen3_5ForCausalLM", head_dim=8, **LINEAR),
    _llama("Gemma", "GemmaForCausalLM", head_dim=8),
    _llama("Gemma 2", "Gemma2ForCausalLM", head_dim=8, **WINDOW),
    _llama("Gemma 3, text", "Gemma3ForCausalLM", head_dim=8, query_pre_attn_scalar=8, **WINDOW),
    _llama(
        "Gemma 4, text",
        "Gemma4ForCausalLM",
        head_dim=8,
        vocab_size_per_layer_input=WORDS["vocab_size"],
        hidden_size_per_layer_input=8,
        **WINDOW,
    ),
    _llama("Phi", "PhiForCausalLM"),
    _llama("Phi-3, Phi-4", "Phi3ForCausalLM"),
    _llama("StableLM", "StableLmForCausalLM"),
    _llama("StarCoder2", "Starcoder2ForCausalLM"),
    _llama("OLMo 2", "Olmo2ForCausalLM"),
    _llama("OLMo 3", "Olmo3ForCausalLM", **WINDOW),
    _llama("OLMoE", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    _llama("Cohere, Command R", "CohereForCausalLM"),
    _llama("Cohere 2", "Cohere2ForCausalLM", **WINDOW),
    _llama("Granite", "GraniteForCausalLM"),
    _llama("SmolLM3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    _llama("GLM-4", "Glm4ForCausalLM", head_dim=8),
    _llama("Nemotron", "NemotronForCausalLM"),
    _llama("ERNIE 4.5", "Ernie4_5ForCausalLM", head_dim=8),
    _llama("EXAONE 4", "Exaone4ForCausalLM", **WINDOW),
    _llama(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **LATENT,
    ),
    _llama(
        "GPT-OSS",
        "GptOssForCausalLM",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=PLAIN_ROPE,
        **WINDOW,
    ),
    _llama("LFM2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
    _decoder(
        "ModernBERT decoder",
        "ModernBertDecoderForCausalLM",
        **BERT,
        **SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=12,
        layer_types=["full_attention", "sliding_attention"],
    ),
    _decoder("Falcon", "FalconForCausalLM", **WORDS, **SPECIAL, **LAYERS, hidden_size=32),
    _decoder("BLOOM", "BloomForCausalLM", batches.prompts, **WORDS, **SPECIAL, hidden_size=32, n_layer=2, n_head=4),
    _decoder(
        "MPT", "MptForCausalLM", batches.prompts, **WORDS, **SPECIAL, d_model=32, n_layers=2, n_heads=4, max_seq_len=64
    ),
    _decoder("GPT-J", "GPTJForCausalLM", **GPT2, rotary_dim=4),
    _decoder(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        **WORDS,
        **POSITIONS,
        **SPECIAL,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=12,
    ),
    _decoder("CodeGen", "CodeGenForCausalLM", **GPT2, rotary_dim=4),
    _decoder(
        "XGLM",
        "XGLMForCausalLM",
        **WORDS,
        **POSITIONS,
        **SPECIAL,
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=48,
    ),
    _decoder(
        "Mamba",
        "MambaForCausalLM",
        batches.prompts,
        **WORDS,
        **SPECIAL,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
    ),
)
