"""Transformers models run with their attention replaced: exact mode is dense, masks count, PyTorch's tools work."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smyrf
from small_transformers import EXACT, KERNEL, MODELS, SIZES, TOKENS, bert, images, llama, run, text
from smyrf.call import Reason
from smyrf.models.report import Layer
from smyrf.models.transformers import ATTRIBUTE, Attached, smyrf_attention, smyrf_mask

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    CLIPConfig,
    CLIPModel,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
)
from transformers.cache_utils import DynamicCache  # noqa: E402

named = pytest.mark.parametrize(("build", "inputs"), [one[:2] for one in MODELS.values()], ids=MODELS)


@named
def test_exact_mode_is_dense_on_padded_batches_and_restore_is_bit_identical(build, inputs):
    model, arguments = build(), inputs()
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    assert report.calls.served >= len(report.replaced) > 0
    smyrf.restore_attention(model)
    assert torch.equal(run(model, arguments), dense)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())


@named
def test_an_exact_call_stays_dense_and_is_counted_as_such(build, inputs):
    model, arguments = build(), inputs()
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT)
    assert torch.equal(run(model, arguments), dense)
    assert report.calls.served == 0
    assert report.calls.dense[Reason.EXACT] >= len(report.replaced) > 0


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

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
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
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    assert torch.equal(model.generate(**prompt, **settings), dense)
    if name != "t5":  # the encoder has a bias, and the first query is alone
        assert report.calls.served
    assert report.calls.dense[Reason.ONE_QUERY]


def test_generate_attends_to_a_long_prompt_by_the_method():
    model, prompt = llama(), text(700, left=True)
    report = smyrf.replace_attention(model, smyrf.Tangent(0.2))
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (3, 704)
    assert report.calls.served == 2
    assert report.calls.dense == {Reason.ONE_QUERY: 6}


def test_queries_that_continue_a_cache_are_dense_and_right():
    model, arguments = llama(), text(120, batch=1)
    ids = arguments["input_ids"]
    dense = run(model, {"input_ids": ids})
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 40, 30], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), dense, atol=1e-4, rtol=1e-4)
    assert report.calls.served == 2
    assert report.calls.dense == {Reason.CONTINUES: 4}


def test_windows_shorter_than_the_text_stay_dense_and_are_listed():
    sizes = {**SIZES, **TOKENS, "num_key_value_heads": 2, "sliding_window": 50}
    model = MistralForCausalLM(MistralConfig(**sizes)).eval()
    long, short = text(100, left=True), text(40, left=True)
    dense = run(model, long), run(model, short)
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    assert all(layer.window == 50 for layer in report.layers)
    assert "dense beyond its window of 50 tokens" in str(report)
    torch.testing.assert_close(run(model, long), dense[0])
    assert report.calls.dense == {Reason.WINDOW: 2}
    torch.testing.assert_close(run(model, short), dense[1], atol=1e-4, rtol=1e-4)
    assert report.calls.served == 2


def test_layers_of_one_model_may_differ_in_their_windows():
    config = ModernBertConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=37,
        local_attention=32, cls_token_id=1, sep_token_id=2, **TOKENS,
    )  # fmt: skip
    model, arguments = ModernBertModel(config).eval(), text(100)
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    assert [layer.window is None for layer in report.layers] == [True, False, False, True]
    assert report.calls.served == 2
    assert report.calls.dense == {Reason.WINDOW: 2}


def test_packed_texts_stay_apart():
    model = llama()
    ids = torch.randint(5, 100, (1, 60))
    arguments = {"input_ids": ids, "position_ids": torch.cat([torch.arange(25), torch.arange(35)])[None]}
    arguments["use_cache"] = False  # with a cache transformers does not look for packed texts
    dense = run(model, arguments)
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    torch.testing.assert_close(run(model, arguments), dense)
    assert report.calls.dense == {Reason.OTHER_MASK: 2}


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
        report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
        for mask, expected in zip(masks, dense, strict=True):
            torch.testing.assert_close(model(ids, attention_mask=mask)[0], expected, atol=1e-4, rtol=1e-4)
    assert report.calls.served == 4
    assert report.calls.dense == {Reason.OTHER_MASK: 2, Reason.BIAS: 2}


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


def test_a_causal_mask_counts_whatever_a_layer_says_of_itself():
    """Moonshine and PaliGemma hand over is_causal=False with a causal mask, as PyTorch's function never reads both."""
    layer, (q, k, v) = nn.Linear(1, 1), torch.randn(3, 2, 4, 9, 8)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :4] = False
    mask = smyrf_mask(2, 9, 9, attention_mask=padding)
    expected = F.scaled_dot_product_attention(q, k, v, padding[:, None, None] & torch.ones(9, 9).tril().bool())
    for from_keys in (0, 100):
        setattr(layer, ATTRIBUTE, Attached(Layer("", EXACT, from_keys), [], KERNEL))
        out, _ = smyrf_attention(layer, q, k, v, mask, is_causal=False)
        torch.testing.assert_close(out.transpose(1, 2), expected)


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
        report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
        torch.testing.assert_close(model(**arguments).logits_per_image, dense, atol=1e-4, rtol=1e-4)
    assert len(report.replaced) == report.calls.served == 4


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


@pytest.mark.parametrize("build", [bert, llama])
def test_a_model_loaded_by_name_compiles_as_one_graph(build):
    torch._dynamo.reset()
    model = build(attn_implementation="smyrf")
    arguments = text(300, left=build is llama)
    eager = run(model, arguments)
    with smyrf.dense(model):
        assert not torch.allclose(run(model, arguments), eager, atol=1e-3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, arguments), eager, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("whole", [False, True], ids=["decoding steps", "prompt too"])
def test_generate_compiles_as_one_graph(whole):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, prompt = llama(attn_implementation="smyrf"), text(300, batch=2, left=True)
    settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    eager = model.generate(**prompt, **settings, disable_compile=True)
    if whole:
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        settings["disable_compile"] = True
    else:
        settings["compile_config"] = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
        settings["compile_config"]._compile_all_devices = True  # transformers compiles only on GPUs otherwise
    assert torch.equal(model.generate(**prompt, **settings), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


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


def test_half_precision_stays_half():
    model, arguments = bert().to(torch.bfloat16), text(300)
    dense = run(model, arguments).float()
    smyrf.replace_attention(model, smyrf.Tangent(0.9))
    fast = run(model, arguments)
    assert fast.dtype == torch.bfloat16
    assert (fast.float() - dense).norm() < 0.1 * dense.norm()
