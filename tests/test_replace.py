"""Transformers models whose attention is replaced: exact mode is dense, masks count, and there is a way back."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smyrf
from smyrf.models.choice import choose
from smyrf.models.report import Layer
from smyrf.tuning.plan import LayerPlan

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache  # noqa: E402

from smyrf.models.transformers import ATTRIBUTE, Attached, smyrf_attention, smyrf_mask  # noqa: E402

transformers.utils.logging.set_verbosity_error()

EXACT = smyrf.Smyrf(n_hashes=2, cluster_size=4096)
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
named = pytest.mark.parametrize(("build", "inputs"), [one[:2] for one in MODELS.values()], ids=MODELS)


@torch.no_grad()
def run(model, inputs):
    out = model(**inputs)[0]
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return out if mask is None else out[mask.bool()]


@named
def test_exact_mode_is_dense_on_padded_batches_and_restore_is_bit_identical(build, inputs):
    model, arguments = build(), inputs()
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    assert report.calls.served >= len(report.replaced) > 0
    smyrf.restore_attention(model)
    assert torch.equal(run(model, arguments), dense)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())


@named
def test_a_mask_matters_in_these_models(build, inputs):
    model, arguments = build(), inputs()
    if "attention_mask" not in arguments:
        pytest.skip("images and sounds have no padding here")
    unmasked = {**arguments, "attention_mask": torch.ones_like(arguments["attention_mask"])}
    last = slice(-1, None)  # of a row that is padded
    with torch.no_grad():
        far = (model(**arguments)[0] - model(**unmasked)[0])[last].abs().max()
    assert far > 0.01


@named
def test_gradients_flow_and_weights_are_interchangeable(build, inputs):
    model, arguments = build(), inputs()
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(**arguments)[0].square().mean()
    loss.backward()
    used = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    optimizer.step()  # trained with one attention …
    with smyrf.dense(model):  # … and run with the other
        inside = run(model, arguments)
    smyrf.restore_attention(model)
    assert torch.equal(run(model, arguments), inside)
    model.zero_grad()
    model(**arguments)[0].square().mean().backward()
    assert used == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("method", [smyrf.Smyrf(2, 32), smyrf.Tangent(0.2)], ids=["smyrf", "tangent"])
@pytest.mark.parametrize("name", ["bert", "llama, padded left", "llama, padded right"])
def test_layers_attend_as_smyrf_attention_does(monkeypatch, name, method):
    """The arguments that reach `smyrf.attention` are those of dense attention: mask, scale, causality, heads."""
    build, inputs, causal = MODELS[name]
    model, arguments = build(), inputs()
    seen = []

    def attention(q, k, v, *, key_mask, is_causal, scale, enable_gqa, **rest):
        out = smyrf.attention(
            q, k, v, key_mask=key_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, **rest
        )
        mask = key_mask[:, None, None]
        if is_causal:
            mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        seen.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa))
        assert rest["method"] == method
        assert torch.equal(key_mask, arguments["attention_mask"].bool())
        assert is_causal == causal
        return out

    monkeypatch.setattr("smyrf.models.transformers.attention", attention)
    exact, original = [], F.scaled_dot_product_attention

    def remember(*args, **kwargs):
        exact.append(original(*args, **kwargs))
        return exact[-1]

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", remember)
        run(model, arguments)
    smyrf.replace_attention(model, method)
    run(model, arguments)
    torch.testing.assert_close(seen[0], exact[0], atol=1e-5, rtol=1e-5)  # later layers see other inputs
    assert len(seen) == len(exact) == 2


@named
def test_masks_stay_with_their_rows(build, inputs):
    model, arguments = build(), inputs()
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    order = torch.tensor([2, 0, 1] if len(next(iter(arguments.values()))) == 3 else [1, 0])
    with torch.no_grad():
        plain = model(**arguments)[0]
        moved = model(**{name: value[order] for name, value in arguments.items()})[0]
    torch.testing.assert_close(moved, plain[order], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, one in MODELS.items() if one[2] and "right" not in name])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}])
def test_generate_gives_the_same_tokens(name, options):
    build, inputs, _ = MODELS[name]
    model = build()
    prompt = {key: value for key, value in inputs().items() if not key.startswith("decoder")}
    settings = {"max_new_tokens": 9, "do_sample": False, **options}
    dense = model.generate(**prompt, **settings)
    report = smyrf.replace_attention(model, EXACT)
    assert torch.equal(model.generate(**prompt, **settings), dense)
    if name != "t5":  # the encoder has a bias, and the first query is alone
        assert report.calls.served
    assert report.calls.dense["one query: a step of decoding"]


def test_generate_attends_to_a_long_prompt_by_the_method():
    model, prompt = llama(), text(700, left=True)
    report = smyrf.replace_attention(model, smyrf.Tangent(0.2))
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (3, 704)
    assert report.calls.served == 2
    assert report.calls.dense == {"one query: a step of decoding": 6}


def test_queries_that_continue_a_cache_are_dense_and_right():
    model, arguments = llama(), text(120, batch=1)
    ids = arguments["input_ids"]
    dense = run(model, {"input_ids": ids})
    report = smyrf.replace_attention(model, EXACT)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 40, 30], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), dense, atol=1e-4, rtol=1e-4)
    assert report.calls.served == 2
    assert report.calls.dense == {"its queries continue a cache": 4}


def test_windows_shorter_than_the_text_stay_dense_and_are_listed():
    sizes = {**SIZES, **TOKENS, "num_key_value_heads": 2, "sliding_window": 50}
    model = MistralForCausalLM(MistralConfig(**sizes)).eval()
    long, short = text(100, left=True), text(40, left=True)
    dense = run(model, long), run(model, short)
    report = smyrf.replace_attention(model, EXACT)
    assert all(layer.window == 50 for layer in report.layers)
    assert "dense beyond its window of 50 tokens" in str(report)
    torch.testing.assert_close(run(model, long), dense[0])
    assert report.calls.dense == {"its window is shorter than the text": 2}
    torch.testing.assert_close(run(model, short), dense[1], atol=1e-4, rtol=1e-4)
    assert report.calls.served == 2


def test_layers_of_one_model_may_differ_in_their_windows():
    config = ModernBertConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=37,
        local_attention=32, cls_token_id=1, sep_token_id=2, **TOKENS,
    )  # fmt: skip
    model, arguments = ModernBertModel(config).eval(), text(100)
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    assert [layer.window is None for layer in report.layers] == [True, False, False, True]
    assert report.calls.served == 2
    assert report.calls.dense == {"its window is shorter than the text": 2}


def test_packed_texts_stay_apart():
    model = llama()
    ids = torch.randint(5, 100, (1, 60))
    arguments = {"input_ids": ids, "position_ids": torch.cat([torch.arange(25), torch.arange(35)])[None]}
    arguments["use_cache"] = False  # with a cache transformers does not look for packed texts
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT)
    torch.testing.assert_close(run(model, arguments), dense)
    assert report.calls.dense == {"its mask is neither padding nor causal": 2}


def test_masks_that_a_user_has_made_are_honoured():
    model, arguments = bert(), text(60)
    ids = arguments["input_ids"]
    plain = arguments["attention_mask"].bool()[:, None, None]
    any_mask = torch.rand(3, 1, 60, 60) < 0.5
    any_mask |= torch.eye(60, dtype=torch.bool)
    bias = torch.zeros(3, 1, 1, 60).masked_fill(~plain, torch.finfo(torch.float32).min)
    masks = (plain, any_mask, bias, torch.randn(3, 1, 1, 60))
    with torch.no_grad():
        dense = [model(ids, attention_mask=mask)[0] for mask in masks]
        report = smyrf.replace_attention(model, EXACT)
        for mask, expected in zip(masks, dense, strict=True):
            torch.testing.assert_close(model(ids, attention_mask=mask)[0], expected, atol=1e-4, rtol=1e-4)
    assert report.calls.served == 4
    assert report.calls.dense == {
        "its mask is neither padding nor causal": 2,
        "its mask adds a bias to the scores": 2,
    }


def test_t5_keeps_its_bias_and_its_cross_attention_is_replaced():
    report = smyrf.replace_attention(t5(), smyrf.Tangent(0.25))
    assert {layer.name.split(".")[-1] for layer in report.replaced} == {"EncDecAttention"}
    assert {layer.reason for layer in report.dense} == {"a bias by position is added to its scores"}


def test_a_layer_that_is_asked_for_and_cannot_be_replaced_raises():
    model = t5()
    name = "decoder.block.0.layer.0.SelfAttention"
    with pytest.raises(ValueError, match=f"layer '{name}' cannot attend by another method: a bias by position"):
        smyrf.replace_attention(model, {name: smyrf.Tangent()})
    assert model.decoder.config._attn_implementation == "sdpa"


def test_towers_of_clip_are_both_replaced():
    sizes = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "initializer_range")}
    config = CLIPConfig(
        text_config={"vocab_size": 101, **sizes, **TOKENS}, vision_config={**sizes, "image_size": 32, "patch_size": 4}
    )
    model = CLIPModel(config).eval()
    arguments = {**text(60, batch=2), **images(32)}
    arguments["input_ids"][:, -20] = 2
    with torch.no_grad():
        dense = model(**arguments).logits_per_image
        report = smyrf.replace_attention(model, EXACT)
        torch.testing.assert_close(model(**arguments).logits_per_image, dense, atol=1e-4, rtol=1e-4)
    assert len(report.replaced) == report.calls.served == 4


def test_a_method_for_each_layer():
    methods = (smyrf.Tangent(0.25), smyrf.Dense())
    model, arguments = bert(), text()
    report = smyrf.replace_attention(model, methods)
    assert [layer.method for layer in report.layers] == list(methods)
    assert [layer.reason for layer in report.layers] == ["", "Dense was asked for"]
    run(model, arguments)
    assert report.layers[0].calls.served == 1
    assert report.layers[1].calls.dense == {"Dense was asked for": 1}
    report = smyrf.replace_attention(model, {"encoder.layer.1.attention.self": smyrf.Smyrf(2, 16)})
    assert [layer.reason for layer in report.layers] == ["no method was given for it", ""]


def plan_of(*choices):
    layers = [
        LayerPlan(i, method, method.key_visits(512), 512, 0.1, None, reason, name, from_keys)
        for i, (name, method, from_keys, reason) in enumerate(choices)
    ]
    return smyrf.Plan(tuple(layers), 0.1, "")


def test_a_plan_is_followed_and_kept_as_json(tmp_path):
    model, arguments = bert(), text(300)
    plan = smyrf.tune(model, arguments, max_error=0.2, fallback=False)
    assert [layer.name for layer in plan.layers] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    plan.save(tmp_path / "plan.json")
    report = smyrf.replace_attention(model, smyrf.Plan.load(tmp_path / "plan.json"))
    assert tuple(layer.method for layer in report.layers) == plan.methods
    wrapped = bert(BertForSequenceClassification)
    report = smyrf.replace_attention(wrapped, plan)  # made for the model inside
    assert [layer.name for layer in report.layers] == [f"bert.{layer.name}" for layer in plan.layers]
    assert tuple(layer.method for layer in report.layers) == plan.methods
    assert smyrf.tune(model, arguments, max_error=0.2, fallback=False) == plan  # replaced or not


def test_a_plan_that_leaves_all_dense_costs_nothing():
    model = bert()
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    report = smyrf.replace_attention(model, plan_of(*((name, smyrf.Dense(), 0, "dense is as fast") for name in names)))
    assert model.config._attn_implementation == "sdpa"
    assert [layer.reason for layer in report.dense] == ["dense is as fast"] * 2
    smyrf.restore_attention(model)


def test_below_the_length_it_was_tuned_for_a_layer_is_dense():
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    plan = plan_of((names[0], smyrf.Tangent(0.2), 200, ""), (names[1], smyrf.Tangent(0.3), 400, ""))
    model = bert()
    report = smyrf.replace_attention(model, plan)
    run(model, text(300))
    assert report.layers[0].calls.served == 1
    assert report.layers[1].calls.dense == {"fewer keys than it was tuned for": 1}
    assert "dense below 400 keys" in str(report)


def test_a_layer_that_is_shared_gets_the_costliest_of_its_methods():
    config = AlbertConfig(**SIZES, **TOKENS, embedding_size=16)
    model = AlbertModel(config).eval()
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    plan = plan_of((name, smyrf.Tangent(0.2), 0, ""), (name, smyrf.Tangent(0.4), 0, ""))
    report = smyrf.replace_attention(model, plan)
    assert [layer.method for layer in report.layers] == [smyrf.Tangent(0.4)]
    run(model, text(100))
    assert report.calls.served == 2


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        (smyrf.Tangent, TypeError, "must be an instance"),
        ("tangent", TypeError, "method='tangent' must be"),
        ((smyrf.Tangent(),), ValueError, "1 methods for the 2 attention layers"),
        ((), ValueError, "0 methods for the 2 attention layers"),
        ({"encoder.layer.7": smyrf.Tangent()}, ValueError, "no layer 'encoder.layer.7'"),
        ({}, ValueError, "method={} gives no layer a method"),
        ({3: smyrf.Tangent()}, TypeError, "3 must be the name of a layer"),
        ({"encoder.layer.0.attention.self": 0.25}, TypeError, "method=0.25 must be"),
        (plan_of(("", smyrf.Tangent(), 0, "")), ValueError, "does not name layers"),
        (plan_of(("attention.self", smyrf.Tangent(), 0, "")), ValueError, "fits the layers"),
        (
            plan_of(("decoder.layer.0", smyrf.Tangent(), 0, "")),
            ValueError,
            "'decoder.layer.0' of the plan fits no layer",
        ),
    ],
)
def test_methods_that_do_not_fit_are_refused_before_anything_is_changed(method, error, words):
    model = bert()
    with pytest.raises(error, match=words):
        smyrf.replace_attention(model, method)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MPNetModel(MPNetConfig(**SIZES)), "MPNetModel does not ask transformers for its attention"),
        (lambda: t5(T5EncoderModel), "a bias by position is added to its scores"),
        (
            lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **TOKENS, num_key_value_heads=2, head_dim=8)),
            "Gemma2Model does not support scaled_dot_product_attention",
        ),
        (lambda: nn.TransformerEncoderLayer(8, 2), "has no attention layer of transformers .smyrf.intercept_sdpa"),
    ],
    ids=["mpnet", "t5", "gemma2", "torch"],
)
def test_a_model_with_nothing_to_replace_raises_before_anything_is_changed(build, words):
    model = build()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ValueError, match=words):
        smyrf.replace_attention(model, smyrf.Tangent())
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())


@pytest.mark.parametrize("function", [lambda x: smyrf.replace_attention(x, smyrf.Tangent()), smyrf.restore_attention])
def test_what_is_not_a_model_is_named(function):
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not str"):
        function("bert-base-uncased")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0}, "softcap was given to Linear: its scores are capped"),
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "packs texts into one row"),
        ({"cache": object()}, "paged cache"),
    ],
)
def test_what_cannot_be_honoured_is_refused_aloud(arguments, words):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=words):
        smyrf_attention(nn.Linear(1, 1), x, x, x, None, **arguments)


def test_weights_of_attention_are_refused_by_a_model():
    model, arguments = bert(), text(20)
    smyrf.replace_attention(model, EXACT)
    with pytest.raises(ValueError, match="output_attentions=True was given to BertSelfAttention"):
        model(**arguments, output_attentions=True)


def test_by_name_at_loading_and_after_saving(tmp_path):
    model, arguments = bert(), text()
    dense = run(model, arguments)
    smyrf.replace_attention(model, smyrf.Tangent(0.25))
    fast = run(model, arguments)
    model.save_pretrained(tmp_path)
    assert "smyrf" not in (tmp_path / "config.json").read_text()
    loaded = BertModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, arguments), dense)
    loaded = BertModel.from_pretrained(tmp_path, attn_implementation="smyrf")  # Tangent(0.25) by default
    assert torch.equal(run(loaded, arguments), fast)
    with smyrf.dense(loaded):
        assert torch.equal(run(loaded, arguments), dense)
    assert torch.equal(run(loaded, arguments), fast)
    smyrf.restore_attention(loaded)
    assert torch.equal(run(loaded, arguments), dense)


def test_replacing_twice_still_goes_back_to_the_start():
    model, arguments = bert(attn_implementation="eager"), text(40)
    dense = run(model, arguments)
    smyrf.replace_attention(model, EXACT)
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    with smyrf.dense(model):
        assert model.config._attn_implementation == "eager"
        assert torch.equal(run(model, arguments), dense)
    assert model.config._attn_implementation == "smyrf_replaced"
    smyrf.restore_attention(model)
    smyrf.restore_attention(model)  # once more does nothing
    assert model.config._attn_implementation == "eager"
    assert torch.equal(run(model, arguments), dense)


def test_a_copy_is_a_model_of_its_own():
    model, arguments = bert(), text()
    report = smyrf.replace_attention(model, smyrf.Tangent(0.25))
    other = copy.deepcopy(model)
    assert torch.equal(run(other, arguments), run(model, arguments))
    assert report.calls.served == 2
    smyrf.restore_attention(other)
    assert (other.config._attn_implementation, model.config._attn_implementation) == ("sdpa", "smyrf_replaced")


def test_models_inside_other_modules_are_found():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = bert()
            self.head = nn.Linear(32, 2)

        def forward(self, **arguments):
            return (self.head(self.encoder(**arguments)[0]),)

    model, arguments = Classifier(), text(100)
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT)
    assert [layer.name for layer in report.layers] == [f"encoder.encoder.layer.{i}.attention.self" for i in range(2)]
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    smyrf.restore_attention(model)
    assert torch.equal(run(model, arguments), dense)


def test_dense_is_left_by_an_exception_too():
    model = bert()
    smyrf.replace_attention(model, EXACT)
    with pytest.raises(RuntimeError, match="inside"), smyrf.dense(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "smyrf_replaced"


def test_activation_checkpointing_gives_the_same_gradients():
    model, arguments = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), text(200)
    model.train()
    smyrf.replace_attention(model, smyrf.Smyrf(2, 16))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(1)
        model(**arguments)[0].square().mean().backward()
        gradients.append(model.encoder.layer[0].attention.self.query.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_dropout_of_the_weights_is_honoured():
    model, arguments = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5).train(), text(100)
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    assert not torch.equal(run(model, arguments), run(model, arguments))


def test_a_replaced_model_compiles():
    torch._dynamo.reset()
    model, arguments = bert(), text(200)
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    eager = run(model, arguments)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(run(compiled, arguments), eager, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


def test_threads_may_share_a_replaced_model():
    model, arguments = bert(), text()
    report = smyrf.replace_attention(model, smyrf.Tangent(0.3))
    expected = run(model, arguments)
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(model, arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, expected) for one in found)
    assert report.calls.served == 10


def test_the_mask_is_never_n_by_n():
    padding = torch.ones(2, 6, dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    assert smyrf_mask(**sizes, attention_mask=padding) is None
    padding[1, 4:] = False
    assert smyrf_mask(**sizes, attention_mask=padding).shape == (2, 6)
    plain = {"mask_function": transformers.masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}
    mask = smyrf_mask(**sizes, **plain, allow_is_bidirectional_skip=True, attention_mask=padding)
    assert mask.shape == (2, 1, 1, 6)
    # places of a static cache that are not in use yet
    sizes["kv_length"] = 9
    assert smyrf_mask(**sizes, attention_mask=padding).shape == (2, 9)
    assert smyrf_mask(**sizes, attention_mask=padding[:1]) is None


def test_half_precision_stays_half():
    model, arguments = bert().to(torch.bfloat16), text(300)
    dense = run(model, arguments).float()
    smyrf.replace_attention(model, smyrf.Tangent(0.9))
    fast = run(model, arguments)
    assert fast.dtype == torch.bfloat16
    assert (fast.float() - dense).norm() < 0.1 * dense.norm()


def test_a_layer_without_a_report_says_so():
    assert Layer("x", smyrf.Dense(), reason="why").cells() == ("x", "dense", "why")


def test_a_causal_mask_counts_whatever_a_layer_says_of_itself():
    """Moonshine and PaliGemma hand over is_causal=False with a causal mask, as PyTorch's function never reads both."""
    layer, (q, k, v) = nn.Linear(1, 1), torch.randn(3, 2, 4, 9, 8)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :4] = False
    mask = smyrf_mask(2, 9, 9, attention_mask=padding)
    expected = F.scaled_dot_product_attention(q, k, v, padding[:, None, None] & torch.ones(9, 9).tril().bool())
    for method, from_keys in ((EXACT, 0), (EXACT, 100)):
        setattr(layer, ATTRIBUTE, Attached(Layer("", method, from_keys), []))
        out, _ = smyrf_attention(layer, q, k, v, mask, is_causal=False)
        torch.testing.assert_close(out.transpose(1, 2), expected)


