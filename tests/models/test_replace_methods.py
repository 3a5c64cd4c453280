"""Which layers of a transformers model are replaced, by which method, and what is refused before anything changes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import smyrf
from small_transformers import EXACT, KERNEL, SIZES, TOKENS, bert, both, run, t5, text
from smyrf.call import Reason
from smyrf.models.assignment import choose
from smyrf.models.plan import LayerPlan
from smyrf.models.report import Layer
from smyrf.models.transformers import ATTRIBUTE, find_attention, smyrf_attention

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    MPNetConfig,
    MPNetModel,
    T5EncoderModel,
)

# Layers


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
    report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    assert [layer.name for layer in report.layers] == [f"encoder.encoder.layer.{i}.attention.self" for i in range(2)]
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)
    smyrf.restore_attention(model)
    assert torch.equal(run(model, arguments), dense)


def test_a_subclass_that_calls_the_layer_above_is_found():
    class Mine(BertModel.__init__.__globals__["BertSelfAttention"]):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = bert()
    model.encoder.layer[0].attention.self.__class__ = Mine
    assert len(smyrf.replace_attention(model, smyrf.Tangent(0.25)).replaced) == 2


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
    assert report.dense[0].reason is Reason.NOT_DISPATCHED
    assert report.dense[0].why == "MultiheadAttention does not ask transformers for its attention"
    assert len(report.replaced) == 2


def test_t5_keeps_its_bias_and_its_cross_attention_is_replaced():
    report = smyrf.replace_attention(t5(), smyrf.Tangent(0.25))
    assert {layer.name.split(".")[-1] for layer in report.replaced} == {"EncDecAttention"}
    assert {layer.reason for layer in report.dense} == {Reason.POSITION_BIAS}


def test_a_layer_without_a_report_says_so():
    assert Layer("x", smyrf.Dense(), reason=Reason.ASKED, detail="why").cells() == ("x", "dense", "why")
    assert Layer("x", smyrf.Dense(), reason=Reason.ASKED).cells() == ("x", "dense", "Dense was asked for")


# Methods


def test_a_method_for_each_layer():
    methods = (smyrf.Tangent(0.25), smyrf.Dense())
    model, arguments = bert(), text()
    report = smyrf.replace_attention(model, methods)
    assert [layer.method for layer in report.layers] == list(methods)
    assert [layer.reason for layer in report.layers] == [None, Reason.ASKED]
    run(model, arguments)
    assert report.layers[0].calls.served == 1
    assert report.layers[1].calls.dense == {Reason.ASKED: 1}
    report = smyrf.replace_attention(model, {"encoder.layer.1.attention.self": smyrf.Smyrf(2, 16)})
    assert [layer.reason for layer in report.layers] == [Reason.NOT_GIVEN, None]


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
    assert [(layer.reason, layer.why) for layer in report.dense] == [(Reason.PLANNED, "dense is as fast")] * 2
    smyrf.restore_attention(model)


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


def test_below_the_length_it_was_tuned_for_a_layer_is_dense():
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    plan = plan_of((names[0], smyrf.Tangent(0.2), 200, ""), (names[1], smyrf.Tangent(0.3), 400, ""))
    model = bert()
    report = smyrf.replace_attention(model, plan)
    run(model, text(300))
    assert report.layers[0].calls.served == 1
    assert report.layers[1].calls.dense == {Reason.FEW_KEYS: 1}
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


# What is refused


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


def test_a_method_for_each_head_has_to_fit_the_heads():
    model = bert()
    with pytest.raises(ValueError, match="has 3 methods, but the layer has 4 heads"):
        smyrf.replace_attention(model, smyrf.PerHead((smyrf.Tangent(0.25),) * 3))
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_that_is_asked_for_and_cannot_be_replaced_raises():
    model = t5()
    name = "decoder.block.0.layer.0.SelfAttention"
    with pytest.raises(ValueError, match=f"layer '{name}' cannot use another method: a position bias"):
        smyrf.replace_attention(model, {name: smyrf.Tangent()})
    assert model.decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MPNetModel(MPNetConfig(**SIZES)), "MPNetModel does not ask transformers for its attention"),
        (lambda: t5(T5EncoderModel), "a position bias is added to its scores"),
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
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "packs texts into one row"),
        ({"cache": object()}, "paged cache"),
    ],
)
def test_what_cannot_be_honoured_is_refused_aloud(arguments, words):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=words):
        smyrf_attention(nn.Linear(1, 1), x, x, x, None, **arguments)


def test_attention_weights_are_none_as_with_sdpa(monkeypatch):
    warned = []
    monkeypatch.setattr("smyrf.models.transformers.logger.warning_once", warned.append)
    model, arguments = bert(), text(20)
    dense = model(**arguments, output_attentions=True)
    smyrf.replace_attention(model, EXACT)
    out = model(**arguments, output_attentions=True)
    assert torch.equal(out.last_hidden_state, dense.last_hidden_state)
    assert out.attentions == dense.attentions
    assert warned and all("output_attentions=True" in text and "eager" in text for text in warned)


# Backends


@pytest.mark.parametrize("method", [EXACT, smyrf.Tangent(0.25)], ids=["exact", "approximate"])
def test_the_named_backend_serves_the_calls(monkeypatch, method):
    named = []

    def attention(*args, backend, **options):
        named.append(backend)
        return smyrf.attention(*args, backend=backend, **options)

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
    model = bert()
    report = smyrf.replace_attention(model, method, backend="reference")
    run(model, text())
    assert (named, report.calls.served) == (["reference"] * 2, 2)
    smyrf.replace_attention(model, smyrf.Tangent(0.25))
    run(model, text())
    assert named[2:] == [None] * 2


def test_a_plan_brings_its_backend(monkeypatch):
    named = []

    def attention(*args, backend, **options):
        named.append(backend)
        return smyrf.attention(*args, backend=backend, **options)

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    plan = replace(plan_of(*((name, smyrf.Tangent(0.2), 0, "") for name in names)), backend="reference")
    model = bert()
    for backend in (None, "torch"):
        smyrf.replace_attention(model, plan, backend=backend)
        run(model, text())
    assert named == ["reference"] * 2 + ["torch"] * 2
    with pytest.raises(ValueError, match="backend='other' must be"):
        smyrf.replace_attention(model, replace(plan, backend="other"))


def test_an_unknown_backend_is_refused_before_anything_is_changed():
    model = bert()
    with pytest.raises(ValueError, match="backend='fastest' must be"):
        smyrf.replace_attention(model, smyrf.Tangent(0.25), backend="fastest")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_searched_once(monkeypatch):
    from smyrf.models import transformers as ours

    searched = []
    monkeypatch.setattr(ours, "find_attention", lambda model: searched.append(model) or find_attention(model))
    model = bert()
    smyrf.replace_attention(model, EXACT)
    assert len(searched) == 1