def test_attention_that_does_not_ask_is_listed():
    class Pooled(transformers.PreTrainedModel):
        config_class = BertConfig
        _supports_sdpa = True

        def __init__(self, config):
            super().__init__(config)
            self.encoder = BertModel(config)
            self.head = nn.MultiheadAttention(32, 4, batch_first=True)
            self.post_init()

    config = BertConfig(**SIZES, **TOKENS)
    report = smyrf.replace_attention(Pooled(config), smyrf.Tangent(0.25))
    assert [layer.name for layer in report.dense] == ["head"]
    assert report.dense[0].reason == "MultiheadAttention does not ask transformers for its attention"
    assert len(report.replaced) == 2


def test_a_plan_may_hold_calls_that_cannot_be_replaced():
    model = t5()
    arguments = both(60)
    plan = smyrf.tune(model, arguments, max_error=0.3, fallback=False)
    report = smyrf.replace_attention(model, plan)  # self-attention has a bias, and its calls are in the plan
    assert all(layer.reason for layer in report.layers if "SelfAttention" in layer.name)


def test_a_name_that_is_right_is_preferred_to_one_that_ends_alike():
    plan = plan_of(("layer.0", smyrf.Tangent(0.2), 0, ""), ("encoder.layer.0", smyrf.Tangent(0.3), 0, ""))
    found = choose(plan, ["layer.0", "encoder.layer.0"], {})
    assert [found[name].method.budget for name in ("layer.0", "encoder.layer.0")] == [0.2, 0.3]


def test_only_what_was_given_is_replaced():
    """A config may be shared: by the other half of a model, by another model, by one that is made of it."""
    model, arguments = bart(), both()
    dense = run(model, arguments)
    smyrf.replace_attention(model.get_encoder(), EXACT)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)

    config = BertConfig(**SIZES, **TOKENS, max_position_embeddings=1024)
    first, second = BertModel(config).eval(), BertModel(config).eval()
    arguments = text()
    dense = run(second, arguments)
    report = smyrf.replace_attention(first, smyrf.Tangent(0.1))
    assert torch.equal(run(second, arguments), dense)
    third = BertModel(first.config).eval()
    third.load_state_dict(second.state_dict())
    assert torch.equal(run(third, arguments), dense)
    assert report.calls.served == 0


def test_a_subclass_that_calls_the_layer_above_is_found():
    class Mine(BertModel.__init__.__globals__["BertSelfAttention"]):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = bert()
    model.encoder.layer[0].attention.self.__class__ = Mine
    assert len(smyrf.replace_attention(model, smyrf.Tangent(0.25)).replaced) == 2


def test_blocks_of_dense_may_overlap():
    model = bert()
    layer = smyrf.nn.SmyrfAttention(smyrf.Tangent(0.25))
    smyrf.replace_attention(model, EXACT)
    both_of_them = nn.ModuleList([model, layer])
    first, second = smyrf.dense(both_of_them), smyrf.dense(both_of_them)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (model.config._attn_implementation, layer.method) == ("sdpa", smyrf.Dense())
    second.__exit__(None, None, None)
    assert (model.config._attn_implementation, layer.method) == ("smyrf_replaced", smyrf.Tangent(0.25))


@pytest.mark.parametrize("change", [smyrf.restore_attention, lambda model: smyrf.replace_attention(model, EXACT)])
def test_nothing_is_changed_inside_a_block_of_dense(change):
    model = bert()
    smyrf.replace_attention(model, EXACT)
    with smyrf.dense(model), pytest.raises(ValueError, match=r"inside a block of smyrf\.dense"):
        change(model)
    assert model.config._attn_implementation == "smyrf_replaced"


def test_what_a_user_has_set_since_then_stays():
    model = bert()
    smyrf.replace_attention(model, EXACT)
    model.set_attn_implementation("eager")
    smyrf.restore_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_method_for_each_head_has_to_fit_the_heads():
    model = bert()
    with pytest.raises(ValueError, match="has 3 methods, but the layer has 4 heads"):
        smyrf.replace_attention(model, smyrf.PerHead((smyrf.Tangent(0.25),) * 3))
    assert model.config._attn_implementation == "sdpa"
